"""Requests over Serve's own gRPC ingress."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from harness import Cluster, deployment, same_as_actor
from harness.board import note, passage
from ray import serve
from ray.serve.generated import serve_pb2, serve_pb2_grpc

APP = "test-grpc-proxy-greeters"


@deployment
class Names:
    def title(self, name: str) -> str:
        return name.title()


@deployment(max_ongoing_requests=20)
class Greeter:
    def __init__(self, names: Any) -> None:
        self._names = names

    async def __call__(self, message: Any) -> Any:
        name = await self._names.title.remote(message.name)
        return serve_pb2.UserDefinedResponse(greeting=f"Hello {name}", num_x2=message.num * 2)

    async def Method1(self, message: Any, grpc_context: Any) -> Any:
        grpc_context.set_trailing_metadata([("model", serve.get_multiplexed_model_id() or "none")])
        if message.name == "held":
            return await self._hold(message.foo)
        if message.name == "refused":
            grpc_context.set_code(grpc.StatusCode.FAILED_PRECONDITION)
            grpc_context.set_details("refused by the user")
            raise ValueError("refused")
        return serve_pb2.UserDefinedResponse(greeting=message.name, num_x2=1)

    async def Streaming(self, message: Any) -> Any:
        for number in range(message.num):
            if message.name == "gated" and number == 1:
                await passage(message.foo)
            yield serve_pb2.UserDefinedResponse(greeting=f"{number}", num_x2=number)

    async def _hold(self, key: str) -> Any:
        try:
            await note(f"{key} running")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await note(f"{key} cancelled")
            raise


def greeters() -> Any:
    return Greeter.bind(Names.bind())


def stub(cluster: Cluster) -> tuple[Any, grpc.Channel]:
    cluster.app(greeters, route=True)
    channel = grpc.insecure_channel(cluster.grpc_target, options=[("grpc.enable_http_proxy", 0)])
    return serve_pb2_grpc.UserDefinedServiceStub(channel), channel


METADATA = (("application", APP),)


def message(name: str, num: int = 3, foo: str = "") -> Any:
    return serve_pb2.UserDefinedMessage(name=name, num=num, foo=foo)


@same_as_actor(expect=["Hello Ray", 6])
def test_a_unary_request_comes_back_through_two_hops(cluster: Cluster) -> Any:
    service, channel = stub(cluster)
    with channel:
        answer = service.__getattribute__("__call__")(message("ray"), metadata=METADATA, timeout=30)
    return [answer.greeting, answer.num_x2]


@same_as_actor(expect=[str(number) for number in range(50)])
def test_a_streaming_request_brings_all_items(cluster: Cluster) -> Any:
    service, channel = stub(cluster)
    with channel:
        return [item.greeting for item in service.Streaming(message("s", 50), metadata=METADATA, timeout=30)]


@same_as_actor(expect=["0", "1", "end"])
def test_an_item_leaves_before_the_next_is_made(cluster: Cluster) -> Any:
    service, channel = stub(cluster)
    key = cluster.key()
    with channel:
        items = service.Streaming(message("gated", 2, key), metadata=METADATA, timeout=30)
        first = next(items).greeting
        cluster.board.open(key)
        return [first, next(items).greeting, next(items, "end")]


@same_as_actor()
def test_codes_details_and_trailers_are_as_on_the_actor_path(cluster: Cluster) -> Any:
    service, channel = stub(cluster)
    with channel:
        _, call = service.Method1.with_call(
            message("fine"), metadata=(*METADATA, ("multiplexed_model_id", "m9"), ("request_id", "r1")), timeout=30
        )
        trailers = {key: value for key, value in call.trailing_metadata() if key in ("model", "request_id")}
        try:
            service.Method1(message("refused"), metadata=METADATA, timeout=30)
            refused: Any = "accepted"
        except grpc.RpcError as error:
            refused = [error.code().name, error.details()]
        try:
            service.Method1(message("fine"), metadata=(("application", "no-such-app"),), timeout=30)
            unknown: Any = "accepted"
        except grpc.RpcError as error:
            unknown = error.code().name
    return [trailers, refused, unknown]


@same_as_actor(expect=1)
def test_a_client_that_cancels_cancels_the_replicas_work(cluster: Cluster) -> Any:
    service, channel = stub(cluster)
    key = cluster.key()
    with channel:
        call = service.Method1.future(message("held", foo=key), metadata=METADATA, timeout=60)
        cluster.board.wait(f"{key} running")
        call.cancel()
        return len(cluster.board.wait(f"{key} cancelled"))
