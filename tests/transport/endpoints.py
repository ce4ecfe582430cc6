"""Two endpoints in one process: a server whose handler is a coroutine, and a channel to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from ray_serve_grpc import _native
from ray_serve_grpc.bridge import bridge_for

#: bytes of shared memory on the lane "shm", which is a Unix-domain socket with shared memory beside it
SHM_LIMIT = 1 << 30

Handler = Callable[[_native.ServerCall], Awaitable[None]]

#: longest time that any single step of a test may take, seconds
PATIENCE = 20.0


class Endpoints:
    """A server and a channel on one lane. `handler` runs in a task of its own for each call."""

    def __init__(self, server: _native.Server, channel: _native.Channel, tasks: set[asyncio.Task[None]]) -> None:
        self.server = server
        self.channel = channel
        self.tasks = tasks

    def call(
        self,
        body: Any = b"",
        buffers: Any = (),
        *,
        method: int = _native.METHOD_UNARY,
        metadata: tuple[str, ...] = (),
        extra: bytes = b"",
    ) -> _native.Call:
        return self.channel.call(method, metadata, extra, body, buffers)

    async def stop(self, grace: float = PATIENCE) -> None:
        stopped = asyncio.get_running_loop().create_future()
        self.server.stop(grace, bridge_for(stopped.get_loop()), lambda: stopped.set_result(None))
        await asyncio.wait_for(stopped, PATIENCE)


@contextlib.asynccontextmanager
async def endpoints(handler: Handler, lane: str, folder: Path, **options: Any) -> AsyncIterator[Endpoints]:
    """`options` starting with `channel_` go to the channel, the others to both ends or to the server."""
    tasks: set[asyncio.Task[None]] = set()
    loop = asyncio.get_running_loop()

    def on_call(call: _native.ServerCall) -> None:
        task = loop.create_task(handler(call))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    channel_options = {k.removeprefix("channel_"): v for k, v in options.items() if k.startswith("channel_")}
    server_options = {k: v for k, v in options.items() if not k.startswith("channel_")}
    path = str(folder / "s.sock")
    _native.set_shm_limit(SHM_LIMIT if lane == "shm" else 0)
    server = _native.Server(bridge_for(loop), on_call, host="127.0.0.1", unix_path=path, **server_options)
    endpoint = f"unix:{path}" if lane != "tcp" else f"tcp:127.0.0.1:{server.port}"
    channel = _native.Channel([endpoint], **channel_options)
    try:
        yield Endpoints(server, channel, tasks)
    finally:
        channel.close()
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def socket_of(lane: str) -> str:
    """The lane that carries a call's HTTP/2 on `lane`."""
    return "tcp" if lane == "tcp" else "unix"


async def admission(call: _native.Call) -> tuple[bool, int] | None:
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    call.watch_admission(bridge_for(loop), future)
    await asyncio.wait_for(future, PATIENCE)
    return call.admission()


async def message(call: _native.Call) -> _native.Message | None:
    """The next message; None at the end."""
    taken = call.take()
    if taken is None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        call.watch_message(bridge_for(loop), future)
        await asyncio.wait_for(future, PATIENCE)
        taken = call.take()
    return taken


async def status(call: _native.Call) -> tuple[int, str]:
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    call.watch_done(bridge_for(loop), lambda: future.done() or future.set_result(None))
    await asyncio.wait_for(future, PATIENCE)
    ended = call.status()
    assert ended is not None
    return ended


async def written(call: _native.ServerCall) -> None:
    """Until there is room for another message."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    call.watch_writable(bridge_for(loop), future)
    await future


async def until(condition: Callable[[], bool]) -> None:
    """For what the I/O thread does without telling this loop."""

    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(poll(), PATIENCE)


async def echo(call: _native.ServerCall) -> None:
    call.admit(True, 1)
    call.send(_native.KIND_VALUE, call.body, call.buffers)
    call.finish()
