"""pyzmq over a Unix socket, with out-of-band buffers as frames of their own that are not copied in Python."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from bench.transport.peers.peer import ITEM, Client, Peer

_ECHO, _ITEMS, _END = b"e", b"i", b"."
#: Frames below this are copied: that is cheaper than to track when they were sent.
_COPIED = 64 * 1024


def _dumps(value: Any) -> list[Any]:
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(value, 5, buffer_callback=buffers.append)
    return [body, *(buffer.raw() for buffer in buffers)]


def _loads(frames: Sequence[zmq.Frame]) -> Any:
    body, *buffers = (frame.buffer for frame in frames)
    return pickle.loads(body, buffers=buffers)


def _socket(kind: int) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(kind)
    socket.copy_threshold = _COPIED
    # Without bounds: a ROUTER drops what goes over them.
    socket.set_hwm(0)
    return socket


class _Server:
    def __init__(self, folder: Path) -> None:
        self._socket = _socket(zmq.ROUTER)
        self._socket.bind(f"ipc://{folder / 'socket'}")
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            client, number, kind, *frames = await self._socket.recv_multipart(copy=False)
            if kind.bytes == _ITEMS:
                task = asyncio.create_task(self._items(client, number, _loads(frames)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                answer = _dumps(_loads(frames))
                await self._socket.send_multipart([client, number, _ECHO, *answer], copy=False)

    async def _items(self, client: zmq.Frame, number: zmq.Frame, count: int) -> None:
        for _ in range(count):
            await self._socket.send_multipart([client, number, _ITEMS, *_dumps(ITEM)], copy=False)
        await self._socket.send_multipart([client, number, _END], copy=False)


class _Client(Client):
    def __init__(self, folder: Path) -> None:
        self._socket = _socket(zmq.DEALER)
        self._socket.connect(f"ipc://{folder / 'socket'}")
        self._numbers = itertools.count()
        self._waiting: dict[bytes, asyncio.Queue[list[zmq.Frame]]] = {}
        self._running = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        while True:
            number, *frames = await self._socket.recv_multipart(copy=False)
            self._waiting[number.bytes].put_nowait(frames)

    async def _send(self, kind: bytes, value: Any) -> tuple[bytes, asyncio.Queue[list[zmq.Frame]]]:
        number = next(self._numbers).to_bytes(8, "little")
        answers: asyncio.Queue[list[zmq.Frame]] = asyncio.Queue()
        self._waiting[number] = answers
        await self._socket.send_multipart([number, kind, *_dumps(value)], copy=False)
        return number, answers

    async def echo(self, value: Any) -> Any:
        number, answers = await self._send(_ECHO, value)
        _, *frames = await answers.get()
        del self._waiting[number]
        return _loads(frames)

    async def stream(self, count: int) -> AsyncIterator[Any]:
        number, answers = await self._send(_ITEMS, count)
        while True:
            kind, *frames = await answers.get()
            if kind.bytes == _END:
                break
            yield _loads(frames)
        del self._waiting[number]


class ZmqPickle(Peer):
    async def serve(self, folder: Path) -> object:
        return _Server(folder)

    async def connect(self, folder: Path) -> Client:
        return _Client(folder)
