"""The admission reaches the caller before user code starts, also if the replica dies in its first instruction."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap

import pytest

from ray_serve_grpc import _native
from ray_serve_grpc.bridge import TurnFlush, bridge_for

from .endpoints import PATIENCE, SHM_LIMIT, admission, echo, endpoints, message, status

REPLICA = """
    import asyncio, os, signal, sys
    from ray_serve_grpc import _native
    from ray_serve_grpc.bridge import bridge_for
    _native.set_shm_limit(int(sys.argv[2]))
    async def serve(call):
        call.admit(True, 3, False)
        if not call.admission_safe:
            future = asyncio.get_running_loop().create_future()
            call.watch_admission_safe(bridge_for(future.get_loop()), future)
            await future
        os.kill(os.getpid(), signal.SIGKILL)
    def on_call(call):
        tasks.append(asyncio.get_running_loop().create_task(serve(call)))
    async def main():
        bridge = bridge_for(asyncio.get_running_loop())
        server = _native.Server(bridge, on_call, host="127.0.0.1", unix_path=sys.argv[1])
        print(server.port, flush=True)
        await asyncio.Event().wait()
    tasks = []
    asyncio.run(main())
"""


@pytest.mark.parametrize("attempt", range(5))
async def test_a_call_that_kills_its_replica_at_once_counts_as_taken(lane, tmp_path, attempt):
    limit = SHM_LIMIT if lane == "shm" else 0
    _native.set_shm_limit(limit)
    path = str(tmp_path / "replica.sock")
    command = [sys.executable, "-c", textwrap.dedent(REPLICA), path, str(limit)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        port = int(await asyncio.to_thread(process.stdout.readline))
        channel = _native.Channel([f"tcp:127.0.0.1:{port}" if lane == "tcp" else f"unix:{path}"])
        call = channel.call(_native.METHOD_UNARY_REJECTION, (), b"", b"", ())
        admitted = await admission(call)
        code, _ = await status(call)
        process.wait()
    assert code == _native.STATUS_UNAVAILABLE
    assert admitted is not None
    assert admitted[0] is True


async def test_an_admission_is_safe_at_once_where_the_caller_can_look_it_up(lane, tmp_path):
    safe_at_once = []
    go_on = asyncio.Event()

    async def handler(call):
        call.admit(True, 1, False)
        safe_at_once.append(call.admission_safe)
        future = asyncio.get_running_loop().create_future()
        call.watch_admission_safe(bridge_for(future.get_loop()), future)
        call.flush()
        await asyncio.wait_for(future, PATIENCE)
        assert call.admission_safe
        await go_on.wait()
        call.finish()

    async with endpoints(handler, lane, tmp_path) as ends:
        call = ends.call(method=_native.METHOD_UNARY_REJECTION)
        assert await admission(call) == (True, 1)
        go_on.set()
        await status(call)
    if lane == "shm":
        assert safe_at_once == [True]


async def test_the_admission_of_a_slow_call_does_not_wait_for_its_end(lane, tmp_path):
    go_on = asyncio.Event()

    async def handler(call):
        call.admit(True, 1)
        await go_on.wait()
        call.finish()

    async with endpoints(handler, lane, tmp_path) as ends:
        call = ends.call()
        assert await admission(call) == (True, 1)
        assert call.status() is None
        go_on.set()


async def test_calls_of_one_turn_are_sent_at_its_end(lane, tmp_path):
    async with endpoints(echo, lane, tmp_path) as ends:
        await message(ends.call(b"connects"))
        turn = TurnFlush(asyncio.get_running_loop())
        calls = []
        for n in range(10):
            calls.append(ends.channel.call(0, (), b"", b"%d" % n, (), False))
            turn.add(ends.channel)
        assert [(await message(call))[1] for call in calls] == [b"%d" % n for n in range(10)]


async def test_a_call_that_was_cancelled_before_it_was_flushed_is_not_sent(lane, tmp_path):
    bodies = []

    async def handler(call):
        bodies.append(call.body)
        await echo(call)

    async with endpoints(handler, lane, tmp_path) as ends:
        await message(ends.call(b"first"))
        queued = ends.channel.call(0, (), b"", b"cancelled", (), False)
        queued.cancel()
        ends.channel.flush()
        await message(ends.call(b"last"))
        assert (await status(queued))[0] == _native.STATUS_CANCELLED
    assert bodies == [b"first", b"last"]


async def test_words_for_admissions_are_used_again(lane, tmp_path):
    """More calls than there are words."""
    async with endpoints(echo, lane, tmp_path) as ends:
        for _ in range(50):
            calls = [ends.call(method=_native.METHOD_UNARY_REJECTION) for _ in range(100)]
            assert [await admission(call) for call in calls] == [(True, 1)] * 100
