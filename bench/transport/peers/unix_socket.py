"""asyncio streams over a Unix socket: a length, a number, a pickle. As little as an echo can be."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from bench.transport.peers.peer import ITEM, Client, Peer

_HEAD = struct.Struct("<QQB")  # length, number of the call, kind
_ECHO, _ITEMS, _END = range(3)
_LIMIT = 2**24  # of what a reader holds before it stops reading


async def _receive(reader: asyncio.StreamReader) -> tuple[int, int, Any]:
    """(number, kind, value)"""
    length, number, kind = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    return number, kind, pickle.loads(await reader.readexactly(length)) if length else None


def _send(writer: asyncio.StreamWriter, number: int, kind: int, value: Any = None) -> None:
    body = b"" if value is None else pickle.dumps(value, 5)
    head = _HEAD.pack(len(body), number, kind)
    if len(body) < 65_536:
        writer.write(head + body)
    else:
        writer.writelines((head, body))


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    tasks = set()
    while True:
        try:
            number, kind, value = await _receive(reader)
        except asyncio.IncompleteReadError:
            return
        if kind == _ECHO:
            _send(writer, number, _ECHO, value)
            await writer.drain()
        else:
            task = asyncio.create_task(_items(writer, number, value))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


async def _items(writer: asyncio.StreamWriter, number: int, count: int) -> None:
    for _ in range(count):
        _send(writer, number, _ITEMS, ITEM)
        await writer.drain()
    _send(writer, number, _END)


class _Client(Client):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[int, asyncio.Queue[tuple[int, Any]]] = {}
        self._running = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            number, kind, value = await _receive(self._reader)
            if kind == _ECHO:
                self._answers.pop(number).set_result(value)
            else:
                self._streams[number].put_nowait((kind, value))

    async def echo(self, value: Any) -> Any:
        number = next(self._numbers)
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        _send(self._writer, number, _ECHO, value)
        await self._writer.drain()
        return await answer

    async def stream(self, count: int) -> AsyncIterator[Any]:
        number = next(self._numbers)
        items: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._streams[number] = items
        _send(self._writer, number, _ITEMS, count)
        while True:
            kind, value = await items.get()
            if kind == _END:
                break
            yield value
        del self._streams[number]


class UnixSocket(Peer):
    async def serve(self, folder: Path) -> object:
        return await asyncio.start_unix_server(_serve, folder / "socket", limit=_LIMIT)

    async def connect(self, folder: Path) -> Client:
        return _Client(*await asyncio.open_unix_connection(folder / "socket", limit=_LIMIT))
