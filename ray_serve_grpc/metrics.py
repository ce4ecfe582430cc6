"""The native core's counters of this process."""

from __future__ import annotations

from ray_serve_grpc import config

#: lanes that the core has
CARRIED = ("unix", "tcp")


def lanes() -> list[str]:
    """Lanes that calls of this process may take, in the order they are tried."""
    allowed = config.settings().lanes
    return [lane for lane in CARRIED if lane in allowed]


def calls() -> dict[str, dict[str, int]]:
    """lane -> kind of call -> calls that this process made; empty without a native core."""
    return counted("client_calls_")


def served() -> dict[str, dict[str, int]]:
    """lane -> kind of call -> calls that came to this process."""
    return counted("server_calls_")


def counted(prefix: str) -> dict[str, dict[str, int]]:
    """The counters named <prefix><lane>_<kind>."""
    try:
        from ray_serve_grpc import _native
    except ImportError:
        return {}
    counts: dict[str, dict[str, int]] = {}
    for name, value in _native.statistics().items():
        lane, separator, kind = name.removeprefix(prefix).partition("_")
        if name.startswith(prefix) and separator:
            counts.setdefault(lane, {})[kind] = value
    return counts
