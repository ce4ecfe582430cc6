"""Payloads from nothing to gigabytes, as arguments, results and items."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from harness import Cluster, deployment, same_as_actor

KIB, MIB = 2**10, 2**20
#: Around the borders that transports care about: small-message paths, 4 MiB of grpc.aio, HTTP/2's 16 MiB frames.
SIZES = (0, 1, 4 * KIB - 1, 4 * KIB + 1, 64 * KIB, 64 * KIB + 1, MIB, 4 * MIB + 1, 16 * MIB - 1, 16 * MIB, 30 * MIB)


def pattern(size: int) -> bytes:
    """Bytes that betray lost, doubled and swapped blocks."""
    block = numpy.arange(size // 4 + 1, dtype="<u4")
    return block.tobytes()[:size]


@deployment
class Store:
    def check(self, value: Any) -> Any:
        return [type(value).__name__, len(value), value == pattern(len(value))]

    def make(self, size: int, kind: str = "bytes") -> Any:
        data = pattern(size)
        return bytearray(data) if kind == "bytearray" else data

    def echo(self, value: Any) -> Any:
        return value

    def items(self, size: int, count: int) -> Any:
        for _ in range(count):
            yield pattern(size)

    def describe(self, array: Any) -> Any:
        return [array.dtype.str, array.shape, float(array.sum()), bool(array.flags.writeable)]

    def write(self, array: Any) -> Any:
        array += 1
        return float(array.sum())

    def many(self, **named: Any) -> Any:
        return {name: len(value) for name, value in named.items()}


@deployment
class Relay:
    def __init__(self, store: Any) -> None:
        self._store = store

    async def echo(self, value: Any) -> Any:
        return await self._store.echo.remote(value)


def stores() -> Any:
    return Relay.bind(Store.bind())


@pytest.mark.parametrize("size", SIZES)
@same_as_actor(stock=False, expect=[True, True, True])  # Ray's own gRPC path ends at 4 MiB
def test_a_payload_travels_whole_in_both_directions(cluster: Cluster, size: int) -> Any:
    handle = cluster.handle("Store", stores)
    data = pattern(size)
    return [
        handle.check.remote(data).result(timeout_s=60) == ["bytes", size, True],
        handle.make.remote(size).result(timeout_s=60) == data,
        cluster.app(stores).echo.remote(data).result(timeout_s=60) == data,
    ]


@pytest.mark.parametrize("size", [0, 5 * KIB, 2 * MIB, 6 * MIB])
@same_as_actor(stock=False, expect=True)
def test_a_payload_travels_whole_as_item_of_a_stream(cluster: Cluster, size: int) -> Any:
    stream = cluster.handle("Store", stores).options(stream=True).items.remote(size, 4)
    return list(stream) == [pattern(size)] * 4


@pytest.mark.parametrize("size", [10, 100 * KIB, 2 * MIB])
@same_as_actor(native_only=True, expect=["bytearray", True])  # Ray's object store makes bytes of it
def test_a_bytearray_stays_one(cluster: Cluster, size: int) -> Any:
    made = cluster.handle("Store", stores).make.remote(size, "bytearray").result(timeout_s=30)
    return [type(made).__name__, made == pattern(size)]


@pytest.mark.parametrize("dtype", ["<f4", "<i8", "?", "<c16"])
@pytest.mark.parametrize("count", [1, 1000, 300_000])
@same_as_actor(stock=False, expect=[True, True])
def test_arrays_keep_type_shape_and_values(cluster: Cluster, dtype: str, count: int) -> Any:
    handle = cluster.handle("Store", stores)
    array = numpy.arange(count * 2).reshape(2, count).astype(dtype)
    back = handle.echo.remote(array).result(timeout_s=30)
    transposed = handle.echo.remote(array.T).result(timeout_s=30)
    return [
        back.dtype == array.dtype and back.shape == array.shape and bool((back == array).all()),
        transposed.shape == array.T.shape and bool((transposed == array.T).all()),
    ]


@pytest.mark.parametrize("count", [10, 1000, 100_000, 2_000_000])
@same_as_actor(native_only=True, expect=[True, True, True])
def test_received_arrays_are_private_and_writable(cluster: Cluster, count: int) -> Any:
    """On the actor path they are read-only views of the object store; by value they are the receiver's own."""
    handle = cluster.handle("Store", stores)
    array = numpy.ones(count)
    total = handle.write.remote(array).result(timeout_s=30)
    back = handle.echo.remote(array).result(timeout_s=30)
    back += 1
    return [total == 2.0 * count, float(array.sum()) == count, float(back.sum()) == 2.0 * count]


@pytest.mark.parametrize("count", [20_000, 200_000, 2_000_000])
@same_as_actor(native_only=True, expect=0)
def test_received_arrays_are_aligned(cluster: Cluster, count: int) -> Any:
    back = cluster.handle("Store", stores).echo.remote(numpy.ones(count)).result(timeout_s=30)
    return back.ctypes.data % 64


@same_as_actor(stock=False, expect=True)
def test_many_big_buffers_in_one_call(cluster: Cluster) -> Any:
    named = {f"part{number}": pattern(number * 200 * KIB) for number in range(12)}
    sizes = cluster.handle("Store", stores).many.remote(**named).result(timeout_s=60)
    return sizes == {name: len(value) for name, value in named.items()}


@same_as_actor(expect=True)
def test_dataframes_and_tables_travel(cluster: Cluster) -> Any:
    import pandas
    import pyarrow

    handle = cluster.handle("Store", stores)
    frame = pandas.DataFrame({"number": range(20_000), "text": [str(n) for n in range(20_000)]})
    table = pyarrow.table({"number": list(range(20_000)), "text": [str(n) for n in range(20_000)]})
    same_frame = handle.echo.remote(frame).result(timeout_s=30).equals(frame)
    return bool(same_frame and handle.echo.remote(table).result(timeout_s=30).equals(table))


@same_as_actor(stock=False, expect=True, timeout=120)
def test_big_and_small_calls_at_once(cluster: Cluster) -> Any:
    handle = cluster.handle("Store", stores)
    sizes = [5 * MIB, 10, 12 * MIB, 100, 8 * MIB, 64 * KIB] * 3
    responses = [handle.make.remote(size) for size in sizes]
    return all(r.result(timeout_s=90) == pattern(s) for r, s in zip(responses, sizes, strict=True))


@pytest.mark.slow
@same_as_actor(native_only=True, expect=[True, True], timeout=300)
def test_three_hundred_mebibytes_both_ways(cluster: Cluster) -> Any:
    handle = cluster.handle("Store", stores)
    size = 300 * MIB
    return [
        handle.check.remote(pattern(size)).result(timeout_s=200) == ["bytes", size, True],
        handle.make.remote(size).result(timeout_s=200) == pattern(size),
    ]
