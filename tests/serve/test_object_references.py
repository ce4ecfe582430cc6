"""`_to_object_ref` and its family: a by-value response becomes an object when somebody asks for one."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from harness import Cluster, collect, deployment, outcome, same_as_actor


@deployment
class Maker:
    def value(self, value: Any) -> Any:
        return value

    def fail(self) -> None:
        raise ValueError("no value to be had")

    def items(self, count: int) -> Any:
        yield from range(count)

    async def bad_items(self) -> Any:
        yield 1
        raise ValueError("no more items")


@deployment
class User:
    def __init__(self, maker: Any) -> None:
        self._maker = maker

    async def awaited(self) -> Any:
        reference = await self._maker.value.remote([4, 2])._to_object_ref()
        return [type(reference).__name__, await reference]

    async def given_to_a_task(self) -> Any:
        @ray.remote(num_cpus=0)
        def length(value: Any) -> int:
            return len(value)

        return await length.remote(await self._maker.value.remote(b"x" * 300_000)._to_object_ref())

    async def streamed(self) -> Any:
        references = await self._maker.options(stream=True).items.remote(4)._to_object_ref_gen()
        return [await reference async for reference in references]


def makers() -> Any:
    return User.bind(Maker.bind())


def maker(cluster: Cluster) -> Any:
    return cluster.handle("Maker", makers)


# Ray's own gRPC path refuses all of these.
@same_as_actor(stock=False, expect=["ObjectRef", {"k": 1}, {"k": 1}])
def test_a_response_becomes_an_object_reference(cluster: Cluster) -> Any:
    response = maker(cluster).value.remote({"k": 1})
    reference = response._to_object_ref_sync()
    return [type(reference).__name__, ray.get(reference, timeout=20), response.result(timeout_s=20)]


@same_as_actor(stock=False, expect=[["ObjectRef", [4, 2]], 300_000, [0, 1, 2, 3]])
def test_a_replica_makes_references_of_its_responses(cluster: Cluster) -> Any:
    user = cluster.app(makers)
    return [
        user.awaited.remote().result(timeout_s=30),
        user.given_to_a_task.remote().result(timeout_s=60),
        user.streamed.remote().result(timeout_s=30),
    ]


@same_as_actor(stock=False, expect=[3, "value"])
def test_a_reference_can_be_an_argument_of_a_task_and_of_a_call(cluster: Cluster) -> Any:
    @ray.remote(num_cpus=0)
    def increment(value: int) -> int:
        return value + 1

    handle = maker(cluster)
    return [
        ray.get(increment.remote(handle.value.remote(2)._to_object_ref_sync()), timeout=60),
        handle.value.remote(handle.value.remote("value")._to_object_ref_sync()).result(timeout_s=20),
    ]


@same_as_actor(stock=False, expect=[["ValueError"], ["no value to be had"]])
def test_a_failed_call_gives_a_reference_that_raises(cluster: Cluster) -> Any:
    reference = maker(cluster).fail.remote()._to_object_ref_sync()
    described = outcome(lambda: ray.get(reference, timeout=20), contains=("no value to be had",))
    return [[name for name in described["caught by"] if name == "ValueError"], described["shows"]]


@same_as_actor(stock=False, expect=[0, 1, 2, 3])
def test_a_stream_becomes_references(cluster: Cluster) -> Any:
    references = maker(cluster).options(stream=True).items.remote(4)._to_object_ref_gen_sync()
    return [ray.get(reference, timeout=20) for reference in references]


@same_as_actor(stock=False, expect=[[1], ["no more items"]])
def test_a_failing_stream_becomes_references_of_which_the_last_raises(cluster: Cluster) -> Any:
    references = maker(cluster).options(stream=True).bad_items.remote()._to_object_ref_gen_sync()
    items, error = collect(map(ray.get, references), contains=("no more items",))
    return [items, error["shows"]]


@same_as_actor(stock=False, expect=["again", "again"])
def test_awaiting_on_the_drivers_loop(cluster: Cluster) -> Any:
    async def call() -> Any:
        response = maker(cluster).value.remote("again")
        return [await (await response._to_object_ref()), await response]

    return asyncio.run(call())
