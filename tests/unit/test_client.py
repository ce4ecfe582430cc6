"""Requests go out in the replica's dialect, once it is known, or not at all."""

from __future__ import annotations

import asyncio
import pickle
import threading
from typing import Any

import pytest
import ray
from fakes import FakeChannel, metadata, pending, value
from ray.exceptions import ActorUnavailableError
from ray.serve.exceptions import RequestCancelledError

from ray_serve_grpc import _native, channels, errors
from ray_serve_grpc.client import gRPCReplicaWrapper
from ray_serve_grpc.seam import adapter

LOST = (_native.STATUS_UNAVAILABLE, "connection reset")


async def in_thread(function: Any, *args: Any) -> Any:
    """Where there is no event loop."""
    return await asyncio.get_running_loop().run_in_executor(None, function, *args)


@pytest.fixture
def wrapper(monkeypatch):
    """(wrapper, its channel)"""
    made: list[FakeChannel] = []

    def channel(*_: Any) -> FakeChannel:
        made.append(FakeChannel())
        return made[-1]

    monkeypatch.setattr(channels, "channel_to", channel)
    monkeypatch.setattr(channels, "_peers", {})
    sender = gRPCReplicaWrapper(ray.ActorID(b"\x07" * 16), ["unix:/run/r.sock"], deployment="Model")
    return sender, made[0]


@pytest.mark.parametrize(
    ("stream", "rejection", "method"),
    [
        (False, False, _native.METHOD_UNARY),
        (True, False, _native.METHOD_STREAMING),
        (False, True, _native.METHOD_UNARY_REJECTION),
        (True, True, _native.METHOD_STREAMING_REJECTION),
    ],
)
async def test_a_native_request(wrapper, stream, rejection, method):
    sender, channel = wrapper
    sender.send_request_python(pending(1, about=metadata(stream=stream), k="v"), with_rejection=rejection)
    ((kind, sent_method, strings, extra, body, buffers),) = channel.sent
    assert (kind, sent_method, extra, list(buffers)) == ("native", method, b"", [])
    assert strings[:3] == ("request-1", "internal-1", "method")
    args, kwargs = pickle.loads(body)
    assert (list(args), kwargs) == ([1], {"k": "v"})


async def test_requests_of_one_turn_leave_together_and_a_lone_one_at_once(wrapper):
    sender, channel = wrapper
    for number in range(3):
        sender.send_request_python(pending(number), with_rejection=True)
    assert (channel.flushed, channel.flushes) == ([True, False, False], 0)
    await asyncio.sleep(0)
    assert channel.flushes == 2


async def test_a_stock_request(wrapper):
    sender, channel = wrapper
    channel.settled = _native.DIALECT_STOCK
    result = sender.send_request_python(pending(1, k="v"), with_rejection=True)
    ((kind, _, (about, args, kwargs)),) = channel.sent
    assert kind == "stock"
    assert pickle.loads(about) == metadata()
    assert (pickle.loads(args), pickle.loads(kwargs)) == ([1], {"k": "v"})
    channel.calls[0].arrives((0, pickle.dumps("answer"), ()))
    assert await result.get_async() == "answer"


async def test_an_unserializable_argument_is_not_sent(wrapper):
    sender, channel = wrapper
    with pytest.raises(errors.NotSerializable):
        sender.send_request_python(pending(threading.Lock()), with_rejection=True)
    with pytest.raises(errors.UnknownSerialization):
        sender.send_request_python(pending(1, about=metadata(response_serialization="xml")), with_rejection=True)
    assert not channel.sent


@pytest.mark.parametrize("dialect", [_native.DIALECT_NATIVE, _native.DIALECT_STOCK])
async def test_a_request_over_the_limit_is_not_sent(wrapper, dialect, monkeypatch):
    sender, channel = wrapper
    channel.settled = dialect
    monkeypatch.setattr(adapter, "max_message_size", lambda: 2000)
    sender.send_request_python(pending(b"x" * 1000), with_rejection=True)
    with pytest.raises(errors.MessageTooLarge, match="Nothing was sent"):
        sender.send_request_python(pending(b"x" * 3000), with_rejection=True)
    assert len(channel.sent) == 1


async def test_java_replicas_are_refused(wrapper):
    with pytest.raises(RuntimeError, match="Java"):
        wrapper[0].send_request_java(pending(1))


# A channel that is not settled yet.


@pytest.mark.parametrize("dialect", [_native.DIALECT_NATIVE, _native.DIALECT_STOCK])
async def test_a_request_waits_for_the_channel_and_then_goes_in_its_dialect(wrapper, dialect):
    sender, channel = wrapper
    channel.settled = None
    result = sender.send_request_python(pending(1), with_rejection=True)
    admission = asyncio.ensure_future(result.get_rejection_response())
    blocked = asyncio.ensure_future(in_thread(result.get, 20))
    await asyncio.sleep(0)
    assert not channel.sent
    channel.settle(dialect)
    (call,) = channel.calls
    assert channel.sent[0][0] == ("native" if dialect == _native.DIALECT_NATIVE else "stock")
    call.admit()
    assert (await admission).accepted
    call.arrives(value("native") if dialect == _native.DIALECT_NATIVE else (0, pickle.dumps("stock"), ()))
    assert await blocked == channel.sent[0][0]
    assert await result.get_async() == channel.sent[0][0]


async def test_a_failure_to_connect_is_the_routers_to_handle(wrapper):
    sender, channel = wrapper
    channel.settled = None
    channel.failed = (_native.STATUS_UNAVAILABLE, "connection refused")
    result = sender.send_request_python(pending(1), with_rejection=True)
    outcomes: list[Any] = []
    result.add_done_callback(outcomes.append)
    channel.settle(None)
    with pytest.raises(ActorUnavailableError, match="connection refused"):
        await result.get_rejection_response()
    with pytest.raises(ActorUnavailableError):
        await result.get_async()
    assert isinstance(outcomes[0], ActorUnavailableError)


async def test_an_argument_that_turns_out_unserializable_is_an_error_of_the_result(wrapper):
    sender, channel = wrapper
    channel.settled = None
    result = sender.send_request_python(pending(threading.Lock()), with_rejection=True)
    channel.settle(_native.DIALECT_NATIVE)
    with pytest.raises(errors.NotSerializable):
        await result.get_rejection_response()
    with pytest.raises(errors.NotSerializable):
        await in_thread(result.get, None)
    assert not channel.sent


async def test_a_request_cancelled_while_it_waits_is_never_sent(wrapper):
    sender, channel = wrapper
    channel.settled = None
    result = sender.send_request_python(pending(1), with_rejection=True)
    outcomes: list[Any] = []
    result.add_done_callback(outcomes.append)
    waiting = asyncio.ensure_future(result.get_async())
    await asyncio.sleep(0)
    result.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    channel.settle(_native.DIALECT_NATIVE)
    assert not channel.sent
    assert isinstance(outcomes[0], RequestCancelledError)
    with pytest.raises(RequestCancelledError):
        await in_thread(result.get, None)


async def test_a_stream_dropped_while_it_waits_is_never_sent(wrapper):
    sender, channel = wrapper
    channel.settled = None
    result = sender.send_request_python(pending(1, about=metadata(stream=True)), with_rejection=True)
    outcomes: list[Any] = []
    result.add_done_callback(outcomes.append)
    del result
    channel.settle(_native.DIALECT_NATIVE)
    assert not channel.sent
    assert len(outcomes) == 1


async def test_a_timeout_while_the_channel_is_not_settled(wrapper):
    sender, channel = wrapper
    channel.settled = None
    result = sender.send_request_python(pending(1), with_rejection=False)
    with pytest.raises(TimeoutError, match="No connection to replica"):
        await in_thread(result.get, 0.01)
    channel.settle(_native.DIALECT_NATIVE)
    channel.calls[0].arrives(value(1))
    assert await in_thread(result.get, 5) == 1


# Channels are shared.


async def test_wrappers_of_one_replica_share_a_channel(wrapper):
    first, channel = wrapper
    second = gRPCReplicaWrapper(ray.ActorID(b"\x07" * 16), ["unix:/run/r.sock"], deployment="Model")
    first.close()
    first.close()
    assert channel.closed == 0
    second.send_request_python(pending(1), with_rejection=True)
    second.close()
    assert channel.closed == 1
    third = gRPCReplicaWrapper(ray.ActorID(b"\x07" * 16), ["unix:/run/r.sock"], deployment="Model")
    assert third._peer.channel is not channel


async def test_the_state_is_told(wrapper):
    sender, channel = wrapper
    assert "'Model'" in repr(sender)
    result = sender.send_request_python(pending(1), with_rejection=True)
    assert "under way" in repr(result)
    channel.calls[0].end(*LOST)
    assert "connection reset" in repr(result)
    assert channels.statistics()[("07" * 16)] == {"in_flight": 1}


@pytest.mark.parametrize("name", ["cloudpickle", "noop"])
async def test_the_trace_context_goes_along_where_there_is_room_for_it(wrapper, name, monkeypatch):
    monkeypatch.setattr(adapter, "tracing_is_on", lambda: True)
    monkeypatch.setattr(adapter, "inject_trace_context", lambda kwargs: kwargs.update(_ray_trace_ctx={"id": 1}))
    request = pending(b"x", about=metadata(request_serialization=name))
    wrapper[0].send_request_python(request, with_rejection=True)
    assert request.kwargs == ({} if name == "noop" else {"_ray_trace_ctx": {"id": 1}})
