"""Cancelling: how far it reaches, what it frees, and that it is silent."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from harness import Cluster, deployment, outcome, same_as_actor
from harness.board import board, note, passage
from harness.cluster import until


@deployment(max_ongoing_requests=3)
class Leaf:
    async def hold(self, key: str) -> None:
        try:
            await note(f"{key} leaf started")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await note(f"{key} leaf cancelled")
            raise

    async def items(self, key: str) -> Any:
        try:
            await note(f"{key} items started")
            number = 0
            while True:
                yield number
                number += 1
                await asyncio.sleep(0.01)
        finally:
            await note(f"{key} items closed")

    async def finish(self, key: str) -> str:
        await note(f"{key} finish started")
        await passage(key)
        await note(f"{key} finished")
        return "finished"

    async def ping(self) -> str:
        return "pong"


@deployment(max_ongoing_requests=100)
class Middle:
    def __init__(self, leaf: Any) -> None:
        self._leaf = leaf

    async def awaits(self, key: str) -> None:
        await self._leaf.hold.remote(key)

    async def does_not_await(self, key: str) -> None:
        self._response = self._leaf.hold.remote(key)
        await asyncio.Event().wait()

    async def background(self, key: str) -> None:
        task = asyncio.ensure_future(self._in_task(key))
        await asyncio.Event().wait()
        await task

    async def _in_task(self, key: str) -> None:
        await self._leaf.hold.remote(key)

    async def relays(self, key: str) -> Any:
        async for item in self._leaf.options(stream=True).items.remote(key):
            yield item

    async def breaks(self, key: str) -> int:
        async for item in self._leaf.options(stream=True).items.remote(key):
            if item == 2:
                break
        gc.collect()
        return item

    async def cancels_its_child(self, key: str) -> Any:
        response = self._leaf.hold.remote(key)
        await board().wait.remote(f"{key} leaf started", 1)
        response.cancel()
        try:
            await response
        except BaseException as error:
            return [type(error).__name__, await self._leaf.ping.remote()]

    async def times_out_its_child(self, key: str) -> Any:
        response = self._leaf.finish.remote(key)
        try:
            await asyncio.wait_for(_await(response), 0.3)
        except TimeoutError:
            await board().open.remote(key)
            return ["timed out", await response]

    async def forgets(self, key: str) -> None:
        self._leaf.finish.remote(key)
        gc.collect()

    async def ping(self) -> str:
        return str(await self._leaf.ping.remote())


async def _await(response: Any) -> Any:
    return await response


def chain() -> Any:
    return Middle.bind(Leaf.bind())


def slots_are_free(cluster: Cluster) -> bool:
    """Whether no request is left on any replica and the leaf takes its three again."""
    idle = until(lambda: cluster.ongoing("Leaf", chain) == 0 and cluster.ongoing("Middle", chain) == 0)
    leaf = cluster.handle("Leaf", chain)
    return idle and [r.result(timeout_s=20) for r in [leaf.ping.remote() for _ in range(6)]] == ["pong"] * 6


# Ray's own gRPC loses a cancel now and then, and keeps its slot for ever after.
@same_as_actor(stock=False, expect=["RequestCancelledError", True, True])
def test_a_cancelled_call_raises_requestcancellederror(cluster: Cluster) -> Any:
    key = cluster.key()
    response = cluster.app(chain).awaits.remote(key)
    cluster.board.wait(f"{key} leaf started")
    response.cancel()
    described = outcome(lambda: response.result(timeout_s=20))
    return [described["type"], response.cancelled(), slots_are_free(cluster)]


@pytest.mark.parametrize("method", ["awaits", "does_not_await", "background"])
@same_as_actor(stock=False, expect=[1, True])
def test_a_cancel_reaches_the_grandchild(cluster: Cluster, method: str) -> Any:
    key = cluster.key()
    response = getattr(cluster.app(chain), method).remote(key)
    cluster.board.wait(f"{key} leaf started")
    response.cancel()
    return [len(cluster.board.wait(f"{key} leaf cancelled")), slots_are_free(cluster)]


@same_as_actor(stock=False, expect=[[0, 1, 2], 1, "RequestCancelledError", True])
def test_cancelling_a_stream_closes_the_generators_behind_it(cluster: Cluster) -> Any:
    key = cluster.key()
    stream = cluster.app(chain).options(stream=True).relays.remote(key)
    first = [next(stream) for _ in range(3)]
    stream.cancel()
    closed = len(cluster.board.wait(f"{key} items closed"))

    def drain() -> None:
        for _ in stream:
            pass

    return [first, closed, outcome(drain)["type"], slots_are_free(cluster)]


@same_as_actor(native_only=True, expect=[0, 1, True])
def test_dropping_a_stream_stops_its_generator(cluster: Cluster) -> Any:
    key = cluster.key()
    stream = cluster.handle("Leaf", chain).options(stream=True).items.remote(key)
    first = next(stream)
    del stream
    gc.collect()
    return [first, len(cluster.board.wait(f"{key} items closed")), slots_are_free(cluster)]


@same_as_actor(native_only=True, expect=[2, 1, True])
def test_breaking_out_of_a_stream_in_a_replica_stops_its_generator(cluster: Cluster) -> Any:
    key = cluster.key()
    last = cluster.app(chain).breaks.remote(key).result(timeout_s=20)
    return [last, len(cluster.board.wait(f"{key} items closed")), slots_are_free(cluster)]


@same_as_actor(stock=False, expect=[1, True])
def test_a_call_whose_response_nobody_keeps_still_runs_to_its_end(cluster: Cluster) -> Any:
    key = cluster.key()
    cluster.handle("Leaf", chain).finish.remote(key)
    gc.collect()
    cluster.board.wait(f"{key} finish started")
    gc.collect()
    cluster.board.open(key)
    return [len(cluster.board.wait(f"{key} finished")), slots_are_free(cluster)]


@same_as_actor(stock=False, expect=[1, True])
def test_a_replicas_call_whose_response_nobody_keeps_outlives_its_parent(cluster: Cluster) -> Any:
    key = cluster.key()
    cluster.app(chain).forgets.remote(key).result(timeout_s=20)
    cluster.board.wait(f"{key} finish started")
    cluster.board.open(key)
    return [len(cluster.board.wait(f"{key} finished")), slots_are_free(cluster)]


@same_as_actor(stock=False, expect=[["RequestCancelledError", "pong"], 1, True])
def test_a_replica_can_cancel_its_own_child(cluster: Cluster) -> Any:
    key = cluster.key()
    answer = cluster.app(chain).cancels_its_child.remote(key).result(timeout_s=20)
    return [answer, len(cluster.board.wait(f"{key} leaf cancelled")), slots_are_free(cluster)]


@same_as_actor(expect=[["timed out", "finished"], True], stock=False)  # there the await takes the call with it
def test_an_await_that_times_out_leaves_its_call_running(cluster: Cluster) -> Any:
    answer = cluster.app(chain).times_out_its_child.remote(cluster.key()).result(timeout_s=20)
    return [answer, slots_are_free(cluster)]


@same_as_actor(stock=False, expect=[True, True, True])
def test_twenty_cancelled_calls_running_or_queued_free_every_slot(cluster: Cluster) -> Any:
    key = cluster.key()
    leaf = cluster.handle("Leaf", chain)
    responses = [leaf.hold.remote(key) for _ in range(20)]
    cluster.board.wait(f"{key} leaf started", 3)
    for response in responses:
        response.cancel()
    kinds = {outcome(lambda r=response: r.result(timeout_s=20))["type"] for response in responses}
    free = slots_are_free(cluster)
    started, cancelled = cluster.board.count(f"{key} leaf started"), cluster.board.count(f"{key} leaf cancelled")
    return [kinds == {"RequestCancelledError"}, free, started == cancelled]


@same_as_actor(stock=False, expect=["done", "done", "pong"])
def test_cancelling_what_has_finished_changes_nothing(cluster: Cluster) -> Any:
    leaf = cluster.handle("Leaf", chain)
    response = leaf.ping.remote()
    value = response.result(timeout_s=20)
    response.cancel()
    again = leaf.ping.remote()
    again.result(timeout_s=20)
    again.cancel()
    again.cancel()
    return ["done" if value == "pong" else value, "done", leaf.ping.remote().result(timeout_s=20)]


@same_as_actor(stock=False, expect=["RequestCancelledError", True])
def test_a_call_cancelled_at_once_never_hangs_its_caller(cluster: Cluster) -> Any:
    leaf = cluster.handle("Leaf", chain)
    responses = [leaf.hold.remote(cluster.key()) for _ in range(10)]
    for response in responses:
        response.cancel()
    kinds = {outcome(lambda r=response: r.result(timeout_s=20))["type"] for response in responses}
    return [kinds.pop() if len(kinds) == 1 else kinds, slots_are_free(cluster)]


@same_as_actor(native_only=True, expect=[])
def test_cancelling_logs_no_errors(cluster: Cluster) -> Any:
    needles = ("never retrieved", "Traceback", "Exception in callback", "was never awaited", "ERROR")
    with cluster.log_lines(*needles) as lines:
        for method in ("awaits", "does_not_await"):
            key = cluster.key()
            response = getattr(cluster.app(chain), method).remote(key)
            cluster.board.wait(f"{key} leaf started")
            response.cancel()
            cluster.board.wait(f"{key} leaf cancelled")
        key = cluster.key()
        stream = cluster.app(chain).options(stream=True).relays.remote(key)
        next(stream)
        stream.cancel()
        cluster.board.wait(f"{key} items closed")
        slots_are_free(cluster)
    return lines
