"""A call that its caller gave up before it was taken does not run: not even in a replica that was stopped meanwhile.

Where the two ends share no memory, a replica cannot know: see docs/reliability.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ray_serve_grpc import _native

from .endpoints import SHM_LIMIT, admission, endpoints, message, status, until

UNARY = _native.METHOD_UNARY_REJECTION
METHODS = [_native.METHOD_UNARY, _native.METHOD_STREAMING, UNARY, _native.METHOD_STREAMING_REJECTION]

#: A replica that takes calls as it is told to on its standard input. A call of "kept" is taken when it says "take", any
#: other one as soon as it comes. Each line that it prints is an event.
REPLICA = """
    import asyncio, sys, threading
    from ray_serve_grpc import _native
    from ray_serve_grpc.bridge import bridge_for
    _native.set_shm_limit(int(sys.argv[2]))
    kept = []
    def say(*words):
        print(*words, flush=True)
    def take(call):
        with_rejection = call.method in (_native.METHOD_UNARY_REJECTION, _native.METHOD_STREAMING_REJECTION)
        taken = call.admit(True, 1, False) if with_rejection else call.claim()
        say("runs" if taken else "given up")
        return taken
    def on_call(call):
        if call.body == b"kept":
            kept.append(call)
            say("has it")
        elif take(call):
            call.send(0, call.body)
            call.finish()
    def told(word):
        if word == "take":
            take(kept[-1])
        if word == "count":
            say(_native.statistics()["server_calls_revoked"])
    async def main():
        loop = asyncio.get_running_loop()
        server = _native.Server(bridge_for(loop), on_call, host="127.0.0.1", unix_path=sys.argv[1])
        say("serves")
        while word := await asyncio.to_thread(sys.stdin.readline):
            told(word.strip())
    asyncio.run(main())
"""


class Replica:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    async def says(self) -> str:
        return (await asyncio.to_thread(self._process.stdout.readline)).strip()  # type: ignore[union-attr]

    async def does(self, word: str) -> str:
        self._process.stdin.write(f"{word}\n")  # type: ignore[union-attr]
        self._process.stdin.flush()  # type: ignore[union-attr]
        return await self.says()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)


@contextlib.asynccontextmanager
async def replica(folder: Path) -> AsyncIterator[tuple[Replica, Any]]:
    """A replica in a process of its own, and a channel to it that shares memory and is soon out of patience."""
    _native.set_shm_limit(SHM_LIMIT)
    path = str(folder / "replica.sock")
    command = [sys.executable, "-c", textwrap.dedent(REPLICA), path, str(SHM_LIMIT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            it = Replica(process)
            assert await it.says() == "serves"
            channel = _native.Channel([f"unix:{path}"], keepalive_interval=0.2, keepalive_timeout=1.0)
            assert await message(channel.call(UNARY, (), b"", b"hello", ())) is not None
            assert await it.says() == "runs"
            yield it, channel
        finally:
            process.kill()


@pytest.mark.parametrize("method", METHODS)
async def test_a_call_that_was_given_up_is_not_run_by_a_replica_that_held_it(tmp_path, method):
    async with replica(tmp_path) as (it, channel):
        call = channel.call(method, (), b"", b"kept", ())
        assert await it.says() == "has it"
        it.stop()
        code, _ = await status(call)
        assert (code, call.admission()) == (_native.STATUS_UNAVAILABLE, None)
        it.go_on()
        assert await it.does("take") == "given up"
        assert await it.does("count") == "1"


@pytest.mark.parametrize("method", METHODS)
async def test_a_call_that_was_taken_before_its_replica_was_stopped_is_not_tried_again(tmp_path, method):
    async with replica(tmp_path) as (it, channel):
        call = channel.call(method, (), b"", b"kept", ())
        assert await it.says() == "has it"
        assert await it.does("take") == "runs"
        it.stop()
        code, _ = await status(call)
        assert (code, call.admission()) == (_native.STATUS_UNAVAILABLE, (True, 1))


async def test_calls_that_lay_in_the_socket_of_a_stopped_replica_do_not_run(tmp_path):
    async with replica(tmp_path) as (it, channel):
        for _ in range(3):
            it.stop()
            calls = [channel.call(METHODS[n % 4], (), b"", b"lies in the socket", ()) for n in range(40)]
            assert {(await status(call))[0] for call in calls} == {_native.STATUS_UNAVAILABLE}
            assert {call.admission() for call in calls} == {None}
            it.go_on()
            again = channel.call(UNARY, (), b"", b"by another connection", ())
            assert await message(again) is not None
        said = [await it.does("count")]
        while not said[-1].isdigit():
            said.append(await it.says())
        assert said.count("runs") == 3


async def test_a_word_that_serves_another_call_is_not_taken_for_the_one_that_was_given_up(tmp_path):
    came: list[_native.ServerCall] = []

    async def handler(call: _native.ServerCall) -> None:
        came.append(call)

    async with endpoints(handler, "shm", tmp_path) as ends:
        given_up = ends.call(method=UNARY)
        await until(lambda: len(came) == 1)
        given_up.cancel()
        await until(lambda: came[0].cancelled)
        # The word that was used last is the first to be used again.
        calls = [ends.call(method=UNARY) for _ in range(3)]
        await until(lambda: len(came) == 4)
        assert came[0].admit(True, 1) is False
        assert [call.admit(True, 1) for call in came[1:]] == [True] * 3
        assert [await admission(call) for call in calls] == [(True, 1)] * 3


async def test_a_replica_takes_a_call_once_and_for_all(lane, tmp_path):
    taken = []

    async def handler(call: _native.ServerCall) -> None:
        taken.extend([call.claim(), call.claim(), call.admit(True, 1)])
        call.finish()

    async with endpoints(handler, lane, tmp_path) as ends:
        assert await admission(ends.call(method=UNARY)) == (True, 1)
    assert taken == [True] * 3
