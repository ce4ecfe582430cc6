"""Processes with and without the plugin in one cluster: each kind of caller calls each kind of replica."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import pytest
from harness import Cluster, deployment, describe, outcome_async, same_as_actor
from harness.board import board, note
from harness.pool import Pool
from harness.transports import NATIVE, STOCK
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

#: Tells the harness that calls over Ray's own protocol are meant.
HAS_STOCK_REPLICAS = True

OFF = {"num_cpus": 0, "runtime_env": {"env_vars": {"RAY_SERVE_GRPC_NATIVE": "0"}}}
ON = {"num_cpus": 0, "runtime_env": {"env_vars": {"RAY_SERVE_GRPC_NATIVE": "1"}}}
MIB = 1 << 20


def plugin_is_active() -> bool:
    import sys

    plugin = sys.modules.get("ray_serve_grpc")
    return bool(plugin is not None and plugin.status()["active"])


@deployment(max_ongoing_requests=5)
class Callee:
    def active(self) -> bool:
        return plugin_is_active()

    async def echo(self, *positional: Any, **named: Any) -> Any:
        return [list(positional), named]

    async def items(self, count: int) -> Any:
        for number in range(count):
            yield number

    def fail(self, text: str) -> None:
        raise ValueError(text)

    async def fail_in_stream(self, text: str) -> Any:
        yield 1
        raise ValueError(text)

    async def hold(self, key: str) -> None:
        try:
            await note(f"{key} running")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await note(f"{key} cancelled")
            raise

    async def size(self, data: bytes) -> int:
        return len(data)


@deployment(max_ongoing_requests=50)
class Caller:
    def __init__(self, callee: Any) -> None:
        self._callee = callee

    async def active(self) -> Any:
        return [plugin_is_active(), await self._callee.active.remote()]

    async def calls(self) -> Any:
        return [
            await self._callee.echo.remote(1, "two", three=[3]),
            [item async for item in self._callee.options(stream=True).items.remote(30)],
            await self._callee.size.remote(b"x" * 3_000_000),
            await asyncio.gather(*[_await(self._callee.size.remote(b"y" * n)) for n in range(20)]),
        ]

    async def serialized(self, method: str) -> Any:
        handle = self._callee.options(request_serialization=method, response_serialization=method)
        return await handle.echo.remote([1, "a"], named={"b": 2.5})

    async def errors(self) -> Any:
        unary = await outcome_async(self._callee.fail.remote("first words"), contains=("first words",))
        items: list[Any] = []
        streamed: Any = None
        try:
            async for item in self._callee.options(stream=True).fail_in_stream.remote("second words"):
                items += [item]
        except Exception as error:
            streamed = describe(error, contains=("second words",))
        return [
            "ValueError" in unary["caught by"] and len(unary["shows"]),
            items,
            "ValueError" in streamed["caught by"] and len(streamed["shows"]),
        ]

    async def cancels(self, key: str) -> Any:
        response = self._callee.hold.remote(key)
        task = asyncio.ensure_future(_await(response))
        await board().wait.remote(f"{key} running", 1)
        response.cancel()
        error = await outcome_async(task)
        return [error["type"], len(await board().wait.remote(f"{key} cancelled", 1))]

    async def crowd(self, count: int) -> Any:
        """More than the callee takes at once: some are rejected by the replica and sent again."""
        return list(await asyncio.gather(*[_await(self._callee.size.remote(b"z")) for _ in range(count)]))


async def _await(response: Any) -> Any:
    return await response


def stock_calls_native() -> Any:
    return Caller.options(ray_actor_options=OFF).bind(Callee.bind())


def native_calls_stock() -> Any:
    return Caller.bind(Callee.options(ray_actor_options=OFF).bind())


BUILDS = {"stock calls native": stock_calls_native, "native calls stock": native_calls_stock}
ACTIVE = {"stock calls native": [False, True], "native calls stock": [True, False]}

both_ways = pytest.mark.parametrize("pair", BUILDS)


@both_ways
@same_as_actor(native_only=True, expect=True)
def test_the_plugin_is_on_in_one_and_off_in_the_other(cluster: Cluster, pair: str) -> Any:
    return cluster.app(BUILDS[pair]).active.remote().result(timeout_s=60) == ACTIVE[pair]


@both_ways
@same_as_actor(native_only=True, expect=[[[1, "two"], {"three": [3]}], list(range(30)), 3_000_000, list(range(20))])
def test_calls_and_streams_work(cluster: Cluster, pair: str) -> Any:
    return [*cluster.app(BUILDS[pair]).calls.remote().result(timeout_s=60)]


@both_ways
@pytest.mark.parametrize("method", ["pickle", "msgpack", "orjson"])
@same_as_actor(native_only=True, expect=[[[1, "a"]], {"named": {"b": 2.5}}])
def test_serializers_understand_each_other(cluster: Cluster, pair: str, method: str) -> Any:
    return cluster.app(BUILDS[pair]).serialized.remote(method).result(timeout_s=60)


@both_ways
@same_as_actor(native_only=True, expect=[1, [1], 1])
def test_errors_keep_their_class_and_words(cluster: Cluster, pair: str) -> Any:
    return cluster.app(BUILDS[pair]).errors.remote().result(timeout_s=60)


@both_ways
@same_as_actor(native_only=True, expect=["RequestCancelledError", 1])
def test_cancels_arrive(cluster: Cluster, pair: str) -> Any:
    return cluster.app(BUILDS[pair]).cancels.remote(cluster.key()).result(timeout_s=60)


@both_ways
@same_as_actor(native_only=True, expect=[1] * 60)
def test_a_crowd_is_served(cluster: Cluster, pair: str) -> Any:
    return cluster.app(BUILDS[pair]).crowd.remote(60).result(timeout_s=60)


@deployment
class Page:
    """Says how much it was sent, and whether the plugin is on in it."""

    async def __call__(self, request: Request) -> Response:
        if request.url.path.endswith("/letters"):
            return StreamingResponse(self._letters(), media_type="text/plain")
        size = len(await request.body())
        return Response(b"%d %d " % (size, plugin_is_active()) + bytes(3 * MIB))

    async def _letters(self) -> AsyncIterator[str]:
        for letter in "proxied":
            yield letter


def stock_page() -> Any:
    return Page.options(ray_actor_options=OFF).bind()


def native_page() -> Any:
    return Page.options(ray_actor_options=ON).bind()


def fetched(cluster: Cluster, build: Any) -> Any:
    """[bytes sent up, whether the replica has the plugin, bytes that came down, what a stream said]."""
    cluster.app(build, route=True)
    url = f"{cluster.http}/test-interoperation-{build.__name__.replace('_', '-')}"
    with urllib.request.urlopen(urllib.request.Request(url, bytes(30 * MIB)), timeout=60) as answer:
        size, active, rest = answer.read().split(b" ", 2)
    with urllib.request.urlopen(f"{url}/letters", timeout=60) as answer:
        return [int(size), int(active), len(rest), answer.read().decode()]


@same_as_actor(native_only=True, expect=[30 * MIB, 0, 3 * MIB, "proxied"])
def test_http_through_our_proxy_reaches_a_stock_replica(cluster: Cluster) -> Any:
    return fetched(cluster, stock_page)


class ThroughStockProxy:
    @staticmethod
    def scenario(cluster: Cluster) -> Any:
        return fetched(cluster, native_page)


def test_http_through_a_stock_proxy_reaches_our_replica(pool: Pool, selected: tuple[str, ...]) -> None:
    if NATIVE not in selected:
        pytest.skip(f"not a test of {', '.join(selected)}")
    outcome = pool.run([STOCK], "test_interoperation", "ThroughStockProxy", {}, timeout=90)[STOCK]
    assert outcome == [30 * MIB, 1, 3 * MIB, "proxied"]
