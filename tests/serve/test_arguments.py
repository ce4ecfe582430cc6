"""Responses and object references as arguments, alone, nested and chained."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from harness import Cluster, deployment, outcome, outcome_async, same_as_actor
from harness.board import note, passage


class StageError(Exception):
    pass


@deployment
class Stage:
    async def double(self, value: Any, gate: str | None = None) -> Any:
        if gate is not None:
            await passage(gate)
        return value * 2

    def kind(self, value: Any) -> str:
        return type(value).__name__

    def kinds(self, *positional: Any, **named: Any) -> Any:
        return [type(value).__name__ for value in positional], {k: type(v).__name__ for k, v in named.items()}

    def fetch(self, holder: Any) -> Any:
        return ray.get(holder["reference"])

    def fail(self, event: str | None = None) -> None:
        raise StageError("the first stage failed")

    async def counted(self, event: str) -> str:
        await note(event)
        return "once"


@deployment
class Composer:
    def __init__(self, *stages: Any) -> None:
        self._stages = stages

    async def chain(self, last_first: bool) -> Any:
        first, second, third = self._stages
        a = first.double.remote(5)
        b = second.double.remote(a)
        c = third.double.remote(b)
        if last_first:
            return [await c, await b, await a]
        return [await a, await b, await c]

    async def fan_out(self, gate: str, width: int) -> Any:
        first, second, _ = self._stages
        source = first.double.remote(1, gate)
        uses = [second.double.remote(source) for _ in range(width)]
        from harness.board import board

        await board().open.remote(gate)
        return [[await use for use in uses], await source]

    async def as_keyword(self) -> Any:
        first, second, _ = self._stages
        return await second.kinds.remote(first.double.remote(2), named=first.double.remote("x"))

    async def failed_source(self) -> Any:
        first, second, _ = self._stages
        return await outcome_async(
            second.double.remote(first.fail.remote()), contains=("the first stage failed", "StageError")
        )

    async def source_of_two(self, event: str) -> Any:
        first, second, third = self._stages
        source = first.counted.remote(event)
        return await asyncio.gather(second.kind.remote(source), third.kind.remote(source), source)

    async def nested(self) -> Any:
        first, second, _ = self._stages
        return await outcome_async(
            second.kind.remote([first.double.remote(1)]), contains=("`DeploymentResponse` is not serializable",)
        )

    async def put_then_pass(self) -> Any:
        first, second, _ = self._stages
        reference = ray.put(b"r" * 200_000)
        return [await first.kind.remote(reference), len(await second.fetch.remote({"reference": reference}))]


def stages() -> Any:
    stage = Stage.bind()
    return Composer.bind(stage, stage, stage)


@same_as_actor(expect=[[10, 20, 40], [40, 20, 10]])
def test_responses_pass_from_stage_to_stage_unawaited(cluster: Cluster) -> Any:
    composer = cluster.app(stages)
    return [composer.chain.remote(order).result(timeout_s=20) for order in (False, True)]


@same_as_actor(expect=[[4] * 10, 2])
def test_one_response_feeds_ten_calls(cluster: Cluster) -> Any:
    return cluster.app(stages).fan_out.remote(cluster.key(), 10).result(timeout_s=20)


@same_as_actor(expect=(["int"], {"named": "str"}))
def test_a_response_is_resolved_as_positional_and_as_keyword_argument(cluster: Cluster) -> Any:
    return cluster.app(stages).as_keyword.remote().result(timeout_s=20)


@same_as_actor(stock=False)  # Ray's own gRPC path drops the RayTaskError part of the class
def test_a_failed_source_fails_the_calls_it_feeds(cluster: Cluster) -> Any:
    return cluster.app(stages).failed_source.remote().result(timeout_s=20)


@same_as_actor(expect=[["str", "str", "once"], 1])
def test_a_source_runs_once_however_many_calls_it_feeds(cluster: Cluster) -> Any:
    key = cluster.key()
    values = cluster.app(stages).source_of_two.remote(key).result(timeout_s=20)
    return [list(values), cluster.board.count(key)]


@same_as_actor()
def test_a_response_inside_a_container_is_refused_with_the_way_out(cluster: Cluster) -> Any:
    described = cluster.app(stages).nested.remote().result(timeout_s=20)
    return ["RayServeException" in described["caught by"], described["shows"]]


@same_as_actor(expect=[12, "int", "int"])
def test_the_driver_passes_responses_on(cluster: Cluster) -> Any:
    stage = cluster.handle("Stage", stages)
    other = cluster.handle("Stage", stages)
    responses = [
        other.double.remote(stage.double.remote(3)),
        other.kind.remote(stage.double.remote(3)),
        other.kind.remote(value=stage.double.remote(3)),
    ]
    return [response.result(timeout_s=20) for response in responses]


@same_as_actor(expect=["int", 42, "bytes", "ndarray"])
def test_an_object_reference_is_resolved_to_its_value(cluster: Cluster) -> Any:
    import numpy

    stage = cluster.handle("Stage", stages)
    responses = [
        stage.kind.remote(ray.put(21)),
        stage.double.remote(ray.put(21)),
        stage.kind.remote(value=ray.put(b"b" * 300_000)),
        stage.kind.remote(ray.put(numpy.zeros(100_000))),
    ]
    return [response.result(timeout_s=20) for response in responses]


@same_as_actor(expect=["dict", 300_000])
def test_a_nested_object_reference_stays_a_usable_reference(cluster: Cluster) -> Any:
    stage = cluster.handle("Stage", stages)
    holder = {"reference": ray.put(b"n" * 300_000)}
    return [stage.kind.remote(holder).result(timeout_s=20), len(stage.fetch.remote(holder).result(timeout_s=20))]


@same_as_actor(expect=["bytes", 200_000])
def test_a_replica_passes_references_of_its_own(cluster: Cluster) -> Any:
    return cluster.app(stages).put_then_pass.remote().result(timeout_s=20)


@same_as_actor(expect=["the first stage failed"])
def test_a_reference_to_a_failed_task_fails_the_call(cluster: Cluster) -> Any:
    @ray.remote(num_cpus=0)
    def broken() -> None:
        raise RuntimeError("the first stage failed")

    stage = cluster.handle("Stage", stages)
    described = outcome(
        lambda: stage.kind.remote(broken.remote()).result(timeout_s=20), contains=("the first stage failed",)
    )
    return described["shows"]


@same_as_actor(expect=[6, 6])
def test_a_task_result_can_be_an_argument_before_it_is_ready(cluster: Cluster) -> Any:
    gate = cluster.key()

    @ray.remote(num_cpus=0)
    def slow() -> int:
        from harness.board import passage_sync

        passage_sync(gate)
        return 3

    stage = cluster.handle("Stage", stages)
    reference = slow.remote()
    responses = [stage.double.remote(reference), stage.double.remote(reference)]
    cluster.board.open(gate)
    return [response.result(timeout_s=30) for response in responses]


@same_as_actor(expect=[[1, 2], [1, 2]])
def test_arguments_are_copies(cluster: Cluster) -> Any:
    """By-value calls must not let callee and caller share what they were passed."""

    def mutations() -> Any:
        return [1, 2]

    stage = cluster.handle("Stage", stages)
    mine = mutations()
    returned = stage.double.remote(mine).result(timeout_s=20)
    returned.append(3)
    return [mine, stage.double.remote(mine).result(timeout_s=20)[:2]]
