"""`handle.broadcast`, `choose_replica` and `dispatch`."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from harness import Cluster, deployment, outcome, outcome_async, same_as_actor
from harness.board import passage
from harness.cluster import until
from ray import serve

import ray_serve_grpc


def own_id() -> str:
    return str(serve.get_replica_context().replica_id.unique_id)


@deployment(num_replicas=2, max_ongoing_requests=2)
class Twin:
    def __init__(self) -> None:
        self._level = 0

    def set_level(self, level: int, *, doubled: bool = False) -> Any:
        self._level = level * 2 if doubled else level
        return [own_id(), self._level]

    def total(self, array: Any) -> int:
        return int(array.sum())

    def fail(self) -> None:
        raise ValueError("broadcast failed")

    def who(self, _value: Any = None) -> str:
        return own_id()

    async def hold(self, gate: str) -> str:
        await passage(gate)
        return own_id()

    def items(self, count: int) -> Any:
        for number in range(count):
            yield [own_id(), number]


def twins() -> Any:
    return Twin.bind()


@same_as_actor(expect=[2, [6, 6]])
def test_a_broadcast_runs_on_every_replica(cluster: Cluster) -> Any:
    answers = cluster.app(twins).broadcast("set_level", 3, doubled=True).results(timeout_s=20)
    return [len({replica for replica, _ in answers}), [level for _, level in answers]]


@same_as_actor(expect=[[3_000_000, 3_000_000], True])
def test_a_broadcast_writes_an_array_once_for_all_replicas(cluster: Cluster) -> Any:
    handle = cluster.app(twins)
    array = np.ones(3_000_000, np.uint8)

    def lent_to_both() -> bool:
        before = ray_serve_grpc.status()["shared_memory"]["bytes_forwarded"]
        handle.broadcast("total", array).results(timeout_s=20)
        return ray_serve_grpc.status()["shared_memory"]["bytes_forwarded"] == before + 2 * array.nbytes

    totals = handle.broadcast("total", array).results(timeout_s=20)
    # The first ones find no memory that is ready.
    return [totals, cluster.transport != "native" or until(lent_to_both)]


@same_as_actor(expect=[2, 2])
def test_a_broadcast_can_be_awaited(cluster: Cluster) -> Any:
    handle = cluster.app(twins)

    async def call() -> Any:
        answers = await handle.broadcast("set_level", 1).results_async(timeout_s=20)
        again = await handle.broadcast("set_level", 1).results_async()
        return [len(answers), len(again)]

    return asyncio.run(call())


@same_as_actor(expect=[["ValueError"], ["broadcast failed"], 2], stock=False)
def test_a_failing_broadcast_raises_the_users_error(cluster: Cluster) -> Any:
    handle = cluster.app(twins)
    described = outcome(lambda: handle.broadcast("fail").results(timeout_s=20), contains=("broadcast failed",))
    collected = handle.broadcast("fail").results(timeout_s=20, return_exceptions=True)
    return [
        [name for name in described["caught by"] if name == "ValueError"],
        described["shows"],
        sum(isinstance(error, ValueError) for error in collected),
    ]


@same_as_actor(expect=True)
def test_a_request_goes_to_the_replica_that_was_chosen(cluster: Cluster) -> Any:
    handle = cluster.app(twins)

    async def call() -> Any:
        same = []
        for _ in range(6):
            async with handle.who.choose_replica() as selection:
                answer = await handle.dispatch(selection, "value")
                same.append(selection.replica_id.endswith(answer))
        return all(same)

    return asyncio.run(call())


@same_as_actor(expect=[[0, 1, 2], True])
def test_a_stream_goes_to_the_replica_that_was_chosen(cluster: Cluster) -> Any:
    handle = cluster.app(twins).options(stream=True)

    async def call() -> Any:
        async with handle.items.choose_replica() as selection:
            items = [item async for item in handle.dispatch(selection, 3)]
        return [[number for _, number in items], all(selection.replica_id.endswith(who) for who, _ in items)]

    return asyncio.run(call())


@same_as_actor(expect=[1, 0, 0, True])
def test_a_choice_reserves_a_slot_until_it_is_left(cluster: Cluster) -> Any:
    handle = cluster.app(twins)

    async def call() -> Any:
        async with handle.who.choose_replica():
            held = await asyncio.to_thread(cluster.ongoing, "Twin", twins)
        left = await asyncio.to_thread(until, lambda: cluster.ongoing("Twin", twins) == 0)
        async with handle.who.choose_replica() as selection:
            await handle.dispatch(selection)
        done = await asyncio.to_thread(until, lambda: cluster.ongoing("Twin", twins) == 0)
        return [held, int(not left), int(not done)]

    counts = asyncio.run(call())
    return [*counts, handle.who.remote().result(timeout_s=20) != ""]


@same_as_actor(expect=["ValueError", "RuntimeError"])
def test_a_choice_is_good_for_one_dispatch_of_its_own_deployment(cluster: Cluster) -> Any:
    handle = cluster.app(twins)
    other = serve.run(Twin.options(name="Other", num_replicas=1).bind(), name="dispatch-other", route_prefix=None)

    async def call() -> Any:
        async with handle.who.choose_replica() as selection:
            try:
                other.dispatch(selection)
                wrong = "accepted"
            except ValueError:
                wrong = "ValueError"
            await handle.dispatch(selection)
            second = await outcome_async(_await(lambda: handle.dispatch(selection)))
        return [wrong, "RuntimeError" if "RuntimeError" in second["caught by"] else second]

    result = asyncio.run(call())
    serve.delete("dispatch-other", _blocking=False)
    return result


async def _await(call: Any) -> Any:
    return await call()
