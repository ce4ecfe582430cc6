"""RAY_SERVE_GRPC_MAX_MESSAGE_SIZE: a clear error at the caller, and a replica that goes on."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Cluster, collect, deployment, outcome, same_as_actor

SETTING = "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"
LIMIT = 2 * 2**20
SMALL_LIMIT = {SETTING: str(LIMIT)}


@deployment
class Store:
    def size(self, value: bytes) -> int:
        return len(value)

    def make(self, size: int) -> bytes:
        return bytes(size)

    def items(self, *sizes: int) -> Any:
        for size in sizes:
            yield bytes(size)


def store() -> Any:
    return Store.bind()


#: What a refusal has to show.
SHOWN = (SETTING, str(LIMIT))


def clear(error: Any) -> Any:
    return [text in error["shows"] for text in SHOWN] if isinstance(error, dict) else error


def refused(call: Any) -> Any:
    return clear(outcome(call, contains=SHOWN))


@same_as_actor(native_only=True, extra=SMALL_LIMIT, expect=[[True, True], LIMIT - 10_000, LIMIT - 10_000])
def test_a_request_over_the_limit_is_refused_naming_the_setting(cluster: Cluster) -> Any:
    handle = cluster.app(store)
    return [
        refused(lambda: handle.size.remote(bytes(LIMIT + 100_000)).result(timeout_s=20)),
        handle.size.remote(bytes(LIMIT - 10_000)).result(timeout_s=20),
        len(handle.make.remote(LIMIT - 10_000).result(timeout_s=20)),
    ]


@same_as_actor(native_only=True, extra=SMALL_LIMIT, expect=[[True, True], 5])
def test_a_response_over_the_limit_is_an_error_naming_the_setting(cluster: Cluster) -> Any:
    handle = cluster.app(store)
    return [
        refused(lambda: handle.make.remote(LIMIT + 100_000).result(timeout_s=20)),
        handle.size.remote(b"after").result(timeout_s=20),
    ]


@same_as_actor(native_only=True, extra=SMALL_LIMIT, expect=[[10, 20], [True, True], 5])
def test_an_item_over_the_limit_ends_its_stream_after_the_items_before_it(cluster: Cluster) -> Any:
    handle = cluster.app(store)
    stream = handle.options(stream=True).items.remote(10, 20, LIMIT + 100_000, 30)
    read, error = collect(map(len, stream), contains=SHOWN)
    return [read, clear(error), handle.size.remote(b"after").result(timeout_s=20)]


@pytest.mark.parametrize("concurrent", [8])
@same_as_actor(native_only=True, extra=SMALL_LIMIT, expect=[8, 8])
def test_calls_in_flight_survive_a_neighbour_over_the_limit(cluster: Cluster, concurrent: int) -> Any:
    handle = cluster.app(store)
    good = [handle.make.remote(LIMIT // 2) for _ in range(concurrent)]
    bad = [handle.make.remote(LIMIT + 100_000) for _ in range(concurrent)]
    errors = [refused(lambda r=response: r.result(timeout_s=30)) for response in bad]
    return [
        sum(len(response.result(timeout_s=30)) == LIMIT // 2 for response in good),
        errors.count([True, True]),
    ]
