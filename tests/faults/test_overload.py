"""Two thousand callers against five slots and a queue of fifty: exact shedding, at once, through two hops."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from harness import Cluster, deployment, outcome_async, same_as_actor
from harness.board import note, passage
from harness.cluster import resident_mib, until
from load import PATIENCE

CALLERS = 2000
SLOTS = 5
QUEUE = 50

#: Ray's router looks for a free slot again after up to half a second, whatever carries the calls. Here it does so more
#: often, or its waiting would be all that there is to measure.
OFTEN = {"RAY_SERVE_ROUTER_RETRY_MAX_BACKOFF_S": "0.025"}

#: Seconds: for a call after the load, and for the queue of fifty before it. At rest 0.01 and 0.5, on two cores.
RECOVERED_S, DRAINED_S = 1.0, 3.0


@deployment(max_ongoing_requests=SLOTS, max_queued_requests=QUEUE)
class Limited:
    async def hold(self, key: str) -> str:
        await note(f"{key} running")
        await passage(key)
        return "done"

    async def quick(self) -> str:
        return "done"


@deployment(max_ongoing_requests=2 * CALLERS)
class Front:
    def __init__(self, limited: Any) -> None:
        self._limited = limited

    async def hold(self, key: str) -> str:
        return str(await self._limited.hold.remote(key))

    async def quick(self) -> str:
        return str(await self._limited.quick.remote())

    async def queued(self) -> int:
        return int(self._limited._router._asyncio_router._metrics_manager.num_queued_requests)


def limited() -> Any:
    return Front.bind(Limited.bind())


@same_as_actor(
    native_only=True, expect=[SLOTS + QUEUE, CALLERS - SLOTS - QUEUE, True, True, True], timeout=240, extra=OFTEN
)
def test_what_is_over_the_limits_is_shed_exactly_and_the_rest_is_answered(cluster: Cluster) -> Any:
    handle = cluster.app(limited)
    key = cluster.key()
    handle.quick.remote().result(timeout_s=60)
    before = resident_mib()

    async def fill() -> tuple[list[Any], float, float]:
        async def call() -> Any:
            return await outcome_async(asyncio.wait_for(_result(handle.hold.remote(key)), PATIENCE))

        admitted = [asyncio.ensure_future(call()) for _ in range(SLOTS)]
        await asyncio.to_thread(cluster.board.wait, f"{key} running", SLOTS)
        admitted += [asyncio.ensure_future(call()) for _ in range(QUEUE)]
        queued = lambda: handle.queued.remote().result(timeout_s=20) == QUEUE  # noqa: E731
        assert await asyncio.to_thread(until, queued, timeout=30)
        shed = await asyncio.gather(*(call() for _ in range(CALLERS - SLOTS - QUEUE)))
        assert not any(task.done() for task in admitted)
        began = time.monotonic()
        await asyncio.to_thread(cluster.board.open, key)
        answers = await asyncio.gather(*admitted)
        drained = time.monotonic()
        assert await _result(handle.quick.remote()) == "done"
        return [*answers, *shed], drained - began, time.monotonic() - drained

    ends, drained, recovered = asyncio.run(fill())
    kinds = Counter(end if isinstance(end, str) else ",".join(end["caught by"]) for end in ends)
    refused = sum(count for kind, count in kinds.items() if "BackPressureError" in kind)
    return [kinds["done"], refused, drained < DRAINED_S, recovered < RECOVERED_S, resident_mib() - before < 200]


async def _result(response: Any) -> Any:
    return await response
