"""Small stand-ins for the native core: calls whose every step the test decides."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

from ray import ActorID
from ray.serve._private.common import ReplicaQueueLengthInfo, RequestMetadata, RequestProtocol

from ray_serve_grpc import _native, channels
from ray_serve_grpc.result import gRPCReplicaResult
from ray_serve_grpc.serializers import RPCSerializer
from ray_serve_grpc.server import ReplicaServer


class FakeCall:
    """A client's call. `arrives`, `admit` and `end` are what the I/O thread would do."""

    def __init__(self, lane: str = "unix") -> None:
        self.lane = lane
        self.sent = True
        self.cancels = 0
        self.messages: deque[Any] = deque()
        self.ended: tuple[int, str] | None = None
        self.admitted: tuple[bool, int] | None = None
        self.waiting: list[Any] = []
        self.done_callbacks: list[Any] = []
        self._news = threading.Condition()

    # The I/O thread's side.

    def admit(self, accepted: bool = True, ongoing: int = 1) -> FakeCall:
        self.admitted = (accepted, ongoing)
        return self._wake()

    def arrives(self, *messages: Any) -> FakeCall:
        self.messages.extend(messages)
        return self._wake()

    def end(self, code: int = _native.STATUS_OK, detail: str = "") -> FakeCall:
        if self.ended is None:
            self.ended = (code, detail)
            callbacks, self.done_callbacks = self.done_callbacks, []
            for callback in callbacks:
                callback()
        return self._wake()

    def _wake(self) -> FakeCall:
        with self._news:
            self._news.notify_all()
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
        return self

    # What _native.Call offers.

    def admission(self) -> Any:
        return self.admitted

    def take(self) -> Any:
        return self.messages.popleft() if self.messages else None

    def take_all(self) -> list[Any]:
        taken = list(self.messages)
        self.messages.clear()
        return taken

    def status(self) -> Any:
        return self.ended

    def watch_admission(self, bridge: Any, future: Any) -> None:
        self._watch(future, self.admitted is not None or self.ended is not None)

    def watch_message(self, bridge: Any, future: Any) -> None:
        self._watch(future, bool(self.messages) or self.ended is not None)

    def watch_done(self, bridge: Any, callback: Any) -> None:
        self.done_callbacks.append(callback)

    def wait(self, timeout: float | None) -> bool:
        with self._news:
            return self._news.wait_for(lambda: self.messages or self.ended, timeout)

    def cancel(self) -> None:
        self.cancels += 1
        self.end(_native.STATUS_CANCELLED, "cancelled")

    def _watch(self, future: Any, now: bool) -> None:
        if now:
            future.set_result(None)
        else:
            self.waiting.append(future)


class FakeChannel:
    lane = "unix"

    def __init__(self, dialect: int | None = _native.DIALECT_NATIVE) -> None:
        self.settled = dialect
        self.failed: tuple[int, str] | None = None
        self.sent: list[tuple[Any, ...]] = []
        self.ready: list[Any] = []
        self.closed = 0
        self.flushes = 0
        self.calls: list[FakeCall] = []
        self.flushed: list[bool] = []

    def settle(self, dialect: int | None) -> None:
        self.settled = dialect
        ready, self.ready = self.ready, []
        for callback in ready:
            callback()

    def dialect(self) -> int | None:
        return self.settled

    def failure(self) -> Any:
        return self.failed

    def watch_ready(self, bridge: Any, callback: Any) -> None:
        self.ready.append(callback)

    def call(
        self, method: int, metadata: Any, extra: bytes, body: Any, buffers: Any, flush: bool = True, trace: Any = None
    ) -> FakeCall:
        self.flushed.append(flush)
        return self._started("native", method, metadata, extra, body, buffers)

    @property
    def quiet(self) -> bool:
        return not self.calls

    def flush(self) -> None:
        self.flushes += 1

    def call_stock(self, *request: Any) -> FakeCall:
        return self._started("stock", *request)

    def close(self) -> None:
        self.closed += 1

    def statistics(self) -> dict[str, int]:
        return {"in_flight": len(self.calls)}

    def _started(self, *request: Any) -> FakeCall:
        self.sent.append(request)
        self.calls.append(FakeCall())
        return self.calls[-1]


class FakeServerCall:
    """A call as a replica sees it. What the replica does to it is kept."""

    lane = "unix"
    peer = "unix:"

    def __init__(self, method: int, dialect: int = _native.DIALECT_NATIVE, **parts: Any) -> None:
        self.method = method
        self.dialect = dialect
        self.metadata: Any = parts.get("metadata", ())
        self.extra = parts.get("extra", b"")
        self.body = parts.get("body", b"")
        self.buffers = parts.get("buffers", ())
        self.fields = parts.get("fields", ())
        self.cancelled = False
        self.admitted: tuple[bool, int] | None = None
        self.sent: list[tuple[int, Any, Any]] = []
        self.flushes = 0
        self.finished: tuple[int, str] | None = None
        self.finished_at_once = False
        self.full = False
        self.writers: list[Any] = []
        self.waited = asyncio.Event()
        self.on_cancel: Any = None

    def release(self) -> None:
        self.body, self.buffers, self.fields = b"", (), ()

    #: as on a lane where the caller can look the admission up
    admission_safe = True

    #: whether its caller gave it up before it was taken
    revoked = False

    def admit(self, accepted: bool, ongoing: int, flush: bool = True) -> bool:
        if accepted and self.revoked:
            return False
        self.admitted = (accepted, ongoing)
        return True

    def claim(self) -> bool:
        return not self.revoked

    def send(self, kind: int, body: Any, buffers: Any = (), flush: bool = True) -> bool:
        self.sent.append((kind, body, buffers))
        return not self.full

    def flush(self) -> None:
        self.flushes += 1

    def watch_writable(self, bridge: Any, future: Any) -> None:
        self.writers.append(future)
        self.waited.set()

    def finish(self, status: int = 0, detail: str = "", flush: bool = True) -> None:
        if self.finished is None:
            self.finished = (status, detail)
            self.finished_at_once = flush

    def watch_cancel(self, bridge: Any, callback: Any) -> None:
        self.on_cancel = callback

    # The I/O thread's side.

    def cancel(self) -> None:
        self.cancelled = True
        self.on_cancel()
        self.drain()

    def drain(self) -> None:
        self.full = False
        for future in self.writers:
            if not future.done():
                future.set_result(None)


def metadata(*, stream: bool = False, **more: Any) -> RequestMetadata:
    defaults = {"call_method": "method", "is_streaming": stream, "_by_reference": False}
    return RequestMetadata("request-1", "internal-1", **(defaults | more))


def http_metadata(**more: Any) -> RequestMetadata:
    return metadata(stream=True, _request_protocol=RequestProtocol.HTTP, **more)


def peer(channel: FakeChannel | None = None) -> channels.Peer:
    actor_id = ActorID(os.urandom(16))
    return channels.Peer(
        actor_id.binary(), ["unix:/run/r.sock", "tcp:10.0.0.7:4000"], "Model", channel or FakeChannel()
    )


def pending(*args: Any, about: RequestMetadata | None = None, **kwargs: Any) -> SimpleNamespace:
    """Ray's PendingRequest."""
    return SimpleNamespace(args=list(args), kwargs=kwargs, metadata=about or metadata())


def result_of(call: FakeCall, about: RequestMetadata | None = None, **more: Any) -> gRPCReplicaResult:
    about = about or metadata()
    serializer = RPCSerializer(about.request_serialization, about.response_serialization)
    result = gRPCReplicaResult(more.get("peer") or peer(), serializer, about, more.get("with_rejection", True))
    result.begin(call, more.get("dialect", _native.DIALECT_NATIVE), None)
    return result


def value(content: Any, about: RequestMetadata | None = None) -> tuple[int, Any, Any]:
    """A message with a value, as a replica sends it."""
    body, buffers = RPCSerializer("cloudpickle", (about or metadata()).response_serialization).encode_response(content)
    if isinstance(body, list):
        body = b"".join(body)
    return _native.KIND_VALUE, body, tuple(bytearray(buffer) for buffer in buffers)


class FakeReplica:
    """Ray's `Replica`, as far as a server uses it: a slot that a request holds, and user code."""

    def __init__(self, user_code: Any, *, accepts: bool = True) -> None:
        self.user_code = user_code
        self.accepts = accepts
        self.events: list[str] = []
        self.ongoing = 0

    def get_num_ongoing_requests(self) -> int:
        return self.ongoing

    async def handle_request(self, about: Any, *args: Any, **kwargs: Any) -> Any:
        with self._slot():
            return await self.user_code(*args, **kwargs)

    async def handle_request_streaming(self, about: Any, *args: Any, **kwargs: Any) -> Any:
        with self._slot():
            async for item in self.user_code(*args, **kwargs):
                yield item

    async def handle_request_with_rejection(self, about: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.accepts:
            yield ReplicaQueueLengthInfo(False, 7)
            return
        with self._slot():
            yield ReplicaQueueLengthInfo(True, self.ongoing)
            if about.is_streaming:
                async for item in self.user_code(*args, **kwargs):
                    yield item
            else:
                yield await self.user_code(*args, **kwargs)

    def _slot(self) -> Any:
        @contextlib.contextmanager
        def slot() -> Any:
            self.ongoing += 1
            try:
                yield
                self.events.append("ok")
            except BaseException as error:
                self.events.append(type(error).__name__)
                raise
            finally:
                self.ongoing -= 1

        return slot()


def replica_server(user_code: Any, unix_path: Any) -> tuple[ActorID, ReplicaServer]:
    """A real server of a replica that runs `user_code`, to be started."""
    actor_id = ActorID(os.urandom(16))
    server = ReplicaServer(
        FakeReplica(user_code),
        host="127.0.0.1",
        unix_path=str(unix_path),
        identity=actor_id.hex(),
        authorization=None,
    )
    return actor_id, server
