"""The replica's side of a call: hands it to Ray's `Replica`, and its results back."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import importlib
import logging
import os
import pickle
from collections.abc import AsyncGenerator, Sequence
from time import monotonic
from typing import Any, Protocol

from ray_serve_grpc import _native, background, config, errors, lanes, logs
from ray_serve_grpc._native import ServerCall
from ray_serve_grpc.bridge import BURST, TurnFlush, bridge_for
from ray_serve_grpc.ownership import secured, secured_soon
from ray_serve_grpc.seam import adapter
from ray_serve_grpc.serializers import RPCSerializer, encoded_size

logger = logging.getLogger(config.LOGGER_NAME)

#: How long what user code has ended may take to answer the calls that are under way.
LAST_WORDS_S = 0.2

#: How long a refused stream of a stock caller stays open. grpc.aio shows no headers, and so no refusal, where the
#: end of a stream comes before it has asked for them, which it does only after its request is sent.
REFUSAL_LINGERS_S = 0.05

#: Of a request that is not run: its caller has been told that it never was, and may have sent it elsewhere.
GIVEN_UP = "the caller gave the call up before it was taken"

#: Characters of an error that go into the status of a call; headers have little room.
LONGEST_DETAIL = 2000


class Replica(Protocol):
    """What the server uses of Ray's `Replica`."""

    def get_num_ongoing_requests(self) -> int: ...

    async def handle_request(self, metadata: Any, /, *args: Any, **kwargs: Any) -> Any: ...

    def handle_request_streaming(self, metadata: Any, /, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]: ...

    def handle_request_with_rejection(self, metadata: Any, /, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """First an object with `accepted` and `num_ongoing_requests`, then, if accepted, the results."""


#: An admission that its caller can look up leaves together with an answer that follows within this time: one write
#: here, one wake-up there. Longer, and the router would learn late that the replica took the call.
ADMISSION_PATIENCE_S = 0.001


class AdmissionFlush:
    """Sends the admissions whose answers take longer than that."""

    __slots__ = ("_loop", "_timer", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[ServerCall, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def due(self, call: ServerCall) -> None:
        self._waiting[call] = None
        if self._timer is None:
            self._timer = self._loop.call_later(ADMISSION_PATIENCE_S, self._flush)

    def answered(self, call: ServerCall) -> None:
        """Whatever is sent next takes the admission along."""
        waiting = self._waiting
        if waiting.pop(call, self) is None and not waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _flush(self) -> None:
        self._timer = None
        waiting, self._waiting = self._waiting, {}
        for call in waiting:
            call.flush()


class AnswerFlush:
    """Ends calls: each at once while they come one at a time, those of one turn of the loop together when more come."""

    __slots__ = ("_peak", "_turn", "_under_way")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._turn = TurnFlush(loop)
        self._under_way = 0
        # The most of them at a time since there was none.
        self._peak = 0

    def began(self) -> None:
        self._under_way += 1
        self._peak = 1 if self._under_way == 1 else max(self._peak, self._under_way)

    def ended(self) -> None:
        self._under_way -= 1

    def finish(self, call: ServerCall) -> None:
        """Sends what is queued in it, too."""
        if self._peak == 1:
            call.finish()
        else:
            call.finish(0, "", False)
            self._turn.add(call)


class ItemFlush:
    """Has the items of a stream that came within one turn of the loop written together, at its end."""

    __slots__ = ("_call", "_due", "_loop")

    def __init__(self, call: ServerCall, loop: asyncio.AbstractEventLoop) -> None:
        self._call = call
        self._loop = loop
        self._due = False

    def due(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._due = False
        self._call.flush()


class ReplicaServer:
    """Serves `InterDeploymentService` and Ray's own `ASGIService` for one replica."""

    def __init__(
        self,
        replica: Replica,
        *,
        host: str,
        unix_path: str | None,
        identity: str,
        authorization: str | None,
        tls: tuple[bytes, bytes, bytes] | None = None,
    ) -> None:
        """Args:
        host: address of this node; the port is chosen when the server starts.
        unix_path: where callers on this node find the replica.
        identity: the replica's actor id in hex.
        authorization: the header that every call must carry.
        tls: certificate chain, private key and certificate authorities for TCP, each in PEM.
        """
        self._replica = replica
        self._host = host
        self._unix_path = unix_path
        self._identity = identity
        self._authorization = authorization
        self._tls = tls
        self._limit = adapter.max_message_size()
        self._threads = adapter.user_code_has_its_own_thread(replica)
        self._server: _native.Server | None = None
        self._tracing: Any = None

    async def start(self) -> int:
        """Binds and serves. Returns the TCP port.

        Raises:
            OSError: nothing could be bound.
        """
        self._loop = asyncio.get_running_loop()
        self._bridge = bridge_for(self._loop)
        self._answers = AnswerFlush(self._loop)
        self._admissions = AdmissionFlush(self._loop)
        # User code finds in its context what Ray has put there for the task that started the
        # replica, as it does under Ray's own server.
        self._context = contextvars.copy_context()
        if adapter.tracing_is_on():  # from the start of a replica, or never
            self._tracing = importlib.import_module("ray_serve_grpc.tracing")
        lanes.prepare()
        background.start()
        try:
            self._server = self._bound(self._unix_path)
        except OSError as error:
            # Its folder may be full, or gone: what is on this node comes by TCP then. A port that cannot be bound
            # fails once more.
            if self._unix_path is None:
                raise
            self._server = self._bound(None)
            logger.warning(
                "No socket at %s (%s): callers on this node reach replica %s by TCP, without shared memory. Make room "
                "there and restart the replica.",
                self._unix_path,
                error,
                self._identity,
            )
        logs.serving(self._server, self._host, tls=self._tls is not None, token=self._authorization is not None)
        return self._server.port

    def _bound(self, unix_path: str | None) -> _native.Server:
        return _native.Server(
            self._bridge,
            self._on_call,
            host=self._host,
            unix_path=unix_path,
            identity=self._identity,
            authorization=self._authorization,
            tls=self._tls,
            on_notice=self._on_notice,
            max_message_size=self._limit,
            version=_native.__version__,
            reflection=config.settings().reflection,
        )

    async def stop(self, grace_s: float) -> None:
        """Takes no more calls, and cuts off what has not ended `grace_s` seconds later."""
        server, self._server = self._server, None
        if server is None:
            return
        ended = asyncio.Event()
        began = monotonic()
        logs.draining(server, grace_s)
        server.stop(grace_s, self._bridge, ended.set)
        await ended.wait()
        logs.stopped(began)

    def statistics(self) -> dict[str, int]:
        return {} if self._server is None else self._server.statistics()

    def __repr__(self) -> str:
        state = "not serving" if self._server is None else f"port {self._server.port}, socket {self._server.unix_path}"
        return f"<ReplicaServer of {self._identity}: {state}>"

    def _on_notice(self, text: str) -> None:
        logger.warning("Port %s: %s", self._server.port if self._server else "closed", text)

    def _on_call(self, call: ServerCall) -> None:
        serving = self._serve(call)
        if self._tracing is not None:
            serving = self._tracing.serving(call, serving)
        self._answers.began()
        task = self._context.copy().run(self._loop.create_task, serving)
        call.watch_cancel(self._bridge, task.cancel)

    async def _serve(self, call: ServerCall) -> None:
        """Answers one call, whatever user code does."""
        method = call.method
        streaming = method in (_native.METHOD_STREAMING, _native.METHOD_STREAMING_REJECTION)
        rejection = method in (_native.METHOD_UNARY_REJECTION, _native.METHOD_STREAMING_REJECTION)
        metadata = serializer = answered = None
        try:
            metadata, serializer, args, kwargs = _request(call, streaming)
            call.release()
            if self._tracing is not None:
                self._tracing.begin(metadata)
            if rejection:
                results = self._replica.handle_request_with_rejection(metadata, *args, **kwargs)
                del args, kwargs
                admission = await results.__anext__()
                if not call.admit(admission.accepted, admission.num_ongoing_requests, False):
                    call.finish(_native.STATUS_CANCELLED, GIVEN_UP)
                    await _throw(results, asyncio.CancelledError())
                    return
                if admission.accepted:
                    if call.admission_safe:
                        self._admissions.due(call)
                    else:
                        await self._admission_safe(call)
                rejection = False
                if not admission.accepted:
                    await results.aclose()
                    if call.dialect == _native.DIALECT_STOCK:
                        # grpcio reports a unary call without a message as failed.
                        call.send(0, b"")
                        if streaming:
                            call.flush()
                            await asyncio.sleep(REFUSAL_LINGERS_S)
                elif streaming:
                    await self._stream(call, results, metadata, serializer)
                else:
                    await self._unary(call, results, metadata, serializer)
                    answered = results
            elif not call.claim():
                call.finish(_native.STATUS_CANCELLED, GIVEN_UP)
                return
            elif streaming:
                results = self._replica.handle_request_streaming(metadata, *args, **kwargs)
                del args, kwargs
                await self._stream(call, results, metadata, serializer)
            else:
                running = self._replica.handle_request(metadata, *args, **kwargs)
                del args, kwargs
                box = [await running]
                kind, body, buffers = self._encoded(call, box, metadata, serializer)
                call.send(kind, body, secured(box, buffers))
            self._answers.finish(call)
            if answered is not None:
                await _close_books(answered, metadata)
        except (SystemExit, KeyboardInterrupt) as error:
            self._exit(call, error)
        except BaseException as error:
            # Also what user code raises past `Exception`; a caller must hear of it.
            if not call.cancelled:
                if rejection:
                    # It failed before it was admitted. That is an answer, not a reason to ask another replica.
                    call.admit(True, self._replica.get_num_ongoing_requests())
                self._fail(call, error, metadata, serializer)
        finally:
            self._answers.ended()
            self._admissions.answered(call)

    async def _unary(
        self, call: ServerCall, results: AsyncGenerator[Any, None], metadata: Any, serializer: RPCSerializer
    ) -> None:
        box = [await results.__anext__()]
        try:
            kind, body, buffers = self._encoded(call, box, metadata, serializer)
            if buffers and self._threads:
                buffers = await secured_soon(box, buffers)
            call.send(kind, body, secured(box, buffers) if buffers else ())
        except (Exception, asyncio.CancelledError) as error:
            await _throw(results, error)
            raise

    async def _stream(
        self, call: ServerCall, results: AsyncGenerator[Any, None], metadata: Any, serializer: RPCSerializer
    ) -> None:
        flush = ItemFlush(call, self._loop)
        sent = 0
        try:
            async for result in results:
                kind, body, buffers = self._encoded(call, [result], metadata, serializer)
                if buffers:
                    # The generator that made it may use its memory again for the next one.
                    buffers = secured([result], buffers)
                sent += 1
                if sent == 1:
                    self._admissions.answered(call)
                if not call.send(kind, body, buffers, sent == 1):
                    call.flush()
                    await self._writable(call)
                elif sent % BURST == 0:
                    call.flush()
                    await asyncio.sleep(0)
                else:
                    flush.due()
                if call.cancelled:
                    raise asyncio.CancelledError
        except (Exception, asyncio.CancelledError) as error:
            await _throw(results, error)
            raise

    async def _admission_safe(self, call: ServerCall) -> None:
        """User code may end this process at once: its caller must not take that for a request that never ran."""
        future: asyncio.Future[None] = self._loop.create_future()
        call.watch_admission_safe(self._bridge, future)
        await future

    async def _writable(self, call: ServerCall) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        call.watch_writable(self._bridge, future)
        await future

    def _encoded(
        self, call: ServerCall, box: list[Any], metadata: Any, serializer: RPCSerializer
    ) -> tuple[int, Any, Sequence[Any]]:
        """(kind, body, buffers) of a message with the value in `box`.

        Raises:
            NotSerializable, MessageTooLarge
        """
        kind = _native.KIND_VALUE
        body: Any
        buffers: Sequence[Any] = ()
        if metadata.is_http_request and metadata.is_streaming:
            # ASGI messages, pickled already. The proxy takes them as they are; stock has no such kind.
            body = box[0]
            if call.dialect == _native.DIALECT_NATIVE:
                kind = _native.KIND_RAW
        else:
            if metadata.is_grpc_request:
                box[0] = (metadata.grpc_context, box[0].SerializeToString())
            if call.dialect == _native.DIALECT_NATIVE:
                body, buffers = serializer.encode_response(box[0])
            else:
                body = serializer.stock_response(box[0])
        if buffers or type(body) is not bytes or len(body) > self._limit:
            size = encoded_size(body, buffers)
            if size > self._limit:
                raise errors.response_too_large(size, self._limit)
        return kind, body, buffers

    def _fail(self, call: ServerCall, error: BaseException, metadata: Any, serializer: RPCSerializer | None) -> None:
        method = "unreadable request" if metadata is None else metadata.call_method
        if self._tracing is not None:
            self._tracing.fail(error)
        if call.dialect == _native.DIALECT_NATIVE:
            kind, body = errors.encode(error, method=method, actor_id=self._identity, limit=self._limit)
            call.send(kind, body)
            call.finish()
        elif serializer is None or serializer.response.name in ("cloudpickle", "pickle"):
            call.send(1, errors.encode_stock(error, method=method, actor_id=self._identity))
            call.finish()
        else:
            # A stock caller would read the error with a serialization that has no place for one.
            call.finish(_native.STATUS_UNKNOWN, errors.remote_traceback(error)[:LONGEST_DETAIL])

    def _exit(self, call: ServerCall, error: SystemExit | KeyboardInterrupt) -> None:
        """Ends the process, as actor calls do: the thread of the user's loop has ended with this exception."""
        logger.error("User code raised %r: this replica exits, and Serve starts another one.", error)
        call.finish(_native.STATUS_UNAVAILABLE, f"user code ended the replica with {error!r}")
        code = error.code if isinstance(error, SystemExit) else 1
        status = 0 if code is None else code & 0xFF if isinstance(code, int) else 1
        server, self._server = self._server, None
        if server is not None:
            server.stop(LAST_WORDS_S, self._bridge, functools.partial(_end_process, status))


def _request(call: ServerCall, is_streaming: bool) -> tuple[Any, RPCSerializer, Sequence[Any], dict[str, Any]]:
    """(metadata, serializer, args, kwargs) of a call in either dialect."""
    if call.dialect == _native.DIALECT_NATIVE:
        metadata = adapter.metadata_from_wire(call.metadata, call.extra, is_streaming=is_streaming)
        serializer = _serializer(metadata)
        args, kwargs = serializer.decode_request(call.body, call.buffers)
    else:
        pickled, stock_args, stock_kwargs = call.fields
        metadata = adapter.metadata_from_stock(memoryview(pickled))
        serializer = _serializer(metadata)
        args = serializer.request.loads(stock_args)
        kwargs = serializer.request.loads(stock_kwargs)
    if metadata.is_http_request or metadata.is_grpc_request:
        # A proxy pickles its request once more than a handle does.
        args = (pickle.loads(args[0]),)
    return metadata, serializer, args, kwargs


def _serializer(metadata: Any) -> RPCSerializer:
    return RPCSerializer.named(
        getattr(metadata, "request_serialization", "cloudpickle"),
        getattr(metadata, "response_serialization", "cloudpickle"),
    )


async def _close_books(results: AsyncGenerator[Any, None], metadata: Any) -> None:
    """A unary request has ended in the replica's books when its generator has, which never suspends here: no other
    request finds its slot still taken, and the caller need not wait for the access log and the metrics.
    """
    try:
        async for _ in results:
            pass
    except Exception:
        logger.exception("Request %s was answered, but Serve could not close its books of it.", metadata.request_id)


async def _throw(results: AsyncGenerator[Any, None], error: BaseException) -> None:
    """Tells the replica of an error that struck outside of its generator, where it does not see it.

    It then cancels the request's own children if that is what the error is, and keeps its books right.
    """
    with contextlib.suppress(Exception, asyncio.CancelledError):
        await results.athrow(error)


def _end_process(status: int) -> None:
    logging.shutdown()
    os._exit(status)
