"""Networks that lose, delay, trickle and forget, played by a relay between the two ends."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from ray_serve_grpc import _native

from .endpoints import PATIENCE, echo, endpoints, message, status, until
from .relay import Relay

MIB = 1 << 20

#: Seconds: a peer that says nothing is given up after the two of them.
QUICK = {"keepalive_interval": 0.2, "keepalive_timeout": 0.5}


@contextlib.asynccontextmanager
async def relayed(tmp_path, handler=echo, **options):
    async with endpoints(handler, "tcp", tmp_path) as ends, Relay(ends.server.port) as relay:
        channel = _native.Channel([f"tcp:127.0.0.1:{relay.port}"], **{**QUICK, **options})
        try:
            yield channel, relay
        finally:
            channel.close()


def call(channel, body):
    return channel.call(_native.METHOD_UNARY, (), b"", body, ())


@pytest.mark.parametrize("way", ["there", "back"])
async def test_a_network_that_loses_one_way_is_noticed_and_left(tmp_path, way):
    async with relayed(tmp_path) as (channel, relay):
        assert (await message(call(channel, b"before")))[1] == b"before"
        getattr(relay, way).lossy = True
        lost = call(channel, b"lost")
        code, text = await status(lost)
        assert code == _native.STATUS_UNAVAILABLE
        assert lost.admission() is None
        assert text
        getattr(relay, way).lossy = False
        assert (await message(call(channel, b"after")))[1] == b"after"


async def test_a_middle_that_forgot_an_idle_connection_is_noticed_before_the_next_call(tmp_path):
    async with relayed(tmp_path) as (channel, relay):
        assert (await message(call(channel, b"before")))[1] == b"before"
        relay.forget()
        await until(lambda: channel.lane == "")
        assert (await message(call(channel, b"after")))[1] == b"after"
        assert relay.accepted == 2


async def test_a_call_into_a_middle_that_just_forgot_fails_and_the_next_one_works(tmp_path):
    async with relayed(tmp_path) as (channel, relay):
        assert (await message(call(channel, b"before")))[1] == b"before"
        relay.forget()
        assert (await status(call(channel, b"lost")))[0] == _native.STATUS_UNAVAILABLE
        assert (await message(call(channel, b"after")))[1] == b"after"


async def test_calls_over_a_long_way_overlap(tmp_path):
    async with relayed(tmp_path, keepalive_timeout=5.0) as (channel, relay):
        relay.there.delay = relay.back.delay = 0.2
        began = asyncio.get_running_loop().time()
        calls = [call(channel, b"%d" % number) for number in range(50)]
        bodies = [(await message(ongoing))[1] for ongoing in calls]
        assert bodies == [b"%d" % number for number in range(50)]
        assert asyncio.get_running_loop().time() - began < 50 * 0.4
        assert bytes((await message(call(channel, b"x" * MIB)))[1]) == b"x" * MIB


@pytest.mark.parametrize("way", ["there", "back"])
async def test_a_network_that_trickles_is_slow_and_not_dead(tmp_path, way):
    """The answer to a ping waits for all that is under way, which shows that the peer lives."""
    async with relayed(tmp_path, keepalive_timeout=2.0) as (channel, relay):
        assert (await message(call(channel, b"before")))[1] == b"before"
        getattr(relay, way).rate = 4 * MIB
        # Three seconds; the system's buffers, from which nothing is heard, hold one of them.
        body = bytes(12 * MIB)
        assert len((await message(call(channel, body)))[1]) == len(body)
        assert relay.accepted == 1


async def test_calls_that_wait_on_a_frozen_way_go_on_when_it_thaws_in_time(tmp_path):
    async with relayed(tmp_path, keepalive_timeout=PATIENCE) as (channel, relay):
        assert (await message(call(channel, b"before")))[1] == b"before"
        relay.freeze()
        ongoing = [call(channel, b"%d" % number) for number in range(10)]
        await asyncio.sleep(0.5)
        relay.thaw()
        assert [(await message(each))[1] for each in ongoing] == [b"%d" % number for number in range(10)]
        assert relay.accepted == 1
