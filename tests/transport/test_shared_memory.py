"""Lending: what goes through shared memory, what comes back, what is left when somebody goes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from ray_serve_grpc import _native
from ray_serve_grpc.bridge import bridge_for

from .endpoints import PATIENCE, SHM_LIMIT, admission, echo, endpoints, message, status

MIB = 1 << 20


@pytest.fixture
def lane():
    return "shm"


def counters():
    return {name: count for name, count in _native.statistics().items() if name.startswith("shm_")}


async def warm_call(ends, *arguments, **options):
    """Repeats a call until its request and its response both went through shared memory."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        before = counters()["shm_messages_sent"]
        answer = await message(ends.call(*arguments, **options))
        if counters()["shm_messages_sent"] >= before + 2:
            return answer
        del answer
        await asyncio.sleep(0.01)
    pytest.fail("no call went through shared memory both ways")


async def test_large_buffers_and_bodies_go_through_shared_memory(lane, tmp_path):
    array = np.arange(MIB, dtype=np.uint8)
    body = os.urandom(MIB)
    async with endpoints(echo, lane, tmp_path) as ends:
        _, received_body, (received,) = await warm_call(ends, body, (array,))
        assert bytes(received_body) == body
        assert np.array_equal(np.frombuffer(received, np.uint8), array)


async def test_a_large_message_goes_through_shared_memory_from_the_first_one_on(lane, tmp_path):
    array = np.arange(3 * MIB, dtype=np.uint8)
    async with endpoints(echo, lane, tmp_path) as ends:
        before = counters()
        _, _, (received,) = await message(ends.call(b"", (array,)))
        after = counters()
        assert np.array_equal(np.frombuffer(received, np.uint8), array)
        assert after["shm_messages_sent"] == before["shm_messages_sent"] + 2
        assert after["shm_fallbacks"] == before["shm_fallbacks"]


async def test_what_user_code_writes_to_a_buffer_shows_in_no_other_message(lane, tmp_path):
    array = np.zeros(MIB, np.uint8)
    async with endpoints(echo, lane, tmp_path) as ends:
        for _ in range(20):
            _, _, (buffer,) = await warm_call(ends, b"", (array,))
            received = np.frombuffer(buffer, np.uint8)
            assert not received.any()
            received[:] = 1
            del buffer, received
    assert not array.any()


async def test_messages_that_are_held_keep_their_bytes(lane, tmp_path):
    async with endpoints(echo, lane, tmp_path) as ends:
        held = []
        for n in range(30):
            _, _, (buffer,) = await message(ends.call(b"", (np.full(200_000, n, np.uint8),)))
            held.append(np.frombuffer(buffer, np.uint8))
        assert [int(array[0]) for array in held] == list(range(30))
        assert all((array == n).all() for n, array in enumerate(held))


async def test_what_was_secured_is_lent_to_any_number_of_peers_without_another_copy(lane, tmp_path):
    # Large enough that memory is made for it where none is free.
    array = np.arange(2 * MIB, dtype=np.uint8)
    async with contextlib.AsyncExitStack() as stack:
        peers = []
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            peers.append(await stack.enter_async_context(endpoints(sums, lane, tmp_path / name)))
        secured = [_native.secure(array), _native.secure(array)]
        array[:] = 0
        before = _native.statistics()
        for ends in peers:
            assert await total(ends, *secured) == 2 * sum(range(256)) * (2 * MIB // 256)
        after = _native.statistics()
    assert after["shm_bytes_forwarded"] - before["shm_bytes_forwarded"] == 8 * MIB
    assert after["shm_bytes_sent"] == before["shm_bytes_sent"]


async def sums(call):
    call.send(0, str(sum(int(np.frombuffer(buffer, np.uint8).sum()) for buffer in call.buffers)).encode())
    call.finish()


async def total(ends, *buffers):
    return int((await message(ends.call(b"", buffers)))[1])


async def test_segments_are_used_again(lane, tmp_path):
    array = np.zeros(MIB, np.uint8)
    async with endpoints(echo, lane, tmp_path) as ends:
        await warm_call(ends, b"", (array,))
        for _ in range(200):
            await message(ends.call(b"", (array,)))
        before = counters()["shm_pool_segments"]
        for _ in range(200):
            await message(ends.call(b"", (array,)))
        # Fewer, where some of an earlier test have been idle for long.
        assert counters()["shm_pool_segments"] <= before


async def test_a_received_buffer_is_passed_on_without_a_copy(lane, tmp_path):
    async with endpoints(echo, lane, tmp_path) as ends:
        await warm_call(ends, b"", (np.arange(MIB, dtype=np.uint8),))
        before = counters()["shm_bytes_forwarded"]
        _, _, (buffer,) = await warm_call(ends, b"", (np.arange(MIB, dtype=np.uint8),))
        # The server's echo passes the request's buffer on.
        assert counters()["shm_bytes_forwarded"] >= before + MIB
        assert np.array_equal(np.frombuffer(buffer, np.uint8), np.arange(MIB, dtype=np.uint8))


async def test_a_buffer_that_was_written_to_is_passed_on_as_it_is_now(lane, tmp_path):
    async def handler(call):
        for buffer in call.buffers:
            np.frombuffer(buffer, np.uint8)[12_345] = 99
        await echo(call)

    array = np.zeros(MIB, np.uint8)
    async with endpoints(handler, lane, tmp_path) as ends:
        for _ in range(5):
            _, _, (buffer,) = await warm_call(ends, b"", (array,))
            received = np.frombuffer(buffer, np.uint8)
            assert (int(received[12_345]), int(received.sum())) == (99, 99)
            del buffer, received


async def received(ends, size=MIB):
    """A lent buffer of zeros, and an array over it."""
    _, _, (buffer,) = await warm_call(ends, b"", (np.zeros(size, np.uint8),))
    return buffer, np.frombuffer(buffer, np.uint8)


async def test_a_snapshot_of_what_was_received_is_passed_on_without_a_copy(lane, tmp_path):
    async with endpoints(echo, lane, tmp_path) as ends:
        _, array = await received(ends, 2 * MIB)
        snapshot = _native.snapshot(array[64:])
        array[:] = 1
        assert not np.frombuffer(snapshot, np.uint8).any()
        before = counters()
        _, _, (back,) = await message(ends.call(b"", (snapshot,)))
        assert len(back) == 2 * MIB - 64
        assert not np.frombuffer(back, np.uint8).any()
        after = counters()
        assert after["shm_bytes_sent"] == before["shm_bytes_sent"]
        assert after["shm_bytes_forwarded"] == before["shm_bytes_forwarded"] + 2 * len(back)


async def test_a_snapshot_outlives_what_it_was_made_of(lane, tmp_path):
    async with endpoints(echo, lane, tmp_path) as ends:
        _, _, (buffer,) = await warm_call(ends, b"", (np.full(MIB, 7, np.uint8),))
        snapshot = _native.snapshot(buffer)
        del buffer
        for n in range(20):
            await message(ends.call(b"", (np.full(MIB, 100 + n, np.uint8),)))
        assert set(bytes(snapshot)) == {7}


async def test_two_snapshots_of_the_same_memory_arrive_as_two(lane, tmp_path):
    async with endpoints(echo, lane, tmp_path) as ends:
        buffer, _ = await received(ends)
        _, _, (one, other) = await warm_call(ends, b"", (_native.snapshot(buffer), _native.snapshot(buffer)))
        np.frombuffer(one, np.uint8)[:] = 1
        assert not np.frombuffer(other, np.uint8).any()


async def test_there_is_a_snapshot_only_of_large_lent_memory_that_nobody_wrote_to(lane, tmp_path):
    async with endpoints(echo, lane, tmp_path) as ends:
        _, array = await received(ends, 2 * MIB)
        assert _native.snapshot(np.zeros(2 * MIB, np.uint8)) is None
        assert _native.snapshot(array[: MIB - 1]) is None
        assert _native.snapshot(array[1:]) is None
        array[5000] = 1
        assert _native.snapshot(array) is None
        assert _native.snapshot(array[MIB:]) is not None


async def test_securing_what_was_received_copies_nothing_unless_it_was_written_to(lane, tmp_path):
    async with endpoints(echo, lane, tmp_path) as ends:
        _, array = await received(ends, 2 * MIB)
        before = counters()["shm_bytes_sent"]
        _native.secure(array)
        assert counters()["shm_bytes_sent"] == before
        array[9] = 9
        secured = _native.secure(array)
        assert counters()["shm_bytes_sent"] == before + 2 * MIB
        assert np.frombuffer(secured, np.uint8)[9] == 9


async def test_large_memory_that_was_passed_on_comes_back_without_another_call(lane, tmp_path):
    async with endpoints(echo, lane, tmp_path) as ends:
        _, _, (buffer,) = await warm_call(ends, b"", (np.zeros(4 * MIB, np.uint8),))
        assert counters()["shm_pool_leased"] > 0
        del buffer
        deadline = time.monotonic() + PATIENCE
        while counters()["shm_pool_leased"] and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert counters()["shm_pool_leased"] == 0


async def test_the_same_buffer_twice_becomes_two(lane, tmp_path):
    async with endpoints(echo, lane, tmp_path) as ends:
        _, _, (buffer,) = await warm_call(ends, b"", (np.zeros(MIB, np.uint8),))
        array = np.frombuffer(buffer, np.uint8)
        _, _, buffers = await warm_call(ends, b"", (array, array, array[: MIB // 2]))
        first, second, third = (np.frombuffer(buffer, np.uint8) for buffer in buffers)
        first[:] = 1
        assert not second.any()
        assert not third.any()


async def test_many_buffers_keep_their_order_whoever_owns_them(lane, tmp_path):
    async with endpoints(echo, lane, tmp_path) as ends:
        _, _, lent = await warm_call(ends, b"", [np.full(100_000 + n, n, np.uint8) for n in range(4)])
        mixed = []
        for n, buffer in enumerate(lent):
            mixed += [np.frombuffer(buffer, np.uint8), np.full(70_000, 50 + n, np.uint8), np.zeros(0, np.uint8)]
        _, _, received = await warm_call(ends, b"body", mixed)
        assert [bytes(a) for a in received] == [a.tobytes() for a in mixed]


async def test_a_cancelled_call_takes_back_what_was_not_read(lane, tmp_path):
    """More calls than there are lease words: a leak would end the lending."""
    begun = asyncio.Event()

    async def handler(call):
        call.admit(True, 1)
        begun.set()
        cancelled = asyncio.Event()
        call.watch_cancel(bridge_for(asyncio.get_running_loop()), cancelled.set)
        call.send(0, b"", call.buffers)
        await cancelled.wait()

    array = np.zeros(70_000, np.uint8)
    async with endpoints(handler, lane, tmp_path) as ends:
        for _ in range(1500):
            call = ends.call(b"", (array,), method=_native.METHOD_STREAMING)
            await admission(call)
            call.cancel()
            del call
        # The peer is told after a second that nobody reads those responses.
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            before = counters()["shm_messages_sent"]
            call = ends.call(b"", (array,), method=_native.METHOD_STREAMING)
            assert (await message(call))[2]
            if counters()["shm_messages_sent"] >= before + 2:
                break
            call.cancel()
            await asyncio.sleep(0.05)
        else:
            pytest.fail("nothing is lent any more")


async def test_a_stream_lends_within_a_bound(lane, tmp_path):
    item = np.zeros(MIB, np.uint8)
    sent = 0

    async def handler(call):
        nonlocal sent
        for _ in range(200):
            if not call.send(0, b"", (item,)):
                future = asyncio.get_running_loop().create_future()
                call.watch_writable(bridge_for(asyncio.get_running_loop()), future)
                await future
            sent += 1
        call.finish()

    async with endpoints(handler, lane, tmp_path) as ends:
        call = ends.call(method=_native.METHOD_STREAMING)
        await message(call)
        await asyncio.sleep(1.0)
        assert sent < 80
        count = 1
        while await message(call) is not None:
            count += 1
        assert count == 200


async def test_without_room_messages_go_by_the_socket(lane, tmp_path):
    async with endpoints(echo, lane, tmp_path) as ends:
        _native.set_shm_limit(3 * MIB)
        array = np.random.default_rng(1).integers(0, 255, 8 * MIB, dtype=np.uint8)
        before = counters()
        for _ in range(3):
            _, _, (buffer,) = await message(ends.call(b"", (array,)))
            assert np.array_equal(np.frombuffer(buffer, np.uint8), array)
        assert counters()["shm_fallbacks"] > before["shm_fallbacks"]


async def test_held_results_of_a_dead_peer_stay_readable(lane, tmp_path):
    async with peer_process(tmp_path) as (process, channel):
        array = np.arange(MIB, dtype=np.uint8)
        held = []
        while counters_of(channel, array, held) < 3:
            await asyncio.sleep(0.01)
        before = [np.frombuffer(buffer, np.uint8).copy() for buffer in held]
        process.send_signal(signal.SIGKILL)
        process.wait()
        code, _ = await status(channel.call(0, (), b"", b"", ()))
        assert code == _native.STATUS_UNAVAILABLE
        assert all(np.array_equal(np.frombuffer(b, np.uint8), a) for b, a in zip(held, before, strict=True))


def counters_of(channel, array, held):
    call = channel.call(0, (), b"", b"", (array,))
    assert call.wait(PATIENCE)
    held += call.take()[2]
    return len(held)


async def test_a_segment_that_is_gone_is_let_go_by_whoever_it_was_passed_on_to(lane, tmp_path):
    """Its owner, the server that was lent it, and the caller to which that passed it on all have a descriptor of it."""

    def held():
        segments = set()
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{number}") == "/memfd:ray_serve_grpc (deleted)":
                    segments.add(os.stat(f"/proc/self/fd/{number}").st_ino)
        return len(segments)

    async with endpoints(echo, lane, tmp_path) as ends:
        _native.set_shm_limit(4 * MIB)
        forwarded = counters()["shm_bytes_forwarded"]
        for size in (1, 2, 3, 1, 2, 3):  # Each takes the room of those before.
            await warm_call(ends, b"", (np.zeros(size * MIB, np.uint8),))
        assert counters()["shm_bytes_forwarded"] >= forwarded + 6 * MIB
        deadline = time.monotonic() + PATIENCE
        while held() > counters()["shm_pool_segments"] and time.monotonic() < deadline:
            await warm_call(ends, b"", (np.zeros(MIB, np.uint8),))  # Lending looks for what came back.
            gc.collect()
        assert held() <= counters()["shm_pool_segments"]


@contextlib.asynccontextmanager
async def peer_process(folder):
    """An echo server in a process of its own, and a channel to it."""
    _native.set_shm_limit(SHM_LIMIT)
    code = """
        import asyncio, sys
        from ray_serve_grpc import _native
        from ray_serve_grpc.bridge import bridge_for
        _native.set_shm_limit(1 << 30)
        def on_call(call):
            call.admit(True, 1)
            call.send(0, call.body, call.buffers)
            call.finish()
        async def main():
            bridge = bridge_for(asyncio.get_running_loop())
            server = _native.Server(bridge, on_call, host="127.0.0.1", unix_path=sys.argv[1])
            print("ready", flush=True)
            await asyncio.Event().wait()
        asyncio.run(main())
    """
    path = str(folder / "peer.sock")
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), path], stdout=subprocess.PIPE)
    try:
        assert await asyncio.to_thread(process.stdout.readline) == b"ready\n"
        yield process, _native.Channel([f"unix:{path}"])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_nothing_is_left_open_when_a_connection_has_ended(lane, tmp_path):
    async def once():
        async with endpoints(echo, lane, tmp_path) as ends:
            await warm_call(ends, b"", (np.zeros(MIB, np.uint8),))

    def descriptors():
        # The pool keeps its segments for the next connection.
        return len(os.listdir("/proc/self/fd")) - counters()["shm_pool_segments"]

    await once()
    gc.collect()
    before = descriptors()
    for _ in range(5):
        await once()
    gc.collect()
    deadline = time.monotonic() + PATIENCE
    while descriptors() > before and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert descriptors() <= before
