"""A result keeps the contract of Ray's ReplicaResult, whatever the call does and whenever it is asked."""

from __future__ import annotations

import asyncio
import gc
import logging
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fakes
import pytest
from fakes import FakeCall, metadata, result_of, value
from ray.exceptions import ActorUnavailableError, RaySystemError, RayTaskError
from ray.serve.exceptions import RequestCancelledError

from ray_serve_grpc import _native, config, errors
from ray_serve_grpc.bridge import BURST
from ray_serve_grpc.seam import adapter

LOST = (_native.STATUS_UNAVAILABLE, "connection reset")


def user_error(error: Exception) -> tuple[int, Any, tuple[()]]:
    try:
        raise error
    except Exception as raised:
        return (*errors.encode(raised, method="m", actor_id="00", limit=1 << 20), ())


def stream_of(call: FakeCall) -> Any:
    return result_of(call, metadata(stream=True))


async def in_thread(function: Any, *args: Any) -> Any:
    """Where there is no event loop."""
    return await asyncio.get_running_loop().run_in_executor(None, function, *args)


# Admission.


@pytest.mark.parametrize("accepted", [True, False])
async def test_the_admission_is_what_the_headers_said(accepted):
    result = result_of(FakeCall().admit(accepted, 5))
    for _ in range(2):
        info = await result.get_rejection_response()
        assert (info.accepted, info.num_ongoing_requests) == (accepted, 5)


async def test_the_admission_is_waited_for():
    call = FakeCall()
    waiting = asyncio.ensure_future(result_of(call).get_rejection_response())
    await asyncio.sleep(0)
    call.admit(True, 2)
    assert (await waiting).accepted


async def test_the_admission_counts_also_when_the_call_was_lost_right_after_it():
    result = result_of(FakeCall().admit().end(*LOST))
    assert (await result.get_rejection_response()).accepted
    with pytest.raises(ActorUnavailableError, match="lost after it had taken the request"):
        await result.get_async()


@pytest.mark.parametrize("code", [_native.STATUS_UNAVAILABLE, _native.STATUS_CANCELLED])
async def test_without_an_admission_the_router_is_told_to_try_another_replica(code):
    peer = fakes.peer()
    result = result_of(FakeCall().end(code, "connection refused"), peer=peer)
    with pytest.raises(ActorUnavailableError, match="connection refused") as caught:
        await result.get_rejection_response()
    assert caught.value.actor_id == peer.actor_id.hex()
    for part in ("'Model'", "tcp:10.0.0.7:4000", "lane unix", "serve status"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("code", "error"),
    [(_native.STATUS_RESOURCE_EXHAUSTED, errors.MessageTooLarge), (_native.STATUS_UNAUTHENTICATED, errors.CallFailed)],
)
async def test_a_failure_that_another_replica_would_not_mend_is_not_retried(code, error):
    with pytest.raises(error, match="the detail"):
        await result_of(FakeCall().end(code, "the detail")).get_rejection_response()


async def test_an_error_in_place_of_an_admission_is_raised():
    result = result_of(FakeCall().arrives(user_error(ValueError("early"))).end())
    with pytest.raises(ValueError, match="early"):
        await result.get_rejection_response()


async def test_cancelling_the_assignment_cancels_the_call(caplog, monkeypatch):
    call = FakeCall()
    waiting = asyncio.ensure_future(result_of(call).get_rejection_response())
    await asyncio.sleep(0)
    logger = logging.getLogger(config.LOGGER_NAME)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    with caplog.at_level(logging.INFO, config.LOGGER_NAME):
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert call.cancels == 1
    assert "request-1 was cancelled" in caplog.text


# Unary values.


async def test_a_value_that_is_there_needs_no_wait():
    result = result_of(FakeCall().arrives(value({"a": 1})).end())
    assert await result.get_async() == {"a": 1}
    assert await in_thread(result.get, 0) == {"a": 1}
    assert result.failure() is None


async def test_a_value_is_decoded_once_and_kept():
    result = result_of(FakeCall().arrives(value([1])).end())
    first = await result.get_async()
    assert await result.get_async() is first
    assert await in_thread(result.get, None) is first


async def test_many_await_one_result():
    call = FakeCall()
    result = result_of(call)
    waiting = [asyncio.ensure_future(result.get_async()) for _ in range(10)]
    await asyncio.sleep(0)
    call.arrives(value("x"))
    assert await asyncio.gather(*waiting) == ["x"] * 10


def test_many_threads_and_loops_ask_for_one_result():
    result = result_of(FakeCall().arrives(value([1])).end())
    start = threading.Barrier(8)

    def ask(number: int) -> Any:
        start.wait()
        return asyncio.run(result.get_async()) if number % 2 else result.get(None)

    with ThreadPoolExecutor(8) as threads:
        values = list(threads.map(ask, range(8)))
    assert all(found is values[0] for found in values)


async def test_a_result_can_be_asked_for_again_after_a_timeout():
    call = FakeCall()
    result = result_of(call)
    with pytest.raises(TimeoutError, match=r"request-1 has no result after 0\.01 s; it goes on"):
        await in_thread(result.get, 0.01)
    call.arrives(value(6))
    assert await in_thread(result.get, 5) == 6


async def test_an_awaiter_that_is_cancelled_neither_cancels_the_call_nor_loses_the_value():
    call = FakeCall()
    result = result_of(call)
    waiting = asyncio.ensure_future(result.get_async())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    call.arrives(value(1))
    assert (await result.get_async(), call.cancels) == (1, 0)


@pytest.mark.parametrize("name", ["get", "__next__"])
async def test_blocking_in_an_event_loop_is_refused(name):
    result = result_of(FakeCall().arrives(value(1)))
    arguments = (None,) if name == "get" else ()
    with pytest.raises(RuntimeError, match="should not be called from within an `asyncio` event loop"):
        getattr(result, name)(*arguments)


async def test_a_user_error_is_raised_each_time_anew():
    result = result_of(FakeCall().admit().arrives(user_error(ValueError("bad input"))).end())
    raised = []
    for ask in (result.get_async, result.get_async):
        with pytest.raises(ValueError, match="bad input") as caught:
            await ask()
        raised.append(caught.value)
    with pytest.raises(RayTaskError):
        await in_thread(result.get, None)
    assert raised[0] is not raised[1]
    assert result.failure() is None  # the transport did its part


async def test_an_answer_that_cannot_be_read_here():
    result = result_of(FakeCall().arrives((_native.KIND_VALUE, b"not a pickle", ())).end())
    for _ in range(2):
        with pytest.raises(RaySystemError, match="pickle"):
            await result.get_async()


async def test_an_end_without_an_answer():
    with pytest.raises(errors.CallFailed, match="without an answer"):
        await result_of(FakeCall().admit().end()).get_async()


async def test_iterating_over_a_unary_call_gives_its_value_once():
    result = result_of(FakeCall().arrives(value("x")).end())
    assert [item async for item in result] == ["x"]
    assert await result.get_async() == "x"
    other = result_of(FakeCall().arrives(value("y")).end())
    assert await in_thread(list, other) == ["y"]


async def test_raw_bytes_are_handed_on():
    assert (
        await result_of(FakeCall().arrives((_native.KIND_RAW, b"asgi", ())), fakes.http_metadata()).__anext__()
        == b"asgi"
    )
    view = await result_of(
        FakeCall().arrives((_native.KIND_RAW, bytearray(b"big"), ())), fakes.http_metadata()
    ).__anext__()
    assert pickle.PickleBuffer(view).raw() == b"big"


@pytest.mark.parametrize("name", ["cloudpickle", "pickle", "msgpack", "orjson"])
async def test_values_in_the_serialization_of_the_handle(name):
    about = metadata(response_serialization=name)
    assert await result_of(FakeCall().arrives(value([1, "a"], about)), about).get_async() == [1, "a"]


# A stock replica's answers.


async def test_answers_of_a_stock_replica():
    def stock(flag: int, content: Any, about: Any = None) -> Any:
        call = FakeCall().admit().arrives((flag, pickle.dumps(content), ())).end()
        return result_of(call, about, dialect=_native.DIALECT_STOCK)

    assert await stock(0, [1]).get_async() == [1]
    assert await stock(0, "asgi", fakes.http_metadata()).__anext__() == pickle.dumps("asgi")
    with pytest.raises(ValueError, match="as it is"):
        await stock(1, ValueError("as it is")).get_async()


# Cancelling.


async def test_cancel_ends_the_call_for_everybody():
    call = FakeCall().admit()
    result = result_of(call)
    waiting = asyncio.ensure_future(result.get_async())
    await asyncio.sleep(0)
    result.cancel()
    result.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(RequestCancelledError, match="request-1"):
        await in_thread(result.get, None)
    assert call.cancels == 1
    assert isinstance(result.failure(), RequestCancelledError)


async def test_cancel_after_the_end_changes_nothing():
    call = FakeCall().arrives(value(1)).end()
    result = result_of(call)
    result.cancel()
    assert (await result.get_async(), call.cancels, result.failure()) == (1, 0, None)


async def test_a_cancelled_stream_gives_no_more_items():
    result = stream_of(FakeCall().arrives(value(1), value(2), value(3)))
    assert await result.__anext__() == 1
    result.cancel()
    for _ in range(2):
        with pytest.raises(asyncio.CancelledError):
            await result.__anext__()
        with pytest.raises(RequestCancelledError):
            await in_thread(result.__next__)


async def test_a_dropped_stream_goes_and_so_does_its_call():
    call = FakeCall()
    result = stream_of(call)
    called = []
    result.add_done_callback(called.append)
    gone = weakref.ref(result)
    del result
    assert gone() is None
    call.end(_native.STATUS_CANCELLED)  # what dropping the native call does
    assert called == [None]


async def test_a_dropped_unary_call_runs_to_its_end():
    call = FakeCall()
    result = result_of(call)
    alive = weakref.ref(result)
    del result
    assert alive() is not None
    call.arrives(value(1)).end()
    assert alive() is None
    assert call.cancels == 0


# Streams.


async def test_items_in_their_order_then_the_end():
    call = FakeCall()
    result = stream_of(call)
    got: list[Any] = []

    async def read() -> None:
        got.extend([item async for item in result])

    reading = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    call.arrives(value(0), value(1))
    await asyncio.sleep(0)
    call.arrives(value(2)).end()
    await reading
    assert got == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(StopAsyncIteration):
            await result.__anext__()
        assert await in_thread(list, result) == []


async def test_items_for_a_thread():
    call = FakeCall().arrives(*(value(number) for number in range(5))).end()
    assert await in_thread(list, stream_of(call)) == [0, 1, 2, 3, 4]


async def test_large_items_are_taken_one_by_one():
    block = b"x" * 100_000
    call = FakeCall().arrives(*[value(block)] * 4)
    result = stream_of(call)
    assert await result.__anext__() == block
    assert len(call.messages) == 3


async def test_small_items_are_taken_in_batches():
    call = FakeCall().arrives(*[value(1)] * 4)
    await stream_of(call).__anext__()
    assert not call.messages


async def test_a_reader_that_never_waits_leaves_the_loop_its_turns():
    result = stream_of(FakeCall().arrives(*[value(number) for number in range(5 * BURST)]).end())
    read: list[int] = []
    turns: list[int] = []

    async def other() -> None:
        while True:
            turns.append(len(read))
            await asyncio.sleep(0)

    running = asyncio.ensure_future(other())
    async for item in result:
        read.append(item)  # noqa: PERF401 - it is looked at meanwhile
    running.cancel()
    assert read == list(range(5 * BURST))
    assert turns == [BURST, 2 * BURST, 3 * BURST, 4 * BURST, 5 * BURST]


async def test_an_awaiter_that_is_cancelled_loses_no_item():
    call = FakeCall()
    result = stream_of(call)
    waiting = asyncio.ensure_future(result.__anext__())
    await asyncio.sleep(0)
    waiting.cancel()
    call.arrives(value("kept"))
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await result.__anext__() == "kept"


async def test_a_user_error_is_the_last_item():
    result = stream_of(FakeCall().arrives(value(1), user_error(KeyError("k"))).end())
    assert await result.__anext__() == 1
    with pytest.raises(KeyError):
        await result.__anext__()
    with pytest.raises(StopAsyncIteration):
        await result.__anext__()


async def test_a_lost_stream_never_ends_cleanly():
    result = stream_of(FakeCall().admit().arrives(value(1)).end(*LOST))
    assert await result.__anext__() == 1
    for _ in range(2):
        with pytest.raises(ActorUnavailableError):
            await result.__anext__()
    with pytest.raises(ActorUnavailableError):
        await in_thread(result.__next__)


async def test_a_message_that_comes_between_two_looks_is_not_lost():
    class Late(FakeCall):
        def status(self) -> Any:
            if self.ended is None:
                self.arrives(value("just in time")).end()
            return self.ended

    assert [item async for item in stream_of(Late())] == ["just in time"]
    assert await result_of(Late()).get_async() == "just in time"


# Callbacks, and what Ray's tables hold.


@pytest.mark.parametrize("stream", [True, False])
async def test_callbacks_run_once_at_the_end_also_when_nobody_reads(stream):
    call = FakeCall()
    result = result_of(call, metadata(stream=stream))
    outcomes: list[Any] = []
    result.add_done_callback(outcomes.append)
    result.add_done_callback(outcomes.append)
    call.admit().arrives(value(1))
    assert outcomes == []
    call.end()
    assert outcomes == [None, None]
    result.add_done_callback(outcomes.append)
    assert outcomes == [None, None, None]


async def test_callbacks_hear_why_a_call_failed():
    call = FakeCall().admit()
    result = result_of(call)
    outcomes: list[Any] = []
    result.add_done_callback(outcomes.append)
    call.end(*LOST)
    assert isinstance(outcomes[0], ActorUnavailableError)


async def test_callbacks_hear_of_a_cancel():
    outcomes: list[Any] = []
    result = result_of(FakeCall().admit(False))
    result.add_done_callback(outcomes.append)
    result.cancel()
    assert isinstance(outcomes[0], RequestCancelledError)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_is_in_rays_table_until_it_ends(stream):
    context = adapter._serve_context()
    context._set_request_context(_internal_request_id="parent")
    call = FakeCall()
    result = result_of(call, metadata(stream=stream))
    (child,) = context._get_in_flight_requests("parent").values()
    child.cancel()
    assert call.cancels == 1
    assert not context._get_in_flight_requests("parent")
    del result


async def test_rays_table_does_not_keep_a_stream():
    context = adapter._serve_context()
    context._set_request_context(_internal_request_id="parent of a stream")
    result = stream_of(FakeCall())
    gone = weakref.ref(result)
    del result
    assert gone() is None
    (child,) = context._get_in_flight_requests("parent of a stream").values()
    child.cancel()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("failing", [True, False])
async def test_a_request_leaves_no_reference_cycle(stream, failing):
    async def ask() -> None:
        call = FakeCall().admit()
        result = result_of(call, metadata(stream=stream))
        result.add_done_callback(lambda _: None)
        await result.get_rejection_response()
        call.arrives(value(1))
        call.end(*LOST) if failing else call.end()
        try:
            async for _ in result:
                pass
            await result.__anext__()
        except (ActorUnavailableError, StopAsyncIteration):
            pass

    await ask()
    gc.collect()
    gc.disable()
    try:
        await ask()
        assert gc.collect() == 0
    finally:
        gc.enable()
