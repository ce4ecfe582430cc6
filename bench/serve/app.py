"""The deployments: a caller that measures, and a middle and a leaf that answer.

The driver only tells the caller what to measure: every measured call goes from replica to replica.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from bench import load, payloads
from bench.clocks import Roles, Stopwatch
from bench.samples import Sample

_ONGOING = 10_000  # more than any cell has in flight: no cell measures rejections
_options: dict[str, Any] = {"num_cpus": 0}
# Serve's decorator hides from a type checker that a class becomes a deployment.
_deployment: Any = serve.deployment(ray_actor_options=_options, max_ongoing_requests=_ONGOING)


@_deployment
class Leaf:
    async def echo(self, value: Any) -> Any:
        return value

    async def own(self, value: Any) -> Any:
        """As large an answer, but not the memory that came in."""
        return payloads.made("bytes" if isinstance(value, bytes) else "numpy", payloads.length(value))

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


@_deployment
class Middle:
    def __init__(self, leaf: DeploymentHandle[Any]) -> None:
        self._echo = leaf.echo

    async def echo(self, value: Any) -> Any:
        return await self._echo.remote(value)

    async def pid(self) -> int:
        return os.getpid()


@_deployment
class Caller:
    def __init__(self, middle: DeploymentHandle[Any], leaf: DeploymentHandle[Any]) -> None:
        self._calls = {"leaf": leaf.echo, "own": leaf.own, "middle": middle.echo}
        streaming: Any = leaf.options(stream=True)
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
        """Of the plugin in this process, and whether calls from here pass their arguments by Ray's references."""
        import ray_serve_grpc

        options: Any = self._calls["leaf"].handle_options
        return ray_serve_grpc.status() | {"by_reference": options._by_reference}

    async def calls(self, target: str, kind: str, size: int, in_flight: int, seconds: float, least: int) -> Sample:
        value = payloads.make(kind, size)
        return await load.echo_calls(self._calls[target].remote, value, in_flight, seconds, least, self._roles)

    async def mixed(self, kind: str, size: int, seconds: float) -> Sample:
        """Small calls, one at a time, while large ones go to the same replica, one at a time too."""
        bulk = asyncio.create_task(self._bulk(payloads.make(kind, size)))
        try:
            small = payloads.make(kind, payloads.UNITS["KB"])
            return await load.echo_calls(self._calls["leaf"].remote, small, 1, seconds, 1, self._roles)
        finally:
            bulk.cancel()
            await asyncio.gather(bulk, return_exceptions=True)

    async def _bulk(self, value: Any) -> None:
        while True:
            await self._calls["leaf"].remote(value)

    async def streams(self, streams: int, count: int) -> Sample:
        return await load.item_streams(lambda: self._items.remote(count), streams, count, self._roles)

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


def application(caller: str = "", others: str = "") -> Application:
    """The caller goes to a node that has the resource `caller`, all else to one that has `others`."""

    def placed(deployment: Any, resource: str) -> Any:
        resources = {"resources": {resource: 0.01}} if resource else {}
        return deployment.options(ray_actor_options=_options | resources)

    leaf = placed(Leaf, others).bind()
    bound: Application = placed(Caller, caller).bind(placed(Middle, others).bind(leaf), leaf)
    return bound
