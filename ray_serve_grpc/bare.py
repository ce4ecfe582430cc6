"""A single numpy array, or large `bytes`, as a message without a pickle.

What numpy itself puts into a pickle, and looks up when it reads one, costs several times as much
as everything else that serializing a small array does. And the unpickler copies large `bytes`
under the interpreter's lock. So a request with one such argument, or a response that is one, is
written as it is. Inside of other values they are pickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ray_serve_grpc._native import to_bytes

if TYPE_CHECKING:
    from ray_serve_grpc.serializers import BytesLike, Encoded

#: First byte of a body that tells of an array; its data are in it or in the only buffer.
ARRAY = b"a"

#: A body that says that the only buffer is `bytes`. A pickle of protocol 2 or later begins with 0x80.
BYTES = b"b"

#: Arrays below this many bytes are cheaper to copy into the body than to send beside it.
OUT_OF_BAND = 4096

#: From this many bytes on `bytes` are sent from where they lie.
BY_REFERENCE = 64 * 1024

#: `dtype.char` of numbers that look the same in every process.
_NUMBERS = frozenset("?bBhHiIlLqQefdFD")


def encode(value: Any) -> Encoded | None:
    """None for what is to be pickled.

    It takes `bytes` of 64 KiB and more, and writable numpy arrays of numbers, contiguous in C's or in Fortran's order.
    """
    kind = type(value)
    if kind is bytes:
        return (BYTES, [value]) if len(value) >= BY_REFERENCE else None
    if kind.__name__ != "ndarray" or kind.__module__ != "numpy":
        return None
    dtype, flags = value.dtype, value.flags
    if dtype.char not in _NUMBERS or dtype.metadata is not None or not flags.forc or not flags.writeable:
        return None
    buffer = pickle.PickleBuffer(value)
    is_large = value.nbytes >= OUT_OF_BAND
    order = "C" if flags.c_contiguous else "F"
    head = ARRAY + pickle.dumps((value.shape, dtype.str, None if is_large else buffer, order), 5)
    return head, [buffer.raw()] if is_large else ()


def is_bare(body: BytesLike) -> bool:
    """Whether `encode` made it."""
    return type(body) is bytes and (body[:1] == ARRAY or body == BYTES)


def decode(body: bytes, buffers: Sequence[BytesLike]) -> Any:
    if body == BYTES:
        return to_bytes(buffers[0])
    from numpy import ndarray

    shape, dtype, data, order = pickle.loads(memoryview(body)[1:])
    return ndarray(shape, dtype, buffers[0] if data is None else data, order=order)
