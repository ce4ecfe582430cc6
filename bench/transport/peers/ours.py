"""The Rust core, used the way that Serve's calls use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from bench.transport.peers.peer import ITEM, Client, Peer
from ray_serve_grpc import _native, lanes
from ray_serve_grpc.bridge import BURST, TurnFlush, bridge_for
from ray_serve_grpc.serializers import decode, encode
from ray_serve_grpc.server import AnswerFlush, ItemFlush


class _Server:
    def __init__(self, folder: Path, tls: _native.TLSCredentials | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._bridge = bridge_for(self._loop)
        self._answers = AnswerFlush(self._loop)
        path = str(folder / "socket")
        self._server = _native.Server(self._bridge, self._on_call, host="127.0.0.1", unix_path=path, tls=tls)
        (folder / "port").write_text(str(self._server.port))

    def _on_call(self, call: _native.ServerCall) -> None:
        self._answers.began()
        self._loop.create_task(self._serve(call))

    async def _serve(self, call: _native.ServerCall) -> None:
        value = decode(call.body, call.buffers)
        call.release()
        call.admit(True, 1, False)
        if call.method == _native.METHOD_STREAMING_REJECTION:
            await self._items(call, value)
        else:
            call.send(_native.KIND_VALUE, *encode(value))
        self._answers.finish(call)
        self._answers.ended()

    async def _items(self, call: _native.ServerCall, count: int) -> None:
        flush = ItemFlush(call, self._loop)
        for number in range(1, count + 1):
            if not call.send(_native.KIND_VALUE, *encode(ITEM), number == 1):
                call.flush()
                room = self._loop.create_future()
                call.watch_writable(self._bridge, room)
                await room
            elif number % BURST == 0:
                call.flush()
                await asyncio.sleep(0)
            else:
                flush.due()


class _Client(Client):
    def __init__(self, endpoint: str, tls: _native.TLSCredentials | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._bridge = bridge_for(self._loop)
        self._turn = TurnFlush(self._loop)
        self._channel = _native.Channel([endpoint], tls=tls)

    async def connected(self) -> Client:
        ready = self._loop.create_future()
        self._channel.watch_ready(self._bridge, lambda: ready.set_result(None))
        await ready
        if self._channel.failure() is not None:
            raise ConnectionError(self._channel.failure())
        return self

    async def echo(self, value: Any) -> Any:
        alone = self._channel.quiet
        call = self._channel.call(_native.METHOD_UNARY_REJECTION, (), b"", *encode(value), alone)
        if not alone:
            self._turn.add(self._channel)
        message = call.take()
        while message is None:
            await self._message(call)
            message = call.take()
        return decode(message[1], message[2])

    async def stream(self, count: int) -> AsyncIterator[Any]:
        call = self._channel.call(_native.METHOD_STREAMING_REJECTION, (), b"", *encode(count))
        while True:
            ended = call.status() is not None
            messages = call.take_all()
            for number, (_, body, buffers) in enumerate(messages, 1):
                yield decode(body, buffers)
                if number % BURST == 0:
                    await asyncio.sleep(0)
            if not messages:
                if ended:
                    return
                await self._message(call)

    async def _message(self, call: _native.Call) -> None:
        """Returns when one waits, or the call ended."""
        waiting = self._loop.create_future()
        call.watch_message(self._bridge, waiting)
        await waiting


class OverUnix(Peer):
    """As between replicas on one node, with shared memory for what is large."""

    async def serve(self, folder: Path) -> object:
        lanes.prepare()
        return _Server(folder)

    async def connect(self, folder: Path) -> Client:
        lanes.prepare()
        return await _Client(f"unix:{folder / 'socket'}").connected()


class OverTcp(OverUnix):
    """As between nodes."""

    async def connect(self, folder: Path) -> Client:
        return await _Client(f"tcp:127.0.0.1:{(folder / 'port').read_text()}").connected()


class OverTls(OverTcp):
    """As between nodes under `RAY_USE_TLS`: both sides show the certificate."""

    async def serve(self, folder: Path) -> object:
        from bench.transport.peers.certificate import self_signed

        certificate, key = self_signed("127.0.0.1")
        (folder / "certificate").write_bytes(certificate)
        (folder / "key").write_bytes(key)
        return _Server(folder, (certificate, key, certificate))

    async def connect(self, folder: Path) -> Client:
        certificate, key = (folder / "certificate").read_bytes(), (folder / "key").read_bytes()
        endpoint = f"tcp:127.0.0.1:{(folder / 'port').read_text()}"
        return await _Client(endpoint, (certificate, key, certificate)).connected()
