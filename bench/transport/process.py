"""Child process: one side of a peer.

Usage: python -m bench.transport.process FD SIDE PEER FOLDER LOOP, with SIDE "server" or "client", and LOOP "asyncio"
or "uvloop". A server says its process id when it serves; a client is then told what to measure.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench import children, load, payloads
from bench.samples import Sample
from bench.transport.peers import peer
from bench.transport.peers.peer import Client


def main() -> None:
    descriptor, side, name, folder, loop = sys.argv[1:]
    if loop == "uvloop":
        import uvloop

        factory: Any = uvloop.new_event_loop
    else:
        factory = None
    with children.connected(int(descriptor)) as connection, asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(connection, name, folder) if side == "server" else measure(connection, name, folder))


async def serve(connection: Any, name: str, folder: str) -> None:
    kept = await peer(name).serve(Path(folder))
    connection.send((True, os.getpid()))
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(connection.fileno(), ended.set)
    await ended.wait()
    del kept
    # A server with calls under way would be waited for; nobody waits for their answers.
    os._exit(0)


async def measure(connection: Any, name: str, folder: str) -> None:
    loop = asyncio.get_running_loop()
    client = await peer(name).connect(Path(folder))
    connection.send((True, os.getpid()))
    while True:
        # In a thread: a bare socket's client must go on reading meanwhile.
        method, arguments = await loop.run_in_executor(None, connection.recv)
        try:
            answer: tuple[bool, Any] = True, await _METHODS[method](client, *arguments)
        except Exception as error:
            answer = False, f"{type(error).__name__}: {error}"
        connection.send(answer)


async def calls(
    client: Client, server: int, kind: str, size: int, in_flight: int, seconds: float, least: int
) -> Sample:
    return await load.echo_calls(client.echo, payloads.make(kind, size), in_flight, seconds, least, _roles(server))


async def streams(client: Client, server: int, streams: int, count: int) -> Sample:
    return await load.item_streams(lambda: client.stream(count), streams, count, _roles(server))


def _roles(server: int) -> dict[str, list[int]]:
    return {"client": [os.getpid()], "server": [server]}


_METHODS: dict[str, Callable[..., Awaitable[Sample]]] = {"calls": calls, "streams": streams}

if __name__ == "__main__":
    main()
