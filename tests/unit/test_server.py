"""The server answers every call once, in the caller's dialect, and keeps the replica's books right."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import pickle
import threading
from typing import Any

import fakes
import numpy as np
import pytest
from fakes import FakeReplica, FakeServerCall, metadata
from ray import cloudpickle
from ray.exceptions import RayTaskError
from ray.serve._private.common import RequestProtocol

from ray_serve_grpc import _native, errors, server
from ray_serve_grpc.bridge import bridge_for
from ray_serve_grpc.seam import adapter
from ray_serve_grpc.serializers import RPCSerializer

UNARY = (_native.METHOD_UNARY, _native.METHOD_UNARY_REJECTION)
STREAMING = (_native.METHOD_STREAMING, _native.METHOD_STREAMING_REJECTION)
NATIVE, STOCK = _native.DIALECT_NATIVE, _native.DIALECT_STOCK
MIB = 1 << 20

dialects = pytest.mark.parametrize("dialect", [NATIVE, STOCK], ids=["native", "stock"])


def called(method: int, *args: Any, _dialect: int = NATIVE, _about: Any = None, **kwargs: Any) -> FakeServerCall:
    about = _about or metadata(stream=method in STREAMING)
    serializer = RPCSerializer(about.request_serialization, about.response_serialization)
    if _dialect == STOCK:
        fields = (adapter.metadata_to_stock(about), *serializer.stock_request(list(args), kwargs))
        return FakeServerCall(method, STOCK, fields=fields)
    strings, extra = adapter.metadata_to_wire(about)
    body, buffers = serializer.encode_request(args, kwargs)
    if isinstance(body, list):
        body = b"".join(body)
    return FakeServerCall(method, metadata=strings, extra=extra, body=body, buffers=tuple(map(bytearray, buffers)))


def serving(replica: Any) -> server.ReplicaServer:
    """A server that was started, but for its sockets."""
    found = server.ReplicaServer(replica, host="", unix_path=None, identity="ab" * 16, authorization=None)
    found._loop = asyncio.get_running_loop()
    found._bridge = bridge_for(found._loop)
    found._answers = server.AnswerFlush(found._loop)
    found._admissions = server.AdmissionFlush(found._loop)
    found._context = contextvars.copy_context()
    return found


async def answered(call: FakeServerCall, replica: Any) -> FakeServerCall:
    """The call, once it was answered; no task of it is left."""
    serving(replica)._on_call(call)
    await asyncio.wait_for(asyncio.gather(*_tasks()), 10)
    return call


def _tasks() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_coro().__name__ == "_serve"]  # type: ignore[union-attr]


def values(call: FakeServerCall) -> list[Any]:
    """What the caller makes of the messages."""
    results = []
    for kind, body, buffers in call.sent:
        assert kind == _native.KIND_VALUE
        data = body if isinstance(body, bytes) else b"".join(body)
        results.append(RPCSerializer().decode_response(data, buffers))
    return results


def error(call: FakeServerCall) -> BaseException:
    kind, body, _ = call.sent[-1]
    if call.dialect == STOCK:
        assert kind == 1
        raised: BaseException = cloudpickle.loads(body).as_instanceof_cause()
        return raised
    return errors.raisable(errors.decode(kind, body))


async def echo(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


async def count(to: int) -> Any:
    for number in range(to):
        yield number


async def fail(*_: Any) -> Any:
    raise ValueError("user code failed")


@dialects
@pytest.mark.parametrize("method", UNARY)
async def test_a_unary_call(method, dialect):
    replica = FakeReplica(echo)
    call = await answered(called(method, 1, _dialect=dialect, k="v"), replica)
    assert values(call) == [((1,), {"k": "v"})]
    assert call.finished == (_native.STATUS_OK, "")
    assert call.admitted == ((True, 1) if method == _native.METHOD_UNARY_REJECTION else None)
    assert (replica.events, replica.ongoing) == (["ok"], 0)


@dialects
@pytest.mark.parametrize("method", STREAMING)
async def test_a_stream(method, dialect):
    replica = FakeReplica(count)
    call = await answered(called(method, 3, _dialect=dialect), replica)
    assert values(call) == [0, 1, 2]
    assert call.finished == (_native.STATUS_OK, "")
    assert replica.events == ["ok"]


@dialects
@pytest.mark.parametrize("method", [_native.METHOD_UNARY_REJECTION, _native.METHOD_STREAMING_REJECTION])
async def test_a_refusal(method, dialect):
    call = await answered(called(method, 3, _dialect=dialect), FakeReplica(echo, accepts=False))
    assert call.admitted == (False, 7)
    # Ray's own caller needs a message to see the headers of a call that ended well.
    assert call.sent == ([] if dialect == NATIVE else [(0, b"", ())])
    assert call.finished == (_native.STATUS_OK, "")


async def test_the_admission_is_told_before_user_code_runs():
    call = called(_native.METHOD_UNARY_REJECTION)

    async def look() -> Any:
        return call.admitted

    await answered(call, FakeReplica(look))
    assert values(call) == [(True, 1)]


@pytest.mark.parametrize("method", [*UNARY, *STREAMING])
async def test_a_request_that_its_caller_has_given_up_does_not_run(method):
    ran = []

    async def user_code(*_: Any) -> Any:
        ran.append(True)

    async def items(*_: Any) -> Any:
        ran.append(True)
        yield 1

    replica = FakeReplica(items if method in STREAMING else user_code)
    call = called(method)
    call.revoked = True
    await answered(call, replica)
    assert (ran, call.sent, call.admitted) == ([], [], None)
    assert call.finished == (_native.STATUS_CANCELLED, server.GIVEN_UP)
    # The slot that it held for a moment is free again.
    assert replica.ongoing == 0


async def test_a_request_leaves_the_replicas_books_after_its_answer_and_before_the_loops_next_turn():
    replica = FakeReplica(echo)
    call = called(_native.METHOD_UNARY_REJECTION, 1)
    send, next_turn = call.send, []

    def sending(*message: Any) -> bool:
        replica.events.append("sent")
        asyncio.get_running_loop().call_soon(lambda: next_turn.append((replica.ongoing, call.finished)))
        return send(*message)

    call.send = sending  # type: ignore[method-assign]
    await answered(call, replica)
    assert replica.events == ["sent", "ok"]
    assert next_turn == [(0, (_native.STATUS_OK, ""))]


async def test_an_answer_counts_also_when_the_books_cannot_be_closed(caplog, monkeypatch):
    monkeypatch.setattr(server, "logger", logging.getLogger("books"))
    replica = FakeReplica(echo)
    replica.events = None  # type: ignore[assignment]
    call = await answered(called(_native.METHOD_UNARY_REJECTION, 1), replica)
    assert values(call) == [((1,), {})]
    assert call.finished == (_native.STATUS_OK, "")
    assert "request-1 was answered" in caplog.text


async def test_an_answer_that_cannot_be_sent_frees_its_slot():
    replica = FakeReplica(echo)
    call = called(_native.METHOD_UNARY_REJECTION, 1)
    send, refusals = call.send, [MemoryError("no room")]

    def sending(*message: Any) -> bool:
        if refusals:
            raise refusals.pop()
        return send(*message)

    call.send = sending  # type: ignore[method-assign]
    await answered(call, replica)
    assert (replica.events, replica.ongoing) == (["MemoryError"], 0)
    assert isinstance(error(call), MemoryError)


@pytest.mark.parametrize("calls", [1, 3])
async def test_answers_of_one_turn_leave_together_and_a_lone_one_at_once(calls):
    ready = asyncio.Event()

    async def user_code() -> Any:
        await ready.wait()

    under_way = [called(_native.METHOD_UNARY_REJECTION) for _ in range(calls)]
    replica_server = serving(FakeReplica(user_code))
    for call in under_way:
        replica_server._on_call(call)
    await asyncio.sleep(0)
    ready.set()
    await asyncio.gather(*_tasks())
    assert [call.finished_at_once for call in under_way] == [calls == 1] * calls
    await asyncio.sleep(0)
    assert [call.flushes for call in under_way] == [int(calls > 1)] * calls


async def test_the_requests_memory_is_released_before_user_code_runs():
    call = called(_native.METHOD_UNARY, b"x" * 100)

    async def look(data: bytes) -> Any:
        return call.body

    await answered(call, FakeReplica(look))
    assert values(call) == [b""]


@dialects
@pytest.mark.parametrize("method", [*UNARY, *STREAMING])
async def test_a_user_error(method, dialect):
    async def fails_late(*_: Any) -> Any:
        yield 1
        await fail()

    replica = FakeReplica(fails_late if method in STREAMING else fail)
    call = await answered(called(method, _dialect=dialect), replica)
    assert isinstance(error(call), ValueError)
    assert isinstance(error(call), RayTaskError)
    assert call.finished == (_native.STATUS_OK, "")
    assert replica.events == ["ValueError"]
    assert len(call.sent) == (2 if method in STREAMING else 1)


@pytest.mark.parametrize("name", ["msgpack", "orjson", "noop"])
async def test_errors_travel_outside_of_the_users_serialization(name):
    about = metadata(response_serialization=name)
    call = await answered(called(_native.METHOD_UNARY, b"x", _about=about), FakeReplica(fail))
    assert isinstance(error(call), ValueError)


@pytest.mark.parametrize("name", ["msgpack", "orjson", "noop"])
async def test_a_stock_caller_that_could_not_read_an_error_gets_a_status(name):
    about = metadata(response_serialization=name)
    call = await answered(called(_native.METHOD_UNARY, b"x", _dialect=STOCK, _about=about), FakeReplica(fail))
    code, detail = call.finished
    assert code == _native.STATUS_UNKNOWN
    assert "user code failed" in detail


@pytest.mark.parametrize(
    "raised", [asyncio.CancelledError("mine"), GeneratorExit(), type("Own", (BaseException,), {})()]
)
async def test_what_user_code_raises_past_exception_is_an_error_of_the_call(raised):
    async def user_code() -> Any:
        raise raised

    call = await answered(called(_native.METHOD_UNARY), FakeReplica(user_code))
    assert isinstance(error(call), RayTaskError)
    assert not isinstance(error(call), asyncio.CancelledError)
    assert type(raised).__name__ in str(error(call))


@dialects
async def test_an_unreadable_request_is_an_answer_not_a_reason_to_retry(dialect):
    call = called(_native.METHOD_UNARY_REJECTION, 1, _dialect=dialect)
    if dialect == NATIVE:
        call.body = b"not a pickle"
    else:
        call.fields = (call.fields[0], b"not a pickle", call.fields[2])
    await answered(call, FakeReplica(echo))
    assert call.admitted is not None
    assert call.admitted[0]
    assert "pickle" in str(error(call))
    assert call.finished == (_native.STATUS_OK, "")


@pytest.mark.parametrize(
    "method", [_native.METHOD_UNARY_REJECTION, _native.METHOD_STREAMING_REJECTION, _native.METHOD_UNARY]
)
async def test_an_unserializable_result(method):
    async def one() -> Any:
        return threading.Lock()

    async def many() -> Any:
        yield threading.Lock()

    replica = FakeReplica(many if method in STREAMING else one)
    call = await answered(called(method), replica)
    assert isinstance(error(call), errors.NotSerializable)
    assert isinstance(error(call), TypeError)
    assert replica.ongoing == 0


@pytest.mark.parametrize("method", [_native.METHOD_UNARY_REJECTION, _native.METHOD_STREAMING_REJECTION])
@pytest.mark.parametrize("make", [lambda: b"x" * 5000, lambda: np.zeros(5000), lambda: "x" * 100_000])
async def test_a_result_over_the_limit(method, make, monkeypatch):
    monkeypatch.setattr(adapter, "max_message_size", lambda: 4096)

    async def one() -> Any:
        return make()

    async def many() -> Any:
        yield 1
        yield make()

    replica = FakeReplica(many if method in STREAMING else one)
    call = await answered(called(method), replica)
    assert "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE=4096" in str(error(call))
    assert isinstance(error(call), RayTaskError)
    assert replica.ongoing == 0


# The proxies' requests.


async def test_an_http_request_goes_in_unpickled_and_comes_out_as_it_is():
    async def asgi(request: Any) -> Any:
        yield pickle.dumps(request)

    for dialect in (NATIVE, STOCK):
        call = called(
            _native.METHOD_STREAMING_REJECTION,
            pickle.dumps({"path": "/"}),
            _dialect=dialect,
            _about=fakes.http_metadata(),
        )
        await answered(call, FakeReplica(asgi))
        ((kind, body, _),) = call.sent
        assert kind == (_native.KIND_RAW if dialect == NATIVE else 0)
        assert pickle.loads(body) == {"path": "/"}


async def test_a_grpc_request_comes_out_with_its_context():
    class Proto:
        def SerializeToString(self) -> bytes:
            return b"proto"

    async def user_code(request: Any) -> Any:
        return Proto()

    about = metadata(_request_protocol=RequestProtocol.GRPC, grpc_context={"code": 0})
    call = called(_native.METHOD_UNARY_REJECTION, pickle.dumps("request"), _about=about)
    assert values(await answered(call, FakeReplica(user_code))) == [({"code": 0}, b"proto")]


# Cancelling.


@pytest.mark.parametrize("method", [*UNARY, *STREAMING])
async def test_a_cancel_reaches_user_code_and_is_not_answered(method, caplog):
    started = asyncio.Event()

    async def one() -> Any:
        started.set()
        await asyncio.sleep(60)

    async def many() -> Any:
        yield 1
        await one()

    replica = FakeReplica(many if method in STREAMING else one)
    call = called(method)
    serving(replica)._on_call(call)
    await started.wait()
    call.cancel()
    await asyncio.gather(*_tasks())
    assert replica.events == ["CancelledError"]
    assert call.finished is None
    assert len(call.sent) == (1 if method in STREAMING else 0)
    assert not caplog.records


async def test_a_cancel_reaches_the_replica_also_while_a_slow_reader_is_waited_for():
    replica = FakeReplica(count)
    call = called(_native.METHOD_STREAMING_REJECTION, 5)
    call.full = True
    serving(replica)._on_call(call)
    await call.waited.wait()
    call.cancel()
    await asyncio.gather(*_tasks())
    assert replica.events == ["CancelledError"]


async def test_a_cancel_before_the_call_began():
    replica = FakeReplica(echo)
    call = called(_native.METHOD_UNARY)
    serving(replica)._on_call(call)
    call.cancel()
    await asyncio.gather(*_tasks(), return_exceptions=True)
    assert replica.events == []


# Streams wait for their reader.


async def test_a_stream_waits_when_the_queue_is_full():
    replica = FakeReplica(count)
    call = called(_native.METHOD_STREAMING, 3)
    call.full = True
    serving(replica)._on_call(call)
    await call.waited.wait()
    assert values(call) == [0]
    call.drain()
    await asyncio.gather(*_tasks())
    assert values(call) == [0, 1, 2]


async def test_a_stream_that_never_awaits_leaves_the_loop_its_turns():
    call = called(_native.METHOD_STREAMING, 100_000)
    serving(FakeReplica(count))._on_call(call)
    for _ in range(10):
        await asyncio.sleep(0)
    assert 0 < len(call.sent) < 100_000
    call.cancel()
    await asyncio.gather(*_tasks())


async def test_a_stream_stops_when_its_caller_left_although_the_loop_has_not_heard_of_it_yet():
    call = called(_native.METHOD_STREAMING, 100_000)
    send = call.send

    def lost(*message: Any) -> bool:
        call.cancelled = True
        return send(*message)

    call.send = lost  # type: ignore[method-assign]
    replica = FakeReplica(count)
    await answered(call, replica)
    assert len(call.sent) == 1
    assert replica.events == ["CancelledError"]


# Around a call.


async def test_user_code_sees_the_context_the_server_was_started_in_and_no_other_request():
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    seen = []

    async def user_code() -> None:
        seen.append(variable.get())
        variable.set("of a request")

    variable.set("of the start")
    found = serving(FakeReplica(user_code))
    variable.set("of a later caller")
    for _ in range(2):
        found._on_call(called(_native.METHOD_UNARY))
        await asyncio.gather(*_tasks())
    assert seen == ["of the start"] * 2


async def test_a_call_leaves_no_reference_cycle():
    replica = FakeReplica(echo)
    await answered(called(_native.METHOD_UNARY_REJECTION, 1), replica)
    gc.collect()
    gc.disable()
    try:
        await answered(called(_native.METHOD_UNARY_REJECTION, 1), replica)
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize(("code", "status"), [(3, 3), (None, 0), ("text", 1), (256 + 7, 7)])
async def test_user_code_that_ends_the_process(code, status, monkeypatch):
    ended = []

    async def user_code() -> None:
        raise SystemExit(code)

    class Stopping:
        def stop(self, grace: float, bridge: Any, callback: Any) -> None:
            callback()

    monkeypatch.setattr(server.os, "_exit", ended.append)
    found = serving(FakeReplica(user_code))
    found._server = Stopping()  # type: ignore[assignment]
    call = called(_native.METHOD_UNARY_REJECTION)
    found._on_call(call)
    await asyncio.gather(*_tasks())
    assert call.finished[0] == _native.STATUS_UNAVAILABLE
    assert "SystemExit" in call.finished[1]
    assert ended == [status]


# What is sent is what was returned.


async def test_a_result_that_user_code_keeps_is_copied():
    class Model:
        output = np.zeros(MIB // 8)

        async def kept(self) -> Any:
            return self.output

        async def fresh(self) -> Any:
            return np.zeros(MIB // 8)

        async def stream(self) -> Any:
            for number in range(3):
                self.output[:] = number
                yield self.output

    model = Model()
    for method, user_code, copied in (
        (_native.METHOD_UNARY_REJECTION, model.kept, True),
        (_native.METHOD_UNARY, model.kept, True),
        (_native.METHOD_UNARY_REJECTION, model.fresh, False),
    ):
        call = await answered(called(method), FakeReplica(user_code))
        ((_, _, (buffer,)),) = call.sent
        assert (not isinstance(buffer, memoryview)) == copied
    call = await answered(called(_native.METHOD_STREAMING_REJECTION), FakeReplica(model.stream))
    assert [item[0] for item in values(call)] == [0, 1, 2]
