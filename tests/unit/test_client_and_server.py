"""Both ends, over the native core, in one process: no Ray cluster, every lane, both event loops."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import ray
from fakes import FakeReplica, metadata, pending
from ray.exceptions import ActorUnavailableError
from ray.serve.exceptions import RequestCancelledError

from ray_serve_grpc import channels
from ray_serve_grpc.client import gRPCReplicaResult, gRPCReplicaWrapper
from ray_serve_grpc.server import ReplicaServer

MIB = 1 << 20


class Replica:
    """User code whose steps the test can see."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.closed = asyncio.Event()
        self.produced = 0

    async def __call__(self, what: str, *args: Any) -> Any:
        return await getattr(self, what)(*args)

    async def echo(self, value: Any) -> Any:
        return value

    async def hold(self) -> Any:
        self.started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def fail(self) -> Any:
        raise ValueError("user code failed")


class Streams(Replica):
    async def __call__(self, count: int, size: int = 0) -> Any:  # type: ignore[override]
        self.started.set()
        try:
            for number in range(count):
                self.produced += 1
                yield bytes(size) if size else number
        finally:
            self.closed.set()


class Ends:
    def __init__(self, server: ReplicaServer, wrapper: gRPCReplicaWrapper, replica: FakeReplica) -> None:
        self.server = server
        self.wrapper = wrapper
        self.replica = replica

    async def call(self, *args: Any, stream: bool = False, **about: Any) -> gRPCReplicaResult:
        """An admitted call."""
        request = pending(*args, about=metadata(stream=stream, **about))
        result = self.wrapper.send_request_python(request, with_rejection=True)
        info = await asyncio.wait_for(result.get_rejection_response(), 10)
        assert info.accepted
        return result


@pytest.fixture(params=["unix", "tcp"])
def lane(request: pytest.FixtureRequest) -> str:
    return request.param


@asynccontextmanager
async def ends(user_code: Any, lane: str, folder: Any, **options: Any) -> AsyncIterator[Ends]:
    actor_id = ray.ActorID(os.urandom(16))
    replica = FakeReplica(user_code, **options)
    path = str(folder / "r.sock")
    server = ReplicaServer(replica, host="127.0.0.1", unix_path=path, identity=actor_id.hex(), authorization=None)
    port = await server.start()
    endpoint = f"unix:{path}" if lane == "unix" else f"tcp:127.0.0.1:{port}"
    wrapper = gRPCReplicaWrapper(actor_id, [endpoint], deployment="Model")
    try:
        yield Ends(server, wrapper, replica)
    finally:
        wrapper.close()
        await server.stop(0)


@pytest.mark.parametrize("name", ["cloudpickle", "pickle", "msgpack", "orjson"])
async def test_values_there_and_back(lane, tmp_path, name):
    async with ends(Replica(), lane, tmp_path) as both:
        for value in (None, "text", [1, {"a": 2.5}], "x" * 300_000):
            result = await both.call("echo", value, request_serialization=name, response_serialization=name)
            assert await result.get_async() == value


@pytest.mark.parametrize("size", [10, 5000, 40 * MIB])
async def test_arrays_are_writable_private_and_aligned(lane, tmp_path, size):
    array = np.arange(size, dtype=np.uint8)
    async with ends(Replica(), lane, tmp_path) as both:
        received = await (await both.call("echo", array)).get_async()
    assert np.array_equal(received, array)
    assert received.flags.writeable
    if array.nbytes >= 4096:
        assert received.ctypes.data % 64 == 0
    received[0] = 77
    assert array[0] == 0


@pytest.mark.parametrize("size", [5000, 100_000, 20 * MIB])
async def test_an_argument_that_user_code_changed_comes_back_changed(lane, tmp_path, size):
    async def change(array: np.ndarray) -> np.ndarray:
        array[::4096] = 9
        return array

    async with ends(change, lane, tmp_path) as both:
        sent = np.ones(size, np.uint8)
        for _ in range(3):
            received = await (await both.call(sent)).get_async()
            assert np.array_equal(np.flatnonzero(received == 9), np.arange(0, size, 4096))
            assert sent.all()
            assert sent.sum() == size


async def test_noop_brings_the_bytes_alone(lane, tmp_path):
    async with ends(Replica().echo, lane, tmp_path) as both:
        about = {"request_serialization": "noop", "response_serialization": "noop"}
        assert await (await both.call(b"x" * 9000, **about)).get_async() == b"x" * 9000
        view = await (await both.call(np.zeros(9000, np.uint8), **about)).get_async()
        assert isinstance(view, memoryview)
        view[0] = 1


async def test_a_stream_arrives_in_order(lane, tmp_path):
    async with ends(Streams(), lane, tmp_path) as both:
        result = await both.call(2000, stream=True)
        assert [item async for item in result] == list(range(2000))


async def test_a_refusal(lane, tmp_path):
    async with ends(Replica(), lane, tmp_path, accepts=False) as both:
        result = both.wrapper.send_request_python(pending("echo", 1), with_rejection=True)
        info = await result.get_rejection_response()
        assert (info.accepted, info.num_ongoing_requests) == (False, 7)


async def test_admission_comes_before_the_answer(lane, tmp_path):
    user_code = Replica()
    async with ends(user_code, lane, tmp_path) as both:
        await both.call("hold")
        assert not user_code.cancelled.is_set()


async def test_a_user_error(lane, tmp_path):
    async with ends(Replica(), lane, tmp_path) as both:
        result = await both.call("fail")
        with pytest.raises(ValueError, match="user code failed"):
            await result.get_async()


async def test_cancel_reaches_user_code(lane, tmp_path):
    user_code = Replica()
    async with ends(user_code, lane, tmp_path) as both:
        result = await both.call("hold")
        await user_code.started.wait()
        result.cancel()
        await asyncio.wait_for(user_code.cancelled.wait(), 10)
        with pytest.raises(asyncio.CancelledError):
            await result.get_async()
        with pytest.raises(RequestCancelledError):
            await asyncio.get_running_loop().run_in_executor(None, result.get, None)


async def test_a_dropped_stream_stops_its_generator(lane, tmp_path):
    user_code = Streams()
    done = asyncio.Event()
    async with ends(user_code, lane, tmp_path) as both:
        result = await both.call(10_000, MIB, stream=True)
        result.add_done_callback(lambda _: done.set())
        await result.__anext__()
        del result
        await asyncio.wait_for(user_code.closed.wait(), 10)
        await asyncio.wait_for(done.wait(), 10)
    assert user_code.produced < 100


async def test_a_dropped_unary_call_runs_to_its_end(lane, tmp_path):
    gate, finished = asyncio.Event(), asyncio.Event()

    async def user_code() -> None:
        await gate.wait()
        finished.set()

    async with ends(user_code, lane, tmp_path) as both:
        await both.call()
        gate.set()
        await asyncio.wait_for(finished.wait(), 10)


async def test_a_slow_reader_holds_the_writer_back(lane, tmp_path):
    user_code = Streams()
    async with ends(user_code, lane, tmp_path) as both:
        result = await both.call(600, MIB, stream=True)
        await result.__anext__()
        seen = -1
        while seen != user_code.produced:
            seen = user_code.produced
            await asyncio.sleep(0.2)
        assert seen < 64
        received = 1
        async for item in result:
            assert len(item) == MIB
            received += 1
        assert received == 600


async def test_many_at_once(lane, tmp_path):
    async with ends(Replica(), lane, tmp_path) as both:

        async def one(number: int) -> Any:
            return await (await both.call("echo", number)).get_async()

        assert await asyncio.gather(*map(one, range(500))) == list(range(500))


async def test_a_call_that_a_stopping_server_cuts_off(lane, tmp_path):
    async with ends(Replica(), lane, tmp_path) as both:
        result = await both.call("hold")
        await both.server.stop(0)
        with pytest.raises(ActorUnavailableError, match="lost after it had taken the request"):
            await asyncio.wait_for(result.get_async(), 10)
        late = both.wrapper.send_request_python(pending("echo", 1), with_rejection=True)
        with pytest.raises(ActorUnavailableError):
            await asyncio.wait_for(late.get_rejection_response(), 10)


async def test_a_stopping_server_lets_what_is_under_way_end(lane, tmp_path):
    gate = asyncio.Event()

    async def user_code() -> str:
        await gate.wait()
        return "answer"

    async with ends(user_code, lane, tmp_path) as both:
        result = await both.call()
        stopping = asyncio.ensure_future(both.server.stop(10))
        await asyncio.sleep(0)
        gate.set()
        assert await result.get_async() == "answer"
        await asyncio.wait_for(stopping, 10)


async def test_nobody_listens(lane, tmp_path):
    endpoint = f"unix:{tmp_path}/none.sock" if lane == "unix" else "tcp:127.0.0.1:1"
    wrapper = gRPCReplicaWrapper(ray.ActorID(os.urandom(16)), [endpoint], deployment="Model")
    result = wrapper.send_request_python(pending(1), with_rejection=True)
    with pytest.raises(ActorUnavailableError, match="Model"):
        await asyncio.wait_for(result.get_rejection_response(), 10)
    wrapper.close()


async def test_another_process_at_the_address_is_not_the_replica(lane, tmp_path):
    async with ends(Replica(), lane, tmp_path) as both:
        impostor = gRPCReplicaWrapper(
            ray.ActorID(os.urandom(16)), list(both.wrapper._peer.endpoints), deployment="Model"
        )
        result = impostor.send_request_python(pending("echo", 1), with_rejection=True)
        with pytest.raises(ActorUnavailableError):
            await asyncio.wait_for(result.get_rejection_response(), 10)
        impostor.close()


async def test_nothing_is_left(lane, tmp_path):
    async with ends(Replica(), lane, tmp_path) as both:
        await (await both.call("echo", 1)).get_async()
    assert not channels._peers
