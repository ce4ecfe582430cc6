"""The native core's counters of this process."""

from __future__ import annotations


def shared_memory() -> dict[str, int]:
    """What went through shared memory: messages and bytes sent, bytes of those passed on without a copy, …"""
    return {name.removeprefix("shm_"): value for name, value in statistics().items() if name.startswith("shm_")}


def calls() -> dict[str, dict[str, int]]:
    """lane -> kind of call -> calls that this process made; empty without a native core."""
    return counted("client_calls_")


def served() -> dict[str, dict[str, int]]:
    """lane -> kind of call -> calls that came to this process."""
    return counted("server_calls_")


def counted(prefix: str) -> dict[str, dict[str, int]]:
    """The counters named <prefix><lane>_<kind>."""
    counts: dict[str, dict[str, int]] = {}
    for name, value in statistics().items():
        lane, separator, kind = name.removeprefix(prefix).partition("_")
        if name.startswith(prefix) and separator:
            counts.setdefault(lane, {})[kind] = value
    return counts


def statistics() -> dict[str, int]:
    """All counters; none without a native core."""
    try:
        from ray_serve_grpc import _native
    except ImportError:
        return {}
    return _native.statistics()
