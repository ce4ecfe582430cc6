"""Ray's own classes at one end, ours at the other: each calls the other as if both were Ray's."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import ray
from fakes import FakeReplica, http_metadata, metadata, pending
from ray import cloudpickle
from ray.exceptions import ActorUnavailableError, RayTaskError
from ray.serve._private.replica_result import gRPCReplicaResult as RaysResult
from ray.serve._private.request_router.replica_wrapper import gRPCReplicaWrapper as RaysWrapper
from ray.serve.generated import serve_pb2, serve_pb2_grpc

from ray_serve_grpc.client import gRPCReplicaWrapper
from ray_serve_grpc.server import ReplicaServer

streams = pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])


def answer(value: Any, is_error: bool = False) -> serve_pb2.ASGIResponse:
    return serve_pb2.ASGIResponse(serialized_message=cloudpickle.dumps(value), is_error=is_error)


class StockService(serve_pb2_grpc.ASGIServiceServicer):
    """Answers as Ray's replica does; what it does is in the first argument."""

    accepts = True

    def __init__(self) -> None:
        self.running = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def HandleRequest(self, request: Any, context: Any) -> Any:
        return await self._one(cloudpickle.loads(request.request_args))

    async def HandleRequestStreaming(self, request: Any, context: Any) -> Any:
        for message in self._many(request):
            yield message

    async def HandleRequestWithRejection(self, request: Any, context: Any) -> Any:
        args = cloudpickle.loads(request.request_args)
        if args[0] == "hold before admission":
            return await self._hold()
        await self._admit(context)
        return await self._one(args) if self.accepts else serve_pb2.ASGIResponse(serialized_message=b"")

    async def HandleRequestWithRejectionStreaming(self, request: Any, context: Any) -> Any:
        await self._admit(context)
        if not self.accepts:
            yield serve_pb2.ASGIResponse(serialized_message=b"")
            return
        for message in self._many(request):
            yield message

    async def _admit(self, context: Any) -> None:
        await context.send_initial_metadata([("accepted", str(int(self.accepts))), ("num_ongoing_requests", "10")])

    async def _one(self, args: list[Any]) -> Any:
        if args[0] == "fail":
            return answer(ValueError("as it is"), True)
        return answer(args[0])

    def _many(self, request: Any) -> list[Any]:
        (item,) = cloudpickle.loads(request.request_args)
        if pickle.loads(request.pickled_request_metadata).is_http_request:
            return [serve_pb2.ASGIResponse(serialized_message=pickle.dumps(f"{item}-{n}")) for n in range(3)]
        return [answer(f"{item}-{n}") for n in range(3)]

    async def _hold(self) -> Any:
        self.running.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@asynccontextmanager
async def stock_replica() -> AsyncIterator[tuple[StockService, gRPCReplicaWrapper]]:
    """A replica without the plugin, and our way to it."""
    service = StockService()
    server = grpc.aio.server()
    serve_pb2_grpc.add_ASGIServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    wrapper = gRPCReplicaWrapper(ray.ActorID(os.urandom(16)), [f"tcp:127.0.0.1:{port}"], deployment="Stock")
    try:
        yield service, wrapper
    finally:
        wrapper.close()
        await server.stop(0)


@streams
@pytest.mark.parametrize("rejection", [False, True], ids=["without rejection", "with rejection"])
async def test_our_caller_and_a_stock_replica(stream, rejection):
    async with stock_replica() as (_, wrapper):
        for _ in range(2):  # before the channel is settled, and after
            result = wrapper.send_request_python(pending("hi", about=metadata(stream=stream)), with_rejection=rejection)
            if rejection:
                info = await result.get_rejection_response()
                assert (info.accepted, info.num_ongoing_requests) == (True, 10)
            if stream:
                assert [item async for item in result] == ["hi-0", "hi-1", "hi-2"]
            else:
                assert await result.__anext__() == "hi"
                assert await result.get_async() == "hi"


@streams
async def test_a_stock_replica_refuses(stream):
    async with stock_replica() as (service, wrapper):
        service.accepts = False
        result = wrapper.send_request_python(pending("hi", about=metadata(stream=stream)), with_rejection=True)
        assert not (await result.get_rejection_response()).accepted
        result.cancel()


async def test_the_http_proxy_and_a_stock_replica():
    async with stock_replica() as (_, wrapper):
        result = wrapper.send_request_python(pending("hi", about=http_metadata()), with_rejection=True)
        assert [pickle.loads(item) async for item in result] == ["hi-0", "hi-1", "hi-2"]


async def test_an_error_of_a_stock_replica():
    async with stock_replica() as (_, wrapper):
        result = wrapper.send_request_python(pending("fail"), with_rejection=True)
        with pytest.raises(ValueError, match="as it is"):
            await result.get_async()


async def test_a_cancelled_assignment_reaches_a_stock_replica():
    async with stock_replica() as (service, wrapper):
        result = wrapper.send_request_python(pending("hold before admission"), with_rejection=True)
        assigning = asyncio.ensure_future(result.get_rejection_response())
        await asyncio.wait_for(service.running.wait(), 10)
        assigning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await assigning
        await asyncio.wait_for(service.cancelled.wait(), 10)


async def test_a_stock_replica_that_stops():
    async with stock_replica() as (service, wrapper):
        await wrapper.send_request_python(pending("hi"), with_rejection=True).get_async()
        late = wrapper.send_request_python(pending("hold before admission"), with_rejection=True)
        await asyncio.wait_for(service.running.wait(), 10)
    with pytest.raises(ActorUnavailableError):
        await asyncio.wait_for(late.get_rejection_response(), 10)


# The other way round.


class StockCaller:
    """Ray's own wrapper and result on our server."""

    def __init__(self, wrapper: RaysWrapper) -> None:
        self._wrapper = wrapper

    def call(self, *args: Any, rejection: bool = True, **about: Any) -> RaysResult:
        request = pending(*args, about=metadata(_on_separate_loop=False, **about))
        return self._wrapper.send_request_python(request, with_rejection=rejection)


@asynccontextmanager
async def our_replica(user_code: Any, **options: Any) -> AsyncIterator[StockCaller]:
    server = ReplicaServer(
        FakeReplica(user_code, **options), host="127.0.0.1", unix_path=None, identity="ab" * 16, authorization=None
    )
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = serve_pb2_grpc.ASGIServiceStub(channel)
        yield StockCaller(RaysWrapper(stub, ray.ActorID(os.urandom(16))))
    await server.stop(0)


async def echo(value: Any) -> Any:
    return value


async def repeat(value: Any) -> Any:
    for number in range(3):
        yield f"{value}-{number}"


@streams
@pytest.mark.parametrize("rejection", [False, True], ids=["without rejection", "with rejection"])
async def test_a_stock_caller_and_our_replica(stream, rejection):
    async with our_replica(repeat if stream else echo) as caller:
        result = caller.call("hi", rejection=rejection, stream=stream)
        if rejection:
            info = await result.get_rejection_response()
            assert (info.accepted, info.num_ongoing_requests) == (True, 1)
        if stream:
            assert [item async for item in result] == ["hi-0", "hi-1", "hi-2"]
        else:
            assert await result.get_async() == "hi"


@streams
async def test_our_replica_refuses_a_stock_caller(stream):
    async with our_replica(echo, accepts=False) as caller:
        info = await caller.call("hi", stream=stream).get_rejection_response()
        assert (info.accepted, info.num_ongoing_requests) == (False, 7)


async def test_a_stock_caller_gets_an_error_of_its_own_class():
    async def fail() -> None:
        raise ValueError("user code failed")

    async with our_replica(fail) as caller:
        with pytest.raises(ValueError, match="user code failed") as caught:
            await caller.call().get_async()
        assert isinstance(caught.value, RayTaskError)


async def test_a_stock_callers_cancel_reaches_our_replica():
    running, cancelled = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        running.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with our_replica(hold) as caller:
        result = caller.call()
        await asyncio.wait_for(running.wait(), 10)
        result.cancel()
        await asyncio.wait_for(cancelled.wait(), 10)


async def test_a_large_value_for_a_stock_caller():
    async with our_replica(echo) as caller:
        assert await caller.call(b"x" * (3 << 20)).get_async() == b"x" * (3 << 20)
