"""A server that shakes hands as it should, and then says what it is told to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from .raw_http2 import ACK, DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame, literal

#: An empty gRPC message: to a Handshake the answer of a replica without a name, to a call an empty value.
EMPTY = bytes(5)
HEAD = b"\x88" + literal(b"content-type", b"application/grpc")
TRAILERS = literal(b"grpc-status", b"0")

Answer = Callable[[int, asyncio.StreamWriter], Awaitable[None]]


def whole_answer(stream: int) -> bytes:
    """An empty message and the end."""
    return (
        frame(HEADERS, END_HEADERS, stream, HEAD)
        + frame(DATA, 0, stream, EMPTY)
        + frame(HEADERS, END_HEADERS | END_STREAM, stream, TRAILERS)
    )


@contextlib.asynccontextmanager
async def hostile_server(answer: Answer) -> AsyncIterator[int]:
    """Its port. `answer` is awaited for the stream of each call; what it writes is up to it."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.readexactly(len(PREFACE))
        writer.write(frame(SETTINGS))
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(head[:3], "big"))
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
                if kind == SETTINGS and not flags & ACK:
                    writer.write(frame(SETTINGS, ACK))
                elif kind in (DATA, HEADERS) and flags & END_STREAM:
                    if stream == 1:
                        writer.write(whole_answer(stream))
                    else:
                        await answer(stream, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.gather(*[writer.wait_closed() for writer in writers], return_exceptions=True)
