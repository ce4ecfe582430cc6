"""The deployments: a caller that measures, and a middle and a leaf that answer.

The driver only tells the caller what to measure: every measured call goes from replica to replica.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from bench import payloads
from bench.clocks import Roles, Stopwatch
from bench.samples import Sample

_ONGOING = 10_000  # more than any cell has in flight: no cell measures rejections
_options = {"num_cpus": 0}

Call = Callable[[Any], Awaitable[Any]]


@serve.deployment(ray_actor_options=_options, max_ongoing_requests=_ONGOING)
class Leaf:
    async def echo(self, value: Any) -> Any:
        return value

    async def items(self, count: int) -> AsyncIterator[str]:
        """Produces without a pause."""
        for _ in range(count):
            yield "token "

    async def paced(self, count: int, per_second: float, offset: float) -> AsyncIterator[float]:
        """Each item is the time at which it was made; the clock is the machine's."""
        start = time.perf_counter() + offset
        for number in range(count):
            await asyncio.sleep(max(0.0, start + number / per_second - time.perf_counter()))
            yield time.perf_counter()

    async def pid(self) -> int:
        return os.getpid()


@serve.deployment(ray_actor_options=_options, max_ongoing_requests=_ONGOING)
class Middle:
    def __init__(self, leaf: DeploymentHandle) -> None:
        self._echo = leaf.echo

    async def echo(self, value: Any) -> Any:
        return await self._echo.remote(value)

    async def pid(self) -> int:
        return os.getpid()


@serve.deployment(ray_actor_options=_options, max_ongoing_requests=_ONGOING)
class Caller:
    def __init__(self, middle: DeploymentHandle, leaf: DeploymentHandle) -> None:
        self._calls = {"leaf": leaf.echo, "middle": middle.echo}
        streaming = leaf.options(stream=True)
        self._items, self._paced = streaming.items, streaming.paced
        self._pids = {"leaf": leaf.pid, "middle": middle.pid}
        self._roles: Roles = {}

    async def pids(self) -> dict[str, int]:
        """Process ids of the replicas, by role."""
        return {"caller": os.getpid()} | {role: await pid.remote() for role, pid in self._pids.items()}

    async def watch(self, roles: Roles) -> None:
        """Whose CPU time each sample tells."""
        self._roles = roles

    async def status(self) -> dict[str, Any]:
        """Of the plugin in this process."""
        import ray_serve_grpc

        return ray_serve_grpc.status()

    async def calls(self, target: str, kind: str, size: int, in_flight: int, seconds: float, least: int) -> Sample:
        """Echo calls, `in_flight` at a time, for so many seconds, and at least `least` by each of those."""
        call, value = self._calls[target].remote, payloads.make(kind, size)
        times: list[float] = []
        watch = Stopwatch(self._roles)
        until = time.perf_counter() + seconds
        await asyncio.gather(*(_call_on(call, value, until, least, times) for _ in range(in_flight)))
        wall, cpu = watch.read()
        return Sample(len(times), wall, cpu, times)

    async def streams(self, streams: int, count: int) -> Sample:
        """So many streams at a time, of `count` items each."""
        first: list[float] = []

        async def read() -> int:
            started, got = time.perf_counter(), 0
            async for _ in self._items.remote(count):
                if not got:
                    first.append((time.perf_counter() - started) * 1e3)
                got += 1
            return got

        watch = Stopwatch(self._roles)
        total = sum(await asyncio.gather(*(read() for _ in range(streams))))
        wall, cpu = watch.read()
        if total != streams * count:
            raise AssertionError(f"{total} items of {streams * count} arrived")
        return Sample(total, wall, cpu, first_ms=first)

    async def paced_streams(self, streams: int, count: int, per_second: float) -> Sample:
        """Streams whose items come at a pace; the sample's times are each item's lag."""
        lags: list[float] = []

        async def read(offset: float) -> None:
            stream = self._paced.remote(count, per_second, offset)
            lags.extend([(time.perf_counter() - made) * 1e3 async for made in stream])

        watch = Stopwatch(self._roles)
        await asyncio.gather(*(read(number / streams / per_second) for number in range(streams)))
        wall, cpu = watch.read()
        return Sample(len(lags), wall, cpu, lags)


async def _call_on(call: Call, value: Any, until: float, least: int, times: list[float]) -> None:
    clock, check, done = time.perf_counter, payloads.check, 0
    while True:
        started = clock()
        answer = await call(value)
        ended = clock()
        check(value, answer)
        del answer
        times.append((ended - started) * 1e3)
        done += 1
        if ended >= until and done >= least:
            return


app = Caller.bind(Middle.bind(leaf := Leaf.bind()), leaf)
