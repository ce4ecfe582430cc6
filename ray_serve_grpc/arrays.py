"""A single numpy array as a message: its type, its shape and its memory.

What numpy itself puts into a pickle, and looks up when it reads one, costs several times as much
as everything else that serializing a small array does. So a request of one array, or a response
that is one, is written without it. Arrays inside of other values are pickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_serve_grpc.serializers import BytesLike, Encoded

#: First byte of such a body. A pickle of protocol 2 or later begins with 0x80.
MARK = b"a"

#: Buffers below this many bytes are cheaper to copy into the body than to send beside it.
OUT_OF_BAND = 4096

#: `dtype.char` of numbers that look the same in every process.
_NUMBERS = frozenset("?bBhHiIlLqQefdFD")


def is_simple(value: Any) -> bool:
    """Whether `encode` takes it: a writable numpy array of numbers, contiguous in C's or in Fortran's order."""
    kind = type(value)
    if kind.__name__ != "ndarray" or kind.__module__ != "numpy":
        return False
    dtype, flags = value.dtype, value.flags
    return dtype.char in _NUMBERS and dtype.metadata is None and flags.forc and flags.writeable


def encode(array: Any) -> Encoded:
    buffer = pickle.PickleBuffer(array)
    is_large = array.nbytes >= OUT_OF_BAND
    order = "C" if array.flags.c_contiguous else "F"
    head = MARK + pickle.dumps((array.shape, array.dtype.str, None if is_large else buffer, order), 5)
    return head, [buffer.raw()] if is_large else ()


def is_array(body: BytesLike) -> bool:
    return type(body) is bytes and body[:1] == MARK


def decode(body: bytes, buffers: Sequence[BytesLike]) -> Any:
    from numpy import ndarray

    shape, dtype, data, order = pickle.loads(memoryview(body)[1:])
    return ndarray(shape, dtype, buffers[0] if data is None else data, order=order)
