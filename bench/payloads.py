"""Sizes, and values of a size."""

from __future__ import annotations

import functools
import re
from typing import Any

UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}
SIZES = ("1KB", "10KB", "100KB", "500KB", "1MB", "2MB", "5MB", "10MB", "100MB")
KINDS = ("numpy", "bytes")


def parse_size(text: str) -> int:
    """Bytes. Raises ValueError."""
    match = re.fullmatch(r"(\d+)(B|KB|MB|GB)", text.strip().upper())
    if match is None:
        raise ValueError(f"{text!r} is no size: say 1KB, 500KB or 10MB")
    return int(match[1]) * UNITS[match[2]]


def format_size(size: int) -> str:
    for unit in ("GB", "MB", "KB"):
        if size >= UNITS[unit] and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]}{unit}"
    return f"{size}B"


def make(kind: str, size: int) -> Any:
    """`size` bytes that no compression and no page of zeros makes cheaper."""
    import numpy as np

    numbers = np.random.default_rng(size).random(-(-size // 8))
    data = numbers.view(np.uint8)[:size]
    if kind == "bytes":
        return data.tobytes()
    return data.view(np.float32) if size % 4 == 0 else data


made = functools.lru_cache(maxsize=4)(make)


def length(value: Any) -> int:
    return int(value.nbytes) if hasattr(value, "nbytes") else len(value)


def check(sent: Any, received: Any) -> None:
    """Cheap enough for every call: it has the size and both ends of what was sent."""
    if type(received) is not type(sent) or length(received) != length(sent):
        raise AssertionError(f"sent {length(sent)} bytes of {type(sent)}, got {type(received)}")
    if received[0] != sent[0] or received[-1] != sent[-1]:
        raise AssertionError("the answer is not what was sent")
