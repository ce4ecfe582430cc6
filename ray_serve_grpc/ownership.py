"""Keeps a response as it was when user code returned it.

The buffers of a response are sent from the memory of the value itself, while user code runs on.
A replica that fills the same array for every request would overwrite an answer under way; with
actor calls and with Ray's own gRPC it may do that. So what somebody besides the response can
still write to is copied before it is queued, and what nobody else can reach, such as an array
made for this very response, is not.

Requests need none of this: a caller cannot know that its request was sent before the replica
answers it, and then all of it was.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any

from ray_serve_grpc._native import secure, snapshot

#: Buffers that Arrow hands out are immutable by its rules, whatever their flags say.
_IMMUTABLE_MODULES = ("pyarrow",)

#: Containers nested deeper than this are not looked into; what is in them is copied.
DEPTH = 4

#: Bytes whose copy costs more than a turn of the loop.
WORTH_A_TURN = 64 * 1024

#: Bytes whose copy would hold the loop for about half a millisecond.
WORTH_A_THREAD = 4 * 1024 * 1024


def secured(box: list[Any], buffers: Sequence[Any]) -> Sequence[Any]:
    """`buffers`, with copies of those that may change.

    Args:
        box: the response as its only item. The caller holds no other reference to it.
        buffers: memoryviews or bytes, as a codec made them from the response.
    """
    shared = _shared(box, buffers)
    return _with_copies(buffers, shared) if shared else buffers


async def secured_soon(box: list[Any], buffers: Sequence[Any]) -> Sequence[Any]:
    """`buffers`, with large ones secured off the loop. What is left to `secured` is small.

    Takes a turn of the loop first where that may save the copy: the future that brought a result from the thread of
    user code refers to it until the turn is over.
    """
    shared = _shared(box, buffers)
    if not shared or _size(buffers, shared) < WORTH_A_TURN:
        return buffers
    lent = {index: kept for index in shared if (kept := snapshot(buffers[index])) is not None}
    if lent:
        buffers = [lent.get(index, buffer) for index, buffer in enumerate(buffers)]
        if len(lent) == len(shared):
            return buffers
    await asyncio.sleep(0)
    shared = _shared(box, buffers)
    if _size(buffers, shared) < WORTH_A_THREAD:
        return buffers
    return await asyncio.get_running_loop().run_in_executor(None, _with_copies, buffers, shared)


def _size(buffers: Sequence[Any], shared: list[int]) -> int:
    return sum(buffers[index].nbytes for index in shared)


def _shared(box: list[Any], buffers: Sequence[Any]) -> list[int]:
    """Which of `buffers` somebody else can write to, as far as can be told."""
    mine: set[int] | None = None
    shared = []
    for index, buffer in enumerate(buffers):
        if type(buffer) is memoryview:
            if mine is None:
                mine = set()
                _reach(box, 0, mine, DEPTH)
            if not _is_safe(buffer, mine):
                shared.append(index)
    return shared


def _with_copies(buffers: Sequence[Any], shared: list[int]) -> list[Any]:
    copies = list(buffers)
    for index in shared:
        copies[index] = secure(buffers[index])
    return copies


def _is_safe(buffer: memoryview, mine: set[int]) -> bool:
    owner = buffer.obj
    kind = type(owner)
    if kind is bytes or kind.__module__.partition(".")[0] in _IMMUTABLE_MODULES or id(owner) in mine:
        return True
    array = _array_type()
    if array is None or not isinstance(owner, array):
        return False
    if getattr(owner, "base", None) is not None and id(owner.base) in mine:
        return True  # the pickler's own transposed view of an array in Fortran's order
    return not _writable_somewhere(owner, array)


def _writable_somewhere(array: Any, array_type: type) -> bool:
    """Whether the memory of a read-only array can be written to through an array it is a view of."""
    while isinstance(array, array_type):
        if array.flags.writeable:  # type: ignore[attr-defined]
            return True
        array = array.base  # type: ignore[attr-defined]
    try:
        return array is not None and not memoryview(array).readonly
    except TypeError:  # memory of something that does not say
        return True


def _reach(container: Any, key: Any, mine: set[int], depth: int) -> None:
    """Adds the arrays that are reachable from `container[key]` and from nowhere else.

    Everything is looked at through its container, so that the references to it are always the
    same few: the container's and those of this function.
    """
    kind = type(container[key])
    if kind is _array_type() or kind is bytearray:
        # One more: the view that is to be sent.
        if getrefcount(container[key]) <= _IN_CONTAINER + 1 and _base_is_mine(container[key]):
            mine.add(id(container[key]))
    elif depth and kind in (list, tuple, dict) and getrefcount(container[key]) <= _IN_CONTAINER:
        inside = container[key]
        for inner in inside if kind is dict else range(len(inside)):
            _reach(inside, inner, mine, depth - 1)


def _base_is_mine(array: Any) -> bool:
    if type(array) is bytearray:
        return True
    array_type = _array_type()
    while array.base is not None:
        if getrefcount(array.base) > _IN_CONTAINER:
            return False
        if type(array.base) is memoryview:
            return getrefcount(array.base.obj) <= _IN_CONTAINER
        if type(array.base) is not array_type:
            return type(array.base).__module__ == "ray_serve_grpc._native"
        array = array.base
    return True


def _array_type() -> Any:
    """numpy's, where somebody has imported it."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.ndarray


def _count_in_container() -> int:
    """What `getrefcount` says of an object that only its container refers to; interpreters differ."""
    container: list[object] = [object()]
    count: Callable[[object], int] = getrefcount
    return count(container[0])


_IN_CONTAINER = _count_in_container()
