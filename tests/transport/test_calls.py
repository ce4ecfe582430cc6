"""Unary calls: what is sent arrives, of any size and in any part."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from ray_serve_grpc import _native

from .endpoints import admission, echo, endpoints, message, socket_of, status


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 65_536, 100_000, 1 << 20, (16 << 20) + 17, 40 << 20])
async def test_a_body_of_any_size_comes_back(lane, tmp_path, size):
    body = bytes(np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8))
    async with endpoints(echo, lane, tmp_path) as ends:
        kind, received, buffers = await message(ends.call(body))
    assert (kind, bytes(received), buffers) == (_native.KIND_VALUE, body, ())


async def test_parts_of_a_body_arrive_joined(lane, tmp_path):
    parts = [b"a", b"b" * 10_000, b"", bytearray(b"c" * 5000), memoryview(b"d")]
    async with endpoints(echo, lane, tmp_path) as ends:
        _, received, _ = await message(ends.call(parts))
    assert bytes(received) == b"".join(bytes(part) for part in parts)


@pytest.mark.parametrize("size", [1, 100, 5000, 300_000, 20 << 20])
async def test_buffers_arrive_aligned_writable_and_apart(lane, tmp_path, size):
    arrays = [np.arange(size, dtype=np.uint8), np.zeros(0, np.uint8), np.full(size, 7, np.uint8)]
    async with endpoints(echo, lane, tmp_path) as ends:
        _, _, buffers = await message(ends.call(b"x", arrays))
    received = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
    assert [a.tolist()[:9] for a in received] == [a.tolist()[:9] for a in arrays]
    assert all(np.array_equal(a, b) for a, b in zip(received, arrays, strict=True))
    assert all(a.ctypes.data % 64 == 0 for a in received if a.size)
    received[0][:] = 255
    assert np.array_equal(received[2], arrays[2])


async def test_what_was_sent_may_change_once_the_answer_is_there(lane, tmp_path):
    array = np.ones(1 << 20, np.uint8)
    async with endpoints(echo, lane, tmp_path) as ends:
        _, _, (received,) = await message(ends.call(b"", (array,)))
        array[:] = 2
        assert np.frombuffer(received, np.uint8).sum() == 1 << 20


async def test_sent_objects_are_released_after_the_call(lane, tmp_path):
    array = bytearray(1 << 20)
    async with endpoints(echo, lane, tmp_path) as ends:
        call = ends.call(b"", (array,))
        await status(call)
        await message(ends.call(b"another call sweeps what the I/O thread left"))
        array.append(0)  # raises BufferError while a view of it lives


async def test_metadata_arrives_in_its_fields(lane, tmp_path):
    seen = []

    async def handler(call):
        seen.append((call.method, call.dialect, call.metadata, call.extra, call.lane))
        call.finish()

    async with endpoints(handler, lane, tmp_path) as ends:
        call = ends.call(metadata=("id", "", "méthode"), extra=b"\x00extra", method=_native.METHOD_STREAMING_REJECTION)
        assert await status(call) == (_native.STATUS_OK, "")
        assert (call.lane, call.sent) == (socket_of(lane), True)
    strings = ("id", "", "méthode", "", "", "", "", "", "")
    assert seen == [
        (_native.METHOD_STREAMING_REJECTION, _native.DIALECT_NATIVE, strings, b"\x00extra", socket_of(lane))
    ]


async def test_admission_is_known_before_the_value(lane, tmp_path):
    go_on = asyncio.Event()

    async def handler(call):
        call.admit(True, 42)
        await go_on.wait()
        call.send(0, b"value")
        call.finish()

    async with endpoints(handler, lane, tmp_path) as ends:
        call = ends.call()
        assert await admission(call) == (True, 42)
        assert call.take() is None
        go_on.set()
        assert (await message(call))[1] == b"value"


async def test_a_rejected_call_ends_without_a_message(lane, tmp_path):
    async def handler(call):
        call.admit(False, 5)
        call.finish()

    async with endpoints(handler, lane, tmp_path) as ends:
        call = ends.call(method=_native.METHOD_UNARY_REJECTION)
        assert await admission(call) == (False, 5)
        assert await message(call) is None
        assert call.status() == (_native.STATUS_OK, "")


async def test_a_status_keeps_its_code_and_text(lane, tmp_path):
    async def handler(call):
        call.finish(_native.STATUS_RESOURCE_EXHAUSTED, "100 % zu groß\n")

    async with endpoints(handler, lane, tmp_path) as ends:
        assert await status(ends.call()) == (_native.STATUS_RESOURCE_EXHAUSTED, "100 % zu groß\n")


async def test_a_call_that_its_handler_forgets_ends_with_internal(lane, tmp_path):
    async def handler(call):
        pass

    async with endpoints(handler, lane, tmp_path) as ends:
        code, text = await status(ends.call())
    assert code == _native.STATUS_INTERNAL
    assert "without an answer" in text


async def test_a_thread_without_a_loop_waits_for_its_answer(lane, tmp_path):
    async with endpoints(echo, lane, tmp_path) as ends:
        call = ends.call(b"from a thread")
        assert await asyncio.to_thread(call.wait, 10.0)
        assert call.take()[1] == b"from a thread"


async def test_waiting_ends_at_its_timeout(lane, tmp_path):
    async def handler(call):
        await asyncio.Event().wait()

    async with endpoints(handler, lane, tmp_path) as ends:
        call = ends.call()
        assert await asyncio.to_thread(call.wait, 0.05) is False


async def test_calls_from_many_threads_and_tasks_get_their_own_answers(lane, tmp_path):
    async with endpoints(echo, lane, tmp_path) as ends:
        results: dict[int, bytes] = {}

        def worker(index: int) -> None:
            for step in range(50):
                call = ends.call(b"%d-%d" % (index, step))
                assert call.wait(20.0)
                results[index * 50 + step] = call.take()[1]

        threads = [threading.Thread(target=worker, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        answers = await asyncio.gather(*[message(ends.call(b"%d" % n)) for n in range(300)])
        await asyncio.to_thread(lambda: [thread.join() for thread in threads])
    assert [answer[1] for answer in answers] == [b"%d" % n for n in range(300)]
    assert results == {i * 50 + s: b"%d-%d" % (i, s) for i in range(4) for s in range(50)}
