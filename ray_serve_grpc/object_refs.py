"""A by-value stream as a generator of object references."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import ray
from ray.exceptions import RayError

if TYPE_CHECKING:
    from ray_serve_grpc.result import gRPCReplicaResult


class ItemRefs(ray.ObjectRefGenerator):  # type: ignore[misc]
    """Iterates, with `for` and `async for`, over references to the items of a stream.

    Each item is put into the object store when it is asked for, not before: a stream that is not
    read stays with the replica. The references are owned by this process. What Ray's own
    generators offer beyond iterating (`ray.wait` on them, `send`, passing them to a task) needs a
    stream that the object store knows, which this is not: set `_by_reference=True` for that.
    """

    def __init__(self, result: gRPCReplicaResult) -> None:
        self._result = result
        self._finished = False

    def __iter__(self) -> Iterator[ray.ObjectRef[Any]]:
        return self

    def __next__(self) -> ray.ObjectRef[Any]:
        try:
            item = self._result.__next__()
        except StopIteration:
            self._finished = True
            raise
        except RayError as error:
            return ray.put(_raised_by_get(error))
        return ray.put(item)

    def __aiter__(self) -> AsyncIterator[ray.ObjectRef[Any]]:
        return self

    async def __anext__(self) -> ray.ObjectRef[Any]:
        try:
            item = await self._result.__anext__()
        except StopAsyncIteration:
            self._finished = True
            raise
        except RayError as error:
            item = _raised_by_get(error)
        return await asyncio.get_running_loop().run_in_executor(None, ray.put, item)

    def is_finished(self) -> bool:
        return self._finished

    def close(self) -> None:
        self._result.cancel()

    async def aclose(self) -> None:
        self._result.cancel()

    def _unsupported(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "References to the items of a by-value stream can only be iterated over. "
            "Use `handle.options(_by_reference=True)` for all that an ObjectRefGenerator does."
        )

    completed = next_ready = send = throw = asend = athrow = _unsupported

    def __getstate__(self) -> NoReturn:
        self._unsupported()

    def __reduce__(self) -> NoReturn:
        self._unsupported()

    def __del__(self) -> None:
        """Nothing of this is Ray's to delete."""

    def __repr__(self) -> str:
        return f"<references to the items of {self._result!r}>"


def _raised_by_get(error: RayError) -> RayError:
    """What has to be in the object store for `ray.get` to raise `error`; raises the rest here and now."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return error
    raise error
