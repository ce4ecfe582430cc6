"""The lanes of this process: which its settings allow, and its share of memory for the shm lane."""

from __future__ import annotations

import os

from ray_serve_grpc import config

#: Part of the machine's memory that one process may use where the setting says nothing.
SHARE = 10


def allowed() -> list[str]:
    """In the order in which they are tried. "shm" rides on "unix": it needs one to pass its descriptors."""
    lanes = config.settings().lanes
    order = ("shm", "unix", "tcp") if "unix" in lanes else ("tcp",)
    return [lane for lane in order if lane in lanes]


def prepare() -> None:
    """Tells the core how much shared memory it may have. To be called before a channel or a server is made."""
    from ray_serve_grpc import _native

    _native.set_shm_limit(shm_limit() if "shm" in allowed() else 0)


def shm_limit() -> int:
    """Bytes."""
    limit = config.settings().shm_limit
    return limit if limit >= 0 else memory() // SHARE


def memory() -> int:
    """Bytes that this process may use at most: the machine's, or its control group's when that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                return min(total, int(file.read()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return total
