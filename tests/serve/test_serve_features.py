"""Features of Serve that lie over the transport: batching, local testing, reconfiguring, health, metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from harness import Cluster, deployment, outcome, same_as_actor
from harness.board import note, passage
from harness.cluster import until
from ray import serve


@deployment(max_ongoing_requests=100)
class Batcher:
    @serve.batch(max_batch_size=4, batch_wait_timeout_s=5)
    async def batched(self, values: list[int]) -> list[Any]:
        return [[value, len(values)] for value in values]

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=5)
    async def failing(self, values: list[int]) -> list[Any]:
        raise ValueError(f"batch of {len(values)}")

    @serve.batch(max_batch_size=3, batch_wait_timeout_s=5)
    async def streamed(self, values: list[int]) -> Any:
        for step in range(3):
            yield [value * 10 + step for value in values]

    async def call(self, value: int) -> Any:
        return await self.batched(value)

    async def fail(self, value: int) -> Any:
        return await self.failing(value)

    async def stream(self, value: int) -> Any:
        async for item in self.streamed(value):
            yield item


def batcher() -> Any:
    return Batcher.bind()


@deployment(user_config={"level": 1}, max_ongoing_requests=10)
class Tuned:
    def __init__(self) -> None:
        self._level = 0

    def reconfigure(self, config: dict[str, int]) -> None:
        self._level = config["level"]

    def level(self) -> int:
        return self._level


@deployment(max_ongoing_requests=2, autoscaling_config={"min_replicas": 1, "max_replicas": 1})
class Counted:
    async def hold(self, key: str) -> str:
        await note(f"{key} running")
        await passage(key)
        return "done"

    async def items(self, key: str) -> Any:
        yield 1
        await passage(key)
        yield 2

    def fail(self) -> None:
        raise ValueError("counted all the same")


def counted() -> Any:
    return Counted.bind()


@same_as_actor(expect=[[0, 4], [1, 4], [2, 4], [3, 4]])
def test_calls_are_batched(cluster: Cluster) -> Any:
    handle = cluster.app(batcher)
    return [response.result(timeout_s=30) for response in [handle.call.remote(value) for value in range(4)]]


@same_as_actor(expect=[["batch of 4"]] * 4)
def test_a_failing_batch_fails_each_of_its_calls(cluster: Cluster) -> Any:
    handle = cluster.app(batcher)
    responses = [handle.fail.remote(value) for value in range(4)]
    return [outcome(lambda r=r: r.result(timeout_s=30), contains=("batch of 4",))["shows"] for r in responses]


@same_as_actor(expect=[[0, 1, 2], [10, 11, 12], [20, 21, 22]])
def test_streams_are_batched(cluster: Cluster) -> Any:
    handle = cluster.app(batcher).options(stream=True)

    async def read(value: int) -> list[int]:
        return [item async for item in handle.stream.remote(value)]

    async def main() -> Any:
        return await asyncio.gather(*[read(value) for value in range(3)])

    return list(asyncio.run(main()))


@same_as_actor(expect=[1, 2])
def test_a_new_user_config_reaches_the_replica_without_a_restart(cluster: Cluster) -> Any:
    name = f"tuned-{cluster.key()}"
    handle = serve.run(Tuned.bind(), name=name, route_prefix=None)
    first = handle.level.remote().result(timeout_s=20)
    serve.run(Tuned.options(user_config={"level": 2}).bind(), name=name, route_prefix=None)
    second = handle.level.remote().result(timeout_s=20)
    serve.delete(name, _blocking=False)
    return [first, second]


def router_counts(handle: Any) -> tuple[int, int]:
    """(queued, running) requests that the handle's router reports to the autoscaler."""
    metrics = handle._router._asyncio_router._metrics_manager
    return metrics.num_queued_requests, sum(metrics.num_requests_sent_to_replicas.values())


def settled(cluster: Cluster, handle: Any) -> bool:
    return until(lambda: router_counts(handle) == (0, 0) and cluster.ongoing("Counted", counted) == 0)


@same_as_actor(expect=[(0, 1), True])
def test_the_autoscaler_counts_a_call_while_it_runs_and_not_after(cluster: Cluster) -> Any:
    handle = cluster.app(counted)
    key = cluster.key()
    response = handle.hold.remote(key)
    cluster.board.wait(f"{key} running")
    until(lambda: router_counts(handle) == (0, 1))
    during = router_counts(handle)
    cluster.board.open(key)
    response.result(timeout_s=20)
    return [during, settled(cluster, handle)]


@same_as_actor(expect=[True, True, True, True])
def test_counts_return_to_zero_after_errors_cancels_and_streams(cluster: Cluster) -> Any:
    handle = cluster.app(counted)
    outcome(lambda: handle.fail.remote().result(timeout_s=20))
    after_error = settled(cluster, handle)

    key = cluster.key()
    held = [handle.hold.remote(key) for _ in range(6)]
    cluster.board.wait(f"{key} running", 2)
    for response in held:
        response.cancel()
    after_cancel = settled(cluster, handle)

    stream = handle.options(stream=True).items.remote(cluster.key())
    next(stream)
    stream.cancel()
    after_stream_cancel = settled(cluster, handle)

    gate = cluster.key()
    whole = handle.options(stream=True).items.remote(gate)
    cluster.board.open(gate)
    return [after_error, after_cancel, after_stream_cancel, list(whole) == [1, 2] and settled(cluster, handle)]


@same_as_actor(expect=[True, 4])
def test_counts_return_to_zero_when_results_are_never_read(cluster: Cluster) -> Any:
    handle = cluster.app(counted)
    key = cluster.key()
    cluster.board.open(key)
    for _ in range(4):
        handle.hold.remote(key)
    ran = len(cluster.board.wait(f"{key} running", 4))
    return [settled(cluster, handle), ran]


@serve.deployment
class Local:
    def double(self, value: int) -> int:
        return value * 2

    def items(self, count: int) -> Any:
        yield from range(count)

    def fail(self) -> None:
        raise ValueError("local words")


@serve.deployment
class LocalOuter:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def quadruple(self, value: int) -> int:
        return int(await self._inner.double.remote(await self._inner.double.remote(value)))


@same_as_actor(expect=[8, [0, 1, 2], ["local words"]])
def test_local_testing_mode_works(cluster: Cluster) -> Any:
    outer = serve.run(LocalOuter.bind(Local.bind()), name="local", _local_testing_mode=True)
    inner = serve.run(Local.bind(), name="local-inner", _local_testing_mode=True)
    return [
        outer.quadruple.remote(2).result(timeout_s=20),
        list(inner.options(stream=True).items.remote(3)),
        outcome(lambda: inner.fail.remote().result(timeout_s=20), contains=("local words",))["shows"],
    ]
