"""A middle between two endpoints that can do to their bytes what a network does."""

from __future__ import annotations

import asyncio
import contextlib
import socket

#: bytes that may wait within the relay, for each direction
HELD = 64 * 1024


class Direction:
    """One way through the relay, for every connection of it."""

    def __init__(self) -> None:
        #: cleared: bytes wait, as on the way to a frozen peer
        self.open = asyncio.Event()
        self.open.set()
        #: bytes are taken and never arrive, as behind a packet filter
        self.lossy = False
        #: seconds that each piece is under way
        self.delay = 0.0
        #: bytes each second; 0: as fast as it goes
        self.rate = 0.0


class Relay:
    """Passes bytes on between a port of its own and `target`."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.there = Direction()
        self.back = Direction()
        self.accepted = 0
        self._forgotten = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._links: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=HELD)
        for listener in self._server.sockets:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, HELD)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links:
            link.transport.abort()

    def freeze(self) -> None:
        self.there.open.clear()
        self.back.open.clear()

    def thaw(self) -> None:
        self.there.open.set()
        self.back.open.set()

    def forget(self) -> None:
        """What was connected stays so in the eyes of both ends, and nothing of it arrives any more."""
        self._forgotten = self.accepted

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        number = self.accepted
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target, limit=HELD)
        far_writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, HELD)
        self._links += [writer, far_writer]
        for way, source, sink in ((self.there, reader, far_writer), (self.back, far_reader, writer)):
            task = asyncio.ensure_future(self._copy(number, way, source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(
        self, number: int, way: Direction, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        loop = asyncio.get_running_loop()
        sink.transport.set_write_buffer_limits(HELD)
        with contextlib.suppress(OSError):
            while data := await source.read(HELD if not way.rate else 4096):
                await way.open.wait()
                if way.lossy or number <= self._forgotten:
                    continue
                if way.rate:
                    await asyncio.sleep(len(data) / way.rate)
                if way.delay:
                    loop.call_later(way.delay, sink.write, data)
                else:
                    sink.write(data)
                    await sink.drain()
        if number > self._forgotten and not way.lossy:
            sink.close()
