"""The native core's counters of this process."""

from __future__ import annotations

from ray_serve_grpc import config

#: lanes that the core has
CARRIED = ("unix", "tcp")

#: A counter of calls is named calls_<lane>_<kind>, such as calls_unix_unary.
CALLS = "calls_"


def lanes() -> list[str]:
    """Lanes that calls of this process may take, in the order they are tried."""
    allowed = config.settings().lanes
    return [lane for lane in CARRIED if lane in allowed]


def calls() -> dict[str, dict[str, int]]:
    """lane -> kind of call -> calls, of this process as caller and as replica; empty without a native core."""
    try:
        from ray_serve_grpc import _native
    except ImportError:
        return {}
    counted: dict[str, dict[str, int]] = {}
    for name, value in _native.statistics().items():
        lane, separator, kind = name.removeprefix(CALLS).partition("_")
        if name.startswith(CALLS) and separator:
            counted.setdefault(lane, {})[kind] = value
    return counted
