"""`max_ongoing_requests` and `max_queued_requests`: exact, and errors that keep their class."""

from __future__ import annotations

import concurrent.futures
from typing import Any

from harness import Cluster, deployment, outcome, same_as_actor
from harness.board import note, passage
from harness.cluster import until


@deployment(max_ongoing_requests=2, max_queued_requests=3)
class Limited:
    def __init__(self) -> None:
        self._present = 0
        self._peak = 0

    async def hold(self, key: str) -> str:
        self._present += 1
        self._peak = max(self._peak, self._present)
        await note(f"{key} running")
        try:
            await passage(key)
            return "done"
        finally:
            self._present -= 1

    async def quick(self) -> str:
        self._present += 1
        self._peak = max(self._peak, self._present)
        self._present -= 1
        return "done"

    async def peak(self) -> int:
        return self._peak


@deployment(max_ongoing_requests=100)
class Front:
    def __init__(self, limited: Any) -> None:
        self._limited = limited

    async def hold(self, key: str) -> str:
        return str(await self._limited.hold.remote(key))

    def queued(self) -> int:
        return queued(self._limited)

    async def __call__(self, request: Any) -> str:
        return await self.hold(request.query_params["key"])


@deployment(max_ongoing_requests=1)
class One:
    async def hold(self, key: str) -> str:
        await note(f"{key} running")
        await passage(key)
        return "done"

    async def items(self, key: str) -> Any:
        await note(f"{key} running")
        yield 1
        await passage(key)
        yield 2


def limits() -> Any:
    return Front.bind(Limited.bind())


def single() -> Any:
    return One.bind()


def queued(handle: Any) -> int:
    """Requests that wait in the router of `handle`, which must have sent one."""
    return int(handle._router._asyncio_router._metrics_manager.num_queued_requests)


@same_as_actor(expect={"done": 5, "shed": ["BackPressureError"] * 7, "peak": 2})
def test_two_run_three_queue_and_the_rest_are_shed(cluster: Cluster) -> Any:
    handle = cluster.handle("Limited", limits)
    key = cluster.key()
    accepted = []
    # The router counts a request as queued until it is placed, so the first two go one by one.
    for count in (1, 2):
        accepted.append(handle.hold.remote(key))
        cluster.board.wait(f"{key} running", count)
    accepted += [handle.hold.remote(key) for _ in range(3)]
    until(lambda: queued(handle) == 3)
    shed = [outcome(lambda: handle.hold.remote(key).result(timeout_s=20))["type"] for _ in range(7)]
    cluster.board.open(key)
    done = [response.result(timeout_s=20) for response in accepted]
    return {"done": done.count("done"), "shed": shed, "peak": handle.peak.remote().result(timeout_s=20)}


@same_as_actor(expect=[True, True, 1, ["done"] * 5])
def test_a_backpressure_error_keeps_its_class_through_a_second_hop(cluster: Cluster) -> Any:
    front = cluster.app(limits, route=True)
    key = cluster.key()
    accepted = []
    for count in (1, 2):
        accepted.append(front.hold.remote(key))
        cluster.board.wait(f"{key} running", count)
    accepted += [front.hold.remote(key) for _ in range(3)]
    full = until(lambda: front.queued.remote().result(timeout_s=20) == 3)
    shed = outcome(lambda: front.hold.remote(key).result(timeout_s=20), contains=("max_queued",))
    cluster.board.open(key)
    values = [response.result(timeout_s=20) for response in accepted]
    return [full, "BackPressureError" in shed["caught by"], len(shed["shows"]), values]


@same_as_actor(expect=2)
def test_two_routers_at_once_never_exceed_the_limit(cluster: Cluster) -> Any:
    direct, front = cluster.handle("Limited", limits), cluster.app(limits, route=True)

    def call(handle: Any, number: int) -> None:
        key = cluster.key()
        cluster.board.open(key)
        for _ in range(8):
            outcome(lambda: handle.hold.remote(key).result(timeout_s=30))

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        list(threads.map(call, [direct, front] * 4, range(8)))
    return direct.peak.remote().result(timeout_s=20)


@same_as_actor(expect=["done", "done", "done"])
def test_a_queued_request_starts_as_soon_as_a_slot_is_free(cluster: Cluster) -> Any:
    handle = cluster.app(single)
    keys = [cluster.key() for _ in range(3)]
    first = handle.hold.remote(keys[0])
    cluster.board.wait(f"{keys[0]} running")
    rest = [handle.hold.remote(key) for key in keys[1:]]
    for key in keys:
        cluster.board.open(key)
    return [response.result(timeout_s=20) for response in [first, *rest]]


@same_as_actor(expect=[1, 0, [2], "done"])
def test_a_stream_holds_its_slot_until_it_ends(cluster: Cluster) -> Any:
    handle = cluster.app(single)
    stream_key, key = cluster.key(), cluster.key()
    stream = handle.options(stream=True).items.remote(stream_key)
    first = next(stream)
    cluster.board.open(key)
    waiting = handle.hold.remote(key)
    outcome(lambda: waiting.result(timeout_s=0.3))
    started_early = cluster.board.count(f"{key} running")
    cluster.board.open(stream_key)
    return [first, started_early, list(stream), waiting.result(timeout_s=20)]


@same_as_actor(expect=True, timeout=90)
def test_full_replicas_turn_requests_away_and_none_is_lost(cluster: Cluster) -> Any:
    """Two routers and one slot: rejections by the replica are part of it, and each request runs once."""
    handle, other = cluster.app(single), cluster.handle("One", single)
    key = cluster.key()
    cluster.board.open(key)
    responses = [(handle, other)[number % 2].hold.remote(key) for number in range(40)]
    done = [response.result(timeout_s=60) for response in responses]
    return done == ["done"] * 40 and cluster.board.count(f"{key} running") == 40
