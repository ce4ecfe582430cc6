"""One request's result, as Ray's router and handles use it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn

import ray
from ray.exceptions import RayTaskError

from ray_serve_grpc import _native, channels, config, errors
from ray_serve_grpc.bridge import BURST, bridge_for
from ray_serve_grpc.completion import Child, Completion, FailedCall, Start
from ray_serve_grpc.seam import adapter
from ray_serve_grpc.seam.adapter import ReplicaQueueLengthInfo, ReplicaResult, RequestCancelledError
from ray_serve_grpc.serializers import RPCSerializer

if TYPE_CHECKING:
    from ray_serve_grpc._native import Call, Message

logger = logging.getLogger(config.LOGGER_NAME)

#: A stream's messages up to this size are taken in batches. Larger ones are taken one by one, so
#: that what has not been asked for stays within the bound of flow control.
BATCHED = 4096

#: A value of this many bytes takes long enough to put into the object store to block a loop.
PUT_ON_THREAD = 256 * 1024


class gRPCReplicaResult(ReplicaResult):
    """One request's result. Any method, from any loop or thread, in any order, any number of times."""

    _call: Call | FailedCall | None = None
    _start: Start | None = None
    _dialect = _native.DIALECT_NATIVE
    _cancelled = False
    # The outcome of a unary call, once it is known: a value, or what makes the exception to raise.
    _settled = False
    _value: Any = None
    _failure: Callable[[bool], BaseException] | None = None
    _large = False
    _ref: ray.ObjectRef[Any] | None = None
    _iterated = False
    # Items that were there when they were asked for, since the loop had its last turn.
    _in_a_row = 0

    def __init__(self, peer: channels.Peer, serializer: RPCSerializer, metadata: Any, with_rejection: bool) -> None:
        self._peer = peer
        self._serializer = serializer
        self._request_id: str = metadata.request_id
        self._streaming: bool = metadata.is_streaming
        # A stock replica does not mark the bytes that are for the HTTP proxy.
        self._raw: bool = metadata.is_http_request
        self._with_rejection = with_rejection
        self._lock = threading.Lock()
        if self._streaming:
            # Messages that were taken from the call and not asked for yet.
            self._messages: deque[Message] = deque()
        self.completion = completion = Completion(self, keep=not self._streaming)
        child: Any = Child(self) if self._streaming else self
        completion.untrack = adapter.track_in_flight(child)

    # How it starts.

    def begin(self, call: Call, dialect: int, bridge: _native.Bridge) -> None:
        self._call = call
        self._dialect = dialect
        call.watch_done(bridge, self.completion)

    def begin_later(self, start: Start) -> None:
        self._start = start

    def fail_to_begin(self, call: FailedCall, error: Exception | None = None) -> None:
        self._call = call
        if error is not None:
            self._failure = partial(_kept, error.with_traceback(None))
            self._settled = True
        self.completion()

    # The contract of ReplicaResult.

    async def get_rejection_response(self) -> ReplicaQueueLengthInfo:
        """Whether the replica takes the request.

        Raises:
            ActorUnavailableError: it did not run and will not; the router tries another replica.
        """
        assert self._with_rejection, "the request was sent without rejection"
        try:
            call = self._call or await self._started()
            admission = call.admission()
            while admission is None:
                ended = call.status() is not None
                admission = call.admission()
                if admission is None:
                    if ended:
                        raise self._refusal()
                    loop = asyncio.get_running_loop()
                    future: asyncio.Future[None] = loop.create_future()
                    call.watch_admission(bridge_for(loop), future)
                    await future
                    admission = call.admission()
        except asyncio.CancelledError:
            logger.info("Request %s was cancelled while it was being assigned: cancelling it there.", self._request_id)
            self.cancel()
            raise
        accepted, ongoing = admission
        return ReplicaQueueLengthInfo(accepted, ongoing)

    def get(self, timeout_s: float | None) -> Any:
        """Raises:
        TimeoutError: `timeout_s` seconds passed; the request goes on and can be asked for again.
        """
        _refuse_in_event_loop("get", "get_async")
        return self._get(timeout_s)

    async def get_async(self) -> Any:
        while not self._settle():
            await self._wait()
        if self._failure is not None:
            raise self._failure(False)
        return self._value

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        _refuse_in_event_loop("__next__", "__anext__")
        if not self._streaming:
            return self._next_of_unary(self._get(None), StopIteration)
        while True:
            message = self._take()
            if message is not None:
                return self._item(message, True)
            if self._ended():
                self._raise_end(True)
            self._call_now(None).wait(None)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if not self._streaming:
            return self._next_of_unary(await self.get_async(), StopAsyncIteration)
        if self._in_a_row == BURST:
            # A writer that is faster than this reader would keep the loop from everybody else.
            self._in_a_row = 0
            await asyncio.sleep(0)
        while True:
            message = self._take()
            if message is not None:
                self._in_a_row += 1
                return self._item(message, False)
            if self._ended():
                self._raise_end(False)
            self._in_a_row = 0
            await self._wait()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Calls back once with None, or with why the call ended without a proper end.

        An error of user code is a proper end. Runs on the router's loop, or at once if the call has ended.
        """
        self.completion.add(callback)

    def cancel(self) -> None:
        """Nothing when the call has ended."""
        start = self._start
        if self._call is None and start is not None and start.abandon():
            self._cancelled = True
            self.fail_to_begin(FailedCall.cancelled())
            start.abandoned()
            return
        call = self._call
        if call is not None and call.status() is None:
            self._cancelled = True
            call.cancel()

    def to_object_ref(self, timeout_s: float | None = None) -> ray.ObjectRef[Any]:
        """Waits for the value and puts it into the object store; the reference is this process's."""
        return self._ref or self._put(self._get_or_error(timeout_s))

    async def to_object_ref_async(self) -> ray.ObjectRef[Any]:
        if self._ref is not None:
            return self._ref
        while not self._settle():
            await self._wait()
        value = self._get_or_error(0)
        if not self._large:
            return self._put(value)
        return await asyncio.get_running_loop().run_in_executor(None, self._put, value)

    def to_object_ref_gen(self) -> ray.ObjectRefGenerator:
        from ray_serve_grpc.object_refs import ItemRefs

        return ItemRefs(self)

    # What ended the call.

    def failure(self) -> BaseException | None:
        """Why the call ended without a proper end; None for one that ended well or has not ended."""
        call = self._call
        if call is None:
            return RequestCancelledError(self._request_id) if self._cancelled else None
        status = call.status()
        if status is None or status[0] == _native.STATUS_OK:
            return None
        return self._failed(call, status)(True)

    def __repr__(self) -> str:
        call = self._call
        status = None if call is None else call.status()
        state = (
            "waits for the connection"
            if call is None
            else "under way"
            if status is None
            else "ended"
            if status[0] == _native.STATUS_OK
            else f"ended with status {status[0]}: {status[1]}"
        )
        kind = "stream" if self._streaming else "unary"
        return f"<gRPCReplicaResult of {kind} request {self._request_id} to {self._peer.where()}: {state}>"

    # Waiting.

    async def _wait(self) -> None:
        """Returns when a message waits, or the call ended."""
        call = self._call or await self._started()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        call.watch_message(bridge_for(loop), future)
        await future

    async def _started(self) -> Call | FailedCall:
        assert self._start is not None
        await self._start.wait_async()
        return self._call_now(0)

    def _call_now(self, timeout_s: float | None) -> Call | FailedCall:
        if self._call is None:
            assert self._start is not None
            if not self._start.wait(timeout_s):
                raise TimeoutError(f"No connection to {self._peer.where()} within {timeout_s} s; still trying.")
            assert self._call is not None
        return self._call

    def _get(self, timeout_s: float | None) -> Any:
        if not self._settle():
            self._wait_settled(timeout_s)
        if self._failure is not None:
            raise self._failure(True)
        return self._value

    def _wait_settled(self, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else monotonic() + timeout_s
        call = self._call_now(timeout_s)
        while not self._settle():
            left = None if deadline is None else max(0.0, deadline - monotonic())
            if not call.wait(left) and not self._settle():
                raise TimeoutError(f"Request {self._request_id} has no result after {timeout_s} s; it goes on.")

    # Unary calls.

    def _settle(self) -> bool:
        """Takes and keeps the outcome of a unary call, if it is there."""
        if self._settled:
            return True
        call = self._call
        if call is None:
            return False
        with self._lock:
            return self._take_outcome(call)

    def _take_outcome(self, call: Call | FailedCall) -> bool:
        if self._settled:  # by another thread
            return True
        message = call.take()
        if message is None:
            status = call.status()
            message = call.take()  # may have come just before the end
            if message is None:
                if status is None and not self._cancelled:
                    return False
                self._failure = self._failed(call, status or (_native.STATUS_CANCELLED, ""))
        if message is not None:
            self._value, self._failure = self._decoded(message)
            self._large = bool(message[2]) or len(message[1]) > PUT_ON_THREAD
        self._settled = True
        return True

    def _next_of_unary(self, value: Any, end: type[Exception]) -> Any:
        """Iterating over a unary call gives its value, once."""
        if self._iterated:
            raise end
        self._iterated = True
        return value

    def _get_or_error(self, timeout_s: float | None) -> Any:
        """The value; or the error of user code, which `ray.get` of its reference will raise."""
        if not self._settle():
            self._wait_settled(timeout_s)
        failure = self._failure
        if failure is None:
            return self._value
        error = failure(True)
        if isinstance(error, RayTaskError):
            return error
        raise error

    def _put(self, value: Any) -> ray.ObjectRef[Any]:
        with self._lock:
            if self._ref is None:
                self._ref = ray.put(value)
            return self._ref

    # Streams.

    def _take(self) -> Message | None:
        """The next message that has come, in order."""
        if self._cancelled:
            return None
        try:
            return self._messages.popleft()
        except IndexError:
            pass
        call = self._call
        if call is None:
            return None
        message = call.take()
        if message is not None and not message[2] and len(message[1]) <= BATCHED:
            self._messages.extend(call.take_all())
        return message

    def _ended(self) -> bool:
        call = self._call
        if call is None:
            return False
        if call.status() is None and not self._cancelled:
            return False
        # A message may have come between the look for it and the look at the status.
        self._messages.extend(call.take_all())
        return self._cancelled or not self._messages

    def _item(self, message: Message, synchronous: bool) -> Any:
        value, failure = self._decoded(message)
        if failure is not None:
            raise failure(synchronous)
        return value

    def _raise_end(self, synchronous: bool) -> NoReturn:
        if self._failure is not None:
            raise self._failure(synchronous)
        call = self._call
        assert call is not None
        status = call.status() or (_native.STATUS_CANCELLED, "")
        if status[0] != _native.STATUS_OK:
            raise self._failed(call, status)(synchronous)
        raise StopIteration if synchronous else StopAsyncIteration

    # From messages and statuses to values and exceptions.

    def _decoded(self, message: Message) -> tuple[Any, Callable[[bool], BaseException] | None]:
        """(value, None), or (None, what makes the exception)."""
        kind, body, buffers = message
        try:
            if self._dialect == _native.DIALECT_NATIVE:
                if kind == _native.KIND_VALUE:
                    return self._serializer.decode_response(body, buffers), None
                if kind == _native.KIND_RAW:
                    return body if isinstance(body, bytes) else memoryview(body), None
                return None, partial(_user_error, errors.decode(kind, body))
            if not kind:
                return body if self._raw else self._serializer.response.loads(body), None
            return None, partial(_user_error, self._serializer.response.loads(body))
        except Exception as error:
            return None, partial(_kept, errors.unreadable(error))

    def _failed(self, call: Call | FailedCall, status: tuple[int, str]) -> Callable[[bool], BaseException]:
        if self._cancelled and status[0] == _native.STATUS_CANCELLED:
            return partial(_cancelled, self._request_id)
        admitted = call.admission()
        return partial(_call_error, self._peer, call.lane, status, admitted is not None and admitted[0])

    def _refusal(self) -> BaseException:
        """Why there is no admission."""
        self._settle()
        if self._failure is not None:
            return self._failure(False)
        return errors.CallFailed(f"{self._peer.where()} answered without saying whether it takes the request.")


def _refuse_in_event_loop(name: str, instead: str) -> None:
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(
            f"`{name}()` blocks, so it should not be called from within an `asyncio` event loop. "
            f"Await `{instead}()` instead."
        )


# Makers of exceptions: a fresh one for each raise. One that was kept would hold, by its
# traceback, the frames it passed, and they the result: a cycle for every failed request.


def _user_error(error: Any, synchronous: bool) -> BaseException:
    if isinstance(error, RayTaskError):
        return errors.raisable(error)
    # A stock replica sends the exception itself.
    return error if isinstance(error, BaseException) else RuntimeError(f"The replica failed with {error!r}.")


def _kept(error: BaseException, synchronous: bool) -> BaseException:
    return errors.fresh(error)


def _cancelled(request_id: str, synchronous: bool) -> BaseException:
    return RequestCancelledError(request_id) if synchronous else asyncio.CancelledError()


def _call_error(
    peer: channels.Peer, lane: str, status: tuple[int, str], admitted: bool, synchronous: bool
) -> BaseException:
    code, detail = status
    where = peer.where(lane)
    if code in (_native.STATUS_UNAVAILABLE, _native.STATUS_CANCELLED):
        if admitted:
            return errors.unavailable(
                peer.actor_id,
                where,
                f"lost after it had taken the request ({detail})",
                "The request is not sent to another replica, since it may have run: repeat it if it may run twice",
            )
        return errors.unavailable(
            peer.actor_id,
            where,
            detail or "no connection",
            "If it goes on, see whether the replica is alive (`serve status`) and reachable from this node",
        )
    if code == _native.STATUS_RESOURCE_EXHAUSTED:
        return errors.message_refused(where, detail)
    if code == _native.STATUS_UNAUTHENTICATED:
        return errors.unauthenticated(where, detail)
    if code == _native.STATUS_OK:
        return errors.CallFailed(f"{where} ended the call without an answer.", code)
    return errors.CallFailed(f"A call to {where} failed with gRPC status {code}: {detail}", code)
