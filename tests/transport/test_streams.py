"""Streams: order, flow control, cancel."""

from __future__ import annotations

import asyncio

import pytest

from ray_serve_grpc import _native
from ray_serve_grpc.bridge import bridge_for

from .endpoints import PATIENCE, endpoints, message, status, written

STREAMING = _native.METHOD_STREAMING


async def test_items_arrive_in_order_and_then_the_end(lane, tmp_path):
    async def handler(call):
        for n in range(5000):
            if not call.send(0, b"%d" % n):
                await written(call)
        call.finish()

    async with endpoints(handler, lane, tmp_path) as ends:
        call = ends.call(method=STREAMING)
        items = []
        while (taken := await message(call)) is not None:
            items.append(taken)
            items.extend(call.take_all())
        assert [item[1] for item in items] == [b"%d" % n for n in range(5000)]
        assert call.status() == (_native.STATUS_OK, "")


async def test_the_first_item_does_not_wait_for_the_second(lane, tmp_path):
    go_on = asyncio.Event()

    async def handler(call):
        call.send(0, b"first")
        await go_on.wait()
        call.finish()

    async with endpoints(handler, lane, tmp_path) as ends:
        call = ends.call(method=STREAMING)
        assert (await message(call))[1] == b"first"
        go_on.set()
        assert await message(call) is None


async def test_a_slow_reader_holds_the_writer_back(lane, tmp_path):
    item = b"x" * (1 << 20)
    sent = 0
    held_back = asyncio.Event()

    async def handler(call):
        nonlocal sent
        for _ in range(200):
            writable = call.send(0, item)
            sent += 1
            if not writable:
                waiting = asyncio.ensure_future(written(call))
                done, _ = await asyncio.wait([waiting], timeout=1.0)
                if not done:
                    held_back.set()
                await waiting
        call.finish()

    async with endpoints(handler, lane, tmp_path) as ends:
        call = ends.call(method=STREAMING)
        assert (await message(call))[1] is not None
        await asyncio.wait_for(held_back.wait(), PATIENCE)
        assert sent < 64
        count = 1
        while await message(call) is not None:
            count += 1
        assert (count, sent) == (200, 200)


async def test_a_cancelled_stream_stops_its_handler(lane, tmp_path):
    cancelled = asyncio.Event()

    async def handler(call):
        call.watch_cancel(bridge_for(asyncio.get_running_loop()), cancelled.set)
        call.send(0, b"item")
        await asyncio.wait_for(cancelled.wait(), PATIENCE)
        assert call.cancelled

    async with endpoints(handler, lane, tmp_path) as ends:
        call = ends.call(method=STREAMING)
        await message(call)
        call.cancel()
        assert (await status(call))[0] == _native.STATUS_CANCELLED
        await asyncio.wait_for(cancelled.wait(), PATIENCE)


@pytest.mark.parametrize("begun", [False, True])
async def test_a_dropped_call_is_cancelled(lane, tmp_path, begun):
    cancelled = asyncio.Event()

    async def handler(call):
        call.watch_cancel(bridge_for(asyncio.get_running_loop()), cancelled.set)
        if begun:
            call.send(0, b"item")
        await asyncio.wait_for(cancelled.wait(), PATIENCE)

    async with endpoints(handler, lane, tmp_path) as ends:
        call = ends.call(method=STREAMING)
        if begun:
            await message(call)
        else:
            await asyncio.to_thread(call.wait, 0.2)
        del call
        await asyncio.wait_for(cancelled.wait(), PATIENCE)


async def test_a_writer_that_waits_is_released_by_a_cancel(lane, tmp_path):
    released = asyncio.Event()

    async def handler(call):
        while call.send(0, b"x" * (1 << 20)) or call.cancelled:
            await asyncio.sleep(0)
            if call.cancelled:
                break
        await written(call)
        released.set()

    async with endpoints(handler, lane, tmp_path) as ends:
        call = ends.call(method=STREAMING)
        await message(call)
        await asyncio.to_thread(lambda: None)
        call.cancel()
        await asyncio.wait_for(released.wait(), PATIENCE)


async def test_a_watcher_of_cancel_is_forgotten_when_the_call_ends(lane, tmp_path):
    bridge = bridge_for(asyncio.get_running_loop())
    called = []

    async def handler(call):
        call.watch_cancel(bridge, lambda: called.append(call))
        call.send(0, b"item")
        call.finish()

    async with endpoints(handler, lane, tmp_path) as ends:
        for _ in range(20):
            assert (await status(ends.call(method=STREAMING)))[0] == _native.STATUS_OK
    assert called == []
    assert bridge.statistics()["watched"] == 0


async def test_a_thousand_streams_share_a_channel(lane, tmp_path):
    everyone = asyncio.Event()
    waiting = 0

    async def handler(call):
        nonlocal waiting
        call.send(0, b"begun")
        waiting += 1
        if waiting == 1000:
            everyone.set()
        await everyone.wait()
        call.send(0, b"over")
        call.finish()

    async def read(call):
        items = []
        while (taken := await message(call)) is not None:
            items.append(taken[1])
        return items

    async with endpoints(handler, lane, tmp_path) as ends:
        calls = [ends.call(method=STREAMING) for _ in range(1000)]
        assert await asyncio.gather(*map(read, calls)) == [[b"begun", b"over"]] * 1000
