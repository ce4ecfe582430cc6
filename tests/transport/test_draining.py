"""Calls that cross a GOAWAY, and a thousand streams on one connection."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from ray_serve_grpc import _native

from .endpoints import echo, endpoints, message, status, written

ROUNDS = 8
#: As many more until a call has crossed a GOAWAY: whether one does is a matter of threads.
MOST_ROUNDS = 80
CALLS = 120


@pytest.mark.parametrize("takes", [0.0, 0.002])
async def test_a_call_that_crosses_a_goaway_is_answered_or_known_not_to_have_run(lane, tmp_path, takes):
    """At a random moment of a run of calls: those that fail must be safe to send to another replica."""
    chance = random.Random(lane)
    refused = 0
    for round_ in range(MOST_ROUNDS):
        if round_ >= ROUNDS and refused:
            break
        handled: Counter[bytes] = Counter()

        async def handler(call, handled=handled):
            handled[bytes(call.body)] += 1
            if takes:
                await asyncio.sleep(takes)
            await echo(call)

        (folder := tmp_path / str(round_)).mkdir()
        async with endpoints(handler, lane, folder) as ends:
            await message(ends.call(b"first"))
            stop_at = chance.randrange(CALLS)
            calls = {}
            stopping = None
            for number in range(CALLS):
                if number == stop_at:
                    stopping = asyncio.ensure_future(ends.stop())
                body = b"%d" % number
                calls[body] = ends.call(body)
                if chance.random() < 0.3:
                    await asyncio.sleep(chance.choice((0, 0, 0, 0.001)))
            for body, call in calls.items():
                code, text = await status(call)
                if code == _native.STATUS_OK:
                    assert call.take()[1] == body
                    assert handled[body] == 1
                else:
                    assert (code, call.sent, handled[body]) == (_native.STATUS_UNAVAILABLE, False, 0), text
                    refused += 1
            assert stopping is not None
            await stopping
    assert refused > 0


async def test_a_thousand_streams_share_a_connection(lane, tmp_path):
    """More than windows and limits hold at once: each is read a little at a time, in turn, to its end."""
    item = bytes(8 * 1024)
    items = 20

    async def handler(call):
        call.admit(True, 1)
        for _ in range(items):
            if not call.send(_native.KIND_VALUE, item):
                await written(call)
        call.finish()

    async with endpoints(handler, lane, tmp_path) as ends:
        calls = [ends.call(method=_native.METHOD_STREAMING) for _ in range(1000)]
        for _ in range(items):
            for call in calls:
                assert len((await message(call))[1]) == len(item)
        codes = [(await status(call))[0] for call in calls]
        assert set(codes) == {_native.STATUS_OK}
        assert (await message(ends.call(method=_native.METHOD_STREAMING)))[1] == item


async def test_streams_that_nobody_reads_leave_room_for_calls(lane, tmp_path):
    item = bytes(64 * 1024)

    async def handler(call):
        if call.method == _native.METHOD_UNARY:
            return await echo(call)
        call.admit(True, 1)
        for _ in range(1000):
            if not call.send(_native.KIND_VALUE, item):
                await written(call)
        call.finish()

    async with endpoints(handler, lane, tmp_path) as ends:
        unread = ends.call(method=_native.METHOD_STREAMING)
        assert len((await message(unread))[1]) == len(item)
        for number in range(50):
            assert (await message(ends.call(b"%d" % number)))[1] == b"%d" % number
        unread.cancel()
