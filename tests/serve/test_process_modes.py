"""The ways Serve can lay out its threads and loops in a process, and environments that must not matter."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

import numpy
import pytest
from fastapi import Request
from harness import Cluster, deployment, outcome_async, same_as_actor
from harness.board import board, note
from harness.cluster import app_name, until

import ray_serve_grpc

ARRAY = numpy.arange(3_000_000, dtype=numpy.uint8)
NOWHERE = "http://127.0.0.1:9"
MODES: dict[str, dict[str, str]] = {
    "throughput optimized": {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"},
    "router on the caller's loop": {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"},
    "plain asyncio behind a dead http proxy": {
        "RAY_USE_UVLOOP": "0",
        **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "grpc_proxy"), NOWHERE),
    },
}


def variables(mode: str, **_parameters: Any) -> dict[str, str]:
    return MODES[mode]


in_every_mode = pytest.mark.parametrize("mode", MODES)


@deployment(max_ongoing_requests=20)
class Inner:
    async def double(self, value: Any) -> Any:
        return value * 2

    def double_sync(self, value: Any) -> Any:
        return value * 2

    async def items(self, count: int) -> Any:
        for number in range(count):
            yield number

    def items_sync(self, count: int) -> Any:
        yield from range(count)

    async def hold(self, key: str) -> None:
        try:
            await note(f"{key} running")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await note(f"{key} cancelled")
            raise

    async def same(self, value: Any) -> Any:
        return value

    def same_sync(self, value: Any) -> Any:
        return value

    async def lent(self) -> Any:
        return shared_memory()

    def fail(self) -> None:
        raise ValueError("words of the inner one")

    def loop(self) -> str:
        return type(asyncio.get_event_loop_policy()).__module__.split(".")[0]


@deployment(max_ongoing_requests=20)
class Outer:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def __call__(self, request: Request) -> Any:
        return await self.chain(int(request.query_params["value"]))

    async def chain(self, value: Any) -> Any:
        first = self._inner.double.remote(value)
        return [await self._inner.double_sync.remote(first), await first]

    async def stream(self, count: int) -> Any:
        for method in ("items", "items_sync"):
            async for item in getattr(self._inner.options(stream=True), method).remote(count):
                yield item

    async def pass_on(self, value: Any) -> Any:
        return await self._inner.same_sync.remote(await self._inner.same.remote(value))

    async def lent(self) -> Any:
        """Here and there, what was copied into shared memory and what was passed on, in bytes."""
        return shared_memory(), await self._inner.lent.remote()

    async def hold(self, key: str) -> None:
        await self._inner.hold.remote(key)

    async def cancel_child(self, key: str) -> Any:
        response = self._inner.hold.remote(key)
        task = asyncio.ensure_future(_await(response))
        await board().wait.remote(f"{key} running", 1)
        response.cancel()
        return (await outcome_async(task))["type"]

    async def gather(self, count: int) -> Any:
        return list(await asyncio.gather(*[_await(self._inner.double.remote(n)) for n in range(count)]))

    async def error(self) -> Any:
        return await outcome_async(self._inner.fail.remote(), contains=("words of the inner one",))


async def _await(response: Any) -> Any:
    return await response


def shared_memory() -> tuple[int, int]:
    counted = ray_serve_grpc.status()["shared_memory"]
    return counted["bytes_sent"], counted["bytes_forwarded"]


def layers() -> Any:
    return Outer.bind(Inner.bind())


@cache
def runner() -> asyncio.Runner:
    """One loop for all tests: without a router thread, a handle belongs to the loop of its first call."""
    return asyncio.Runner()


def driver(cluster: Cluster, call: Callable[[Any], Awaitable[Any]], *, run: Callable[..., Any] | None = None) -> Any:
    outer = cluster.app(layers, route=True)

    async def main() -> Any:
        return await asyncio.wait_for(_await(call(outer)), 30)

    return (run or runner().run)(main())


@in_every_mode
@same_as_actor(native_only=True, extra=variables, expect=[[20, 10], list(range(0, 60, 2))])
def test_calls_chain_and_gather(cluster: Cluster, mode: str) -> Any:
    async def call(outer: Any) -> Any:
        return [await outer.chain.remote(5), await outer.gather.remote(30)]

    return driver(cluster, call)


@in_every_mode
@same_as_actor(native_only=True, extra=variables, expect=[*range(40), *range(40)])
def test_streams_come_through_two_hops(cluster: Cluster, mode: str) -> Any:
    async def call(outer: Any) -> Any:
        return [item async for item in outer.options(stream=True).stream.remote(40)]

    return driver(cluster, call)


@in_every_mode
@same_as_actor(native_only=True, extra=variables, expect=["RayTaskError(ValueError)", ["words of the inner one"]])
def test_errors_keep_their_class(cluster: Cluster, mode: str) -> Any:
    async def call(outer: Any) -> Any:
        return await outer.error.remote()

    described = driver(cluster, call)
    return [described["type"], described["shows"]]


@in_every_mode
@same_as_actor(native_only=True, extra=variables, expect=["RequestCancelledError", 1, "RequestCancelledError", 1])
def test_cancels_reach_the_inner_replica(cluster: Cluster, mode: str) -> Any:
    keys = cluster.key(), cluster.key()

    async def call(outer: Any) -> Any:
        seen = [await outer.cancel_child.remote(keys[0])]
        seen.append(len(await board().wait.remote(f"{keys[0]} cancelled", 1)))
        response = outer.hold.remote(keys[1])
        task = asyncio.ensure_future(_await(response))
        await board().wait.remote(f"{keys[1]} running", 1)
        response.cancel()
        seen.append((await outcome_async(task))["type"])
        seen.append(len(await board().wait.remote(f"{keys[1]} cancelled", 1)))
        return seen

    return driver(cluster, call)


@in_every_mode
@same_as_actor(native_only=True, extra=variables, expect=[True, [0, 3 * ARRAY.nbytes], [0, 2 * ARRAY.nbytes]])
def test_what_was_received_is_sent_on_and_sent_back_without_a_copy(cluster: Cluster, mode: str) -> Any:
    async def call(outer: Any) -> Any:
        before = await outer.lent.remote()
        came_back = await outer.pass_on.remote(ARRAY)
        after = await outer.lent.remote()
        return [
            numpy.array_equal(came_back, ARRAY),
            *([now - then for now, then in zip(*counts, strict=True)] for counts in zip(after, before, strict=True)),
        ]

    return driver(cluster, call)


@in_every_mode
@same_as_actor(native_only=True, extra=variables, expect=True)
def test_big_payloads_come_through(cluster: Cluster, mode: str) -> Any:
    data = bytes(range(256)) * 32_768

    async def call(outer: Any) -> Any:
        quadrupled, doubled = await outer.chain.remote(data)
        return quadrupled == data * 4 and doubled == data * 2

    return driver(cluster, call)


@in_every_mode
@same_as_actor(native_only=True, extra=variables, expect=[12, 6])
def test_http_requests_come_through(cluster: Cluster, mode: str) -> Any:
    cluster.app(layers, route=True)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{cluster.http}/{app_name(layers)}?value=3", timeout=30) as answer:
        return json.load(answer)


@in_every_mode
@same_as_actor(native_only=True, extra=variables, expect=True)
def test_no_request_is_left_over(cluster: Cluster, mode: str) -> Any:
    return until(lambda: cluster.ongoing("Outer", layers) == 0 and cluster.ongoing("Inner", layers) == 0)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@same_as_actor(native_only=True, expect=[[20, 10], list(range(6)) * 2])
def test_the_driver_can_be_on_either_loop(cluster: Cluster, loop: str) -> Any:
    import uvloop

    async def call(outer: Any) -> Any:
        items = [item async for item in outer.options(stream=True).stream.remote(6)]
        return [await outer.chain.remote(5), items]

    return driver(cluster, call, run=uvloop.run if loop == "uvloop" else asyncio.run)
