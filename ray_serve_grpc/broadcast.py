"""One payload for many replicas: encoded once, and written once for all that share memory with this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ray_serve_grpc._native import secure
from ray_serve_grpc.serializers import Encoded, RPCSerializer

#: Parts below this many bytes travel in the message itself.
WORTH_SHARING = 64 * 1024


class Once:
    """Remembers what it encoded last. The requests of one broadcast differ in their metadata only."""

    __slots__ = ("_encoded", "_of")

    def __init__(self) -> None:
        self._of: tuple[RPCSerializer, list[Any], dict[str, Any]] | None = None
        self._encoded: Encoded = b"", ()

    def encode(self, serializer: RPCSerializer, args: list[Any], kwargs: dict[str, Any]) -> Encoded:
        """As `serializer.encode_request`."""
        if self._of is None or not _same(self._of, (serializer, args, kwargs)):
            self._encoded = _shareable(*serializer.encode_request(args, kwargs))
            self._of = serializer, list(args), dict(kwargs)
        return self._encoded


_current: ContextVar[Once | None] = ContextVar("ray_serve_grpc_broadcast", default=None)
current = _current.get


@contextmanager
def going_on() -> Iterator[None]:
    """Requests that this context sends are those of one broadcast."""
    token = _current.set(Once())
    try:
        yield
    finally:
        _current.reset(token)


def _same(one: tuple[Any, list[Any], dict[str, Any]], other: tuple[Any, list[Any], dict[str, Any]]) -> bool:
    """The very same objects; equal ones may be encoded differently."""
    return (
        one[0] is other[0]
        and len(one[1]) == len(other[1])
        and all(left is right for left, right in zip(one[1], other[1], strict=True))
        and one[2].keys() == other[2].keys()
        and all(value is other[2][name] for name, value in one[2].items())
    )


def _shareable(body: Any, buffers: Any) -> Encoded:
    parts = [body] if type(body) is bytes else body
    if sum(memoryview(part).nbytes for part in parts) >= WORTH_SHARING:
        body = [secure(b"".join(parts))]
    return body, [secure(buffer) if memoryview(buffer).nbytes >= WORTH_SHARING else buffer for buffer in buffers]
