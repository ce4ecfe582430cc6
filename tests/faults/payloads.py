"""Bytes that both ends know, so that each can tell whether what came is what was meant for this very request."""

from __future__ import annotations

import zlib
from functools import cache

import numpy as np

MIB = 1 << 20

#: Longest piece there is.
LONGEST = 20 * MIB
_SLACK = MIB


@cache
def _known() -> np.ndarray:
    return np.random.default_rng(20).integers(0, 256, LONGEST + _SLACK, dtype=np.uint8)


def piece(name: str, size: int) -> np.ndarray:
    """`size` bytes that belong to `name`: another name has others."""
    start = zlib.crc32(name.encode()) % _SLACK
    return _known()[start : start + size]


def is_piece(name: str, size: int, given: object) -> bool:
    return isinstance(given, np.ndarray) and given.size == size and np.array_equal(given, piece(name, size))
