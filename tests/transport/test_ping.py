"""A ping: a round trip that no handler sees."""

from __future__ import annotations

import asyncio
import functools
import socket
from pathlib import Path
from typing import Any

import pytest

from ray_serve_grpc import _native

from .endpoints import endpoints


async def nobody(call: _native.ServerCall) -> None:
    raise AssertionError("a ping is no call")


async def ping(channel: _native.Channel, timeout: float = 10.0) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, functools.partial(channel.ping, timeout))


async def test_it_tells_the_lane_the_version_and_shared_memory(lane: str, tmp_path: Path) -> None:
    async with endpoints(nobody, lane, tmp_path, version="1.2.3") as ends:
        for _ in range(3):
            seconds, carried, version, shared = await ping(ends.channel)
            assert 0 < seconds < 10
            assert (carried, version, shared) == ("tcp" if lane == "tcp" else "unix", "1.2.3", lane == "shm")
        assert not ends.tasks


async def test_a_peer_that_is_gone_is_an_error_that_says_so(lane: str, tmp_path: Path) -> None:
    async with endpoints(nobody, lane, tmp_path) as ends:
        ends.server.close()
        with pytest.raises(ConnectionError, match="cannot connect to"):
            await ping(ends.channel)


async def test_a_wrong_token_is_an_error_that_says_so(lane: str, tmp_path: Path) -> None:
    options = {"authorization": "Bearer right", "channel_authorization": "Bearer wrong"}
    async with endpoints(nobody, lane, tmp_path, **options) as ends:
        with pytest.raises(ConnectionError, match=r"token|authori"):
            await ping(ends.channel)


async def test_no_answer_in_time_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        channel = _native.Channel([f"tcp:127.0.0.1:{silent.getsockname()[1]}"])
        with pytest.raises(ConnectionError, match="no answer within"):
            await ping(channel, 0.2)
        channel.close()
