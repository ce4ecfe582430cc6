"""HTTP/2 byte by byte: what no well-behaved library would send."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import ClassVar, NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CALL_PATH = b"/ray_serve_grpc.v1.InterDeploymentService/HandleRequest"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS = 1, 1, 4
CANCEL, REFUSED_STREAM, ENHANCE_YOUR_CALM = 8, 7, 11


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header without indexing and without Huffman coding."""
    return b"\x00" + prefixed(len(name)) + name + prefixed(len(value)) + value


def prefixed(number: int) -> bytes:
    if number < 127:
        return bytes([number])
    out, number = bytearray([127]), number - 127
    while number >= 128:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes(out) + bytes([number])


def call_headers(token: str | None = None, more: Iterable[tuple[bytes, bytes]] = (), path: bytes = CALL_PATH) -> bytes:
    pairs = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        *((b"authorization", token.encode()) for token in [token] if token),
        *more,
    ]
    return b"".join(literal(name, value) for name, value in pairs)


class Attacker:
    """One connection, with the preface and empty settings sent unless told otherwise."""

    #: those whose connection was not given up yet
    everyone: ClassVar[list[Attacker]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.everyone.append(self)

    @classmethod
    async def connect(cls, port: int, first: bytes = PREFACE + frame(SETTINGS)) -> Attacker:
        attacker = cls(*await asyncio.open_connection("127.0.0.1", port))
        attacker.writer.write(first)
        return attacker

    async def granted(self) -> None:
        """Until the server has raised its window over the 64 KiB that HTTP/2 begins with."""
        while (found := await self.until(WINDOW_UPDATE)) is not None and found.stream:
            pass

    @classmethod
    async def give_up(cls) -> None:
        """Ends every connection."""
        attackers, cls.everyone[:] = cls.everyone.copy(), []
        for attacker in attackers:
            attacker.writer.transport.abort()
        await asyncio.gather(*[attacker.writer.wait_closed() for attacker in attackers], return_exceptions=True)

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    async def send_until_blocked(self, data: bytes, most: int, patience: float = 1.0) -> int:
        """Repeats `data` until `most` bytes are on their way, or the peer takes no more. Returns how many it were."""
        sent = 0
        try:
            while sent < most:
                self.writer.write(data)
                await asyncio.wait_for(self.writer.drain(), patience)
                sent += len(data)
        except (TimeoutError, asyncio.TimeoutError, OSError):
            pass
        return sent

    async def frame(self) -> Frame | None:
        """The next frame, None when the connection ended."""
        try:
            head = await self.reader.readexactly(9)
            payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
        except (asyncio.IncompleteReadError, OSError):
            return None
        return Frame(head[3], head[4], int.from_bytes(head[5:], "big"), payload)

    async def until(self, *kinds: int) -> Frame | None:
        """The next frame of one of these kinds."""
        while (found := await self.frame()) is not None:
            if found.kind in kinds:
                break
        return found

    async def closed(self) -> bytes:
        """What still comes until the server closes."""
        try:
            return await self.reader.read(-1)
        except OSError:
            return b""
