"""Streaming calls: items, order, ends, and the bound on what is under way."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any

import pytest
from harness import Cluster, deployment, outcome, same_as_actor
from harness.board import note, passage
from harness.cluster import resident_mib, until

MIB = 2**20


@deployment(max_ongoing_requests=100)
class Source:
    def sync(self, count: int) -> Any:
        yield from range(count)

    async def asynchronous(self, count: int) -> Any:
        for number in range(count):
            yield number

    async def gated(self, gate: str) -> Any:
        yield "before"
        await passage(gate)
        yield "after"

    def sync_blocks(self, size: int, count: int, key: str) -> Any:
        from harness.board import note_sync

        for number in range(count):
            if number % 50 == 0:
                note_sync(f"{key} produced", number)
            yield number.to_bytes(4, "big") + bytes(size)

    async def blocks(self, size: int, count: int, key: str) -> Any:
        for number in range(count):
            if number % 50 == 0:
                await note(f"{key} produced", number)
            yield number.to_bytes(4, "big") + bytes(size)

    async def mixed(self) -> Any:
        for item in (None, b"", "text", [1], {"k": (1, 2)}, 0, False):
            yield item

    async def arguments(self, *positional: Any, **named: Any) -> Any:
        yield positional
        yield named

    async def not_a_generator(self) -> int:
        return 1

    async def echoes(self, value: Any) -> Any:
        yield value


@deployment(max_ongoing_requests=100)
class Relay:
    def __init__(self, source: Any) -> None:
        self._source = source.options(stream=True)

    async def relay(self, method: str, count: int) -> Any:
        async for item in getattr(self._source, method).remote(count):
            yield item

    async def gathered(self, streams: int, count: int) -> Any:
        async def read() -> list[int]:
            return [item async for item in self._source.asynchronous.remote(count)]

        return await asyncio.gather(*[read() for _ in range(streams)])

    async def step_by_step(self) -> Any:
        stream = self._source.asynchronous.remote(2)
        first, second = await stream.__anext__(), await stream.__anext__()
        ends = []
        for _ in range(2):
            try:
                await stream.__anext__()
            except StopAsyncIteration:
                ends.append("end")
        return [first, second, ends]


def streams() -> Any:
    return Relay.bind(Source.bind())


def source(cluster: Cluster) -> Any:
    return cluster.handle("Source", streams).options(stream=True)


@pytest.mark.parametrize("method", ["sync", "asynchronous"])
@pytest.mark.parametrize("count", [0, 1, 2, 1000])
@same_as_actor(expect=True)
def test_all_items_come_in_order(cluster: Cluster, method: str, count: int) -> Any:
    direct = list(getattr(source(cluster), method).remote(count))
    relayed = list(cluster.app(streams).options(stream=True).relay.remote(method, count))
    return direct == relayed == list(range(count))


@same_as_actor(expect=["before", "after", "end"])
def test_an_item_arrives_before_the_next_is_made(cluster: Cluster) -> Any:
    gate = cluster.key()
    stream = source(cluster).gated.remote(gate)
    first = next(stream)
    cluster.board.open(gate)
    return [first, next(stream), next(stream, "end")]


@same_as_actor(expect=[None, b"", "text", [1], {"k": (1, 2)}, 0, False])
def test_items_of_every_kind_are_items(cluster: Cluster) -> Any:
    return list(source(cluster).mixed.remote())


@same_as_actor(expect=[(1, "two"), {"three": 3}])
def test_arguments_of_a_stream_arrive(cluster: Cluster) -> Any:
    return list(source(cluster).arguments.remote(1, "two", three=3))


@same_as_actor(expect=[0, 1, ["end", "end"]])
def test_a_stream_that_ended_stays_ended(cluster: Cluster) -> Any:
    return cluster.app(streams).step_by_step.remote().result(timeout_s=20)


@same_as_actor(expect=True)
def test_thirty_streams_at_once_keep_their_items_apart(cluster: Cluster) -> Any:
    return cluster.app(streams).gathered.remote(30, 50).result(timeout_s=40) == [list(range(50))] * 30


@same_as_actor(expect=True)
def test_streams_can_be_read_from_many_threads(cluster: Cluster) -> Any:
    handle = source(cluster)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        read = [threads.submit(lambda: list(handle.sync.remote(100))) for _ in range(8)]
        return all(future.result(60) == list(range(100)) for future in read)


@same_as_actor(expect=list(range(20)))
def test_the_driver_can_iterate_on_a_loop_of_its_own(cluster: Cluster) -> Any:
    async def read() -> list[int]:
        return [item async for item in source(cluster).asynchronous.remote(20)]

    return asyncio.run(read())


@same_as_actor(expect=[True, [1]], stock=False)  # which of the errors it is differs there
def test_streaming_from_a_method_that_is_not_a_generator_is_refused(cluster: Cluster) -> Any:
    described = outcome(lambda: list(source(cluster).not_a_generator.remote()), contains=("generator",))
    return [isinstance(described, dict) and bool(described["shows"]), list(source(cluster).echoes.remote(1))]


@same_as_actor(expect=True)
def test_calling_a_generator_without_stream_is_refused(cluster: Cluster) -> Any:
    plain = cluster.handle("Source", streams)
    described = outcome(lambda: plain.sync.remote(2).result(timeout_s=20), contains=("stream=True", "stream"))
    return bool(described["shows"])


def read_one_of_600_mebibytes(cluster: Cluster, method: str) -> Any:
    """Reads one item of 1 MiB, waits until the generator stands still, measures, and reads the rest."""
    handle = source(cluster)
    list(getattr(handle, method).remote(MIB, 5, cluster.key()))
    key = cluster.key()
    before = resident_mib()
    stream = getattr(handle, method).remote(MIB, 600, key)
    numbers = [int.from_bytes(next(stream)[:4], "big")]
    produced = [cluster.board.count(f"{key} produced")]

    def stands_still() -> bool:
        produced.append(cluster.board.count(f"{key} produced"))
        return len(produced) > 20 and len(set(produced[-20:])) == 1

    until(stands_still, timeout=20, poll=0.1)
    growth = resident_mib() - before
    numbers += [int.from_bytes(item[:4], "big") for item in stream]
    return {
        "whole": numbers == list(range(600)),
        "grew by less than 64 MiB": growth < 64 or growth,
        "produced before they were read": produced[-1] * 50,
    }


@pytest.mark.parametrize("method", ["blocks", "sync_blocks"])
@same_as_actor(
    native_only=True, expect=lambda seen: seen["whole"] and seen["grew by less than 64 MiB"] is True, timeout=120
)
def test_a_fast_stream_does_not_pile_up_in_a_slow_reader(cluster: Cluster, method: str) -> Any:
    return read_one_of_600_mebibytes(cluster, method)


@same_as_actor(
    native_only=True,
    extra={"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"},
    expect=lambda seen: seen["whole"] and seen["produced before they were read"] <= 100,
    timeout=120,
)
def test_a_slow_reader_holds_its_writer_back(cluster: Cluster) -> Any:
    """Only here: where user code has a thread of its own, Serve itself queues what a generator yields."""
    return read_one_of_600_mebibytes(cluster, "blocks")


@same_as_actor(expect=[True, True])
def test_one_stalled_stream_does_not_stop_the_other_calls(cluster: Cluster) -> Any:
    handle = source(cluster)
    stalled = handle.blocks.remote(MIB, 40, cluster.key())
    next(stalled)
    others = [list(handle.asynchronous.remote(50)) == list(range(50)) for _ in range(5)]
    return [all(others), sum(1 for _ in stalled) == 39]
