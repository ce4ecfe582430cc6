"""grpcio's asyncio server and client, and pygrpc-native's server in place of the former."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from bench.transport.peers.peer import ITEM, Client, Peer

_SERVICE = "bench.Echo"
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


async def _echo(request: bytes, context: Any) -> bytes:
    return pickle.dumps(pickle.loads(request), 5)


async def _items(request: bytes, context: Any) -> AsyncIterator[bytes]:
    for _ in range(pickle.loads(request)):
        yield pickle.dumps(ITEM, 5)


async def _start(server: Any, folder: Path) -> object:
    handlers = {
        "Echo": grpc.unary_unary_rpc_method_handler(_echo),
        "Items": grpc.unary_stream_rpc_method_handler(_items),
    }
    server.add_registered_method_handlers(_SERVICE, handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    (folder / "port").write_text(str(port))
    return server


class _Client(Client):
    def __init__(self, port: str) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS)
        self._echo = self._channel.unary_unary(f"/{_SERVICE}/Echo", _registered_method=True)
        self._items = self._channel.unary_stream(f"/{_SERVICE}/Items", _registered_method=True)

    async def echo(self, value: Any) -> Any:
        return pickle.loads(await self._echo(pickle.dumps(value, 5)))

    async def stream(self, count: int) -> AsyncIterator[Any]:
        async for item in self._items(pickle.dumps(count, 5)):
            yield pickle.loads(item)


class GrpcAio(Peer):
    async def serve(self, folder: Path) -> object:
        return await _start(grpc.aio.server(options=_OPTIONS), folder)

    async def connect(self, folder: Path) -> Client:
        return _Client((folder / "port").read_text())


class PygrpcNative(GrpcAio):
    async def serve(self, folder: Path) -> object:
        import pygrpc_native.aio

        return await _start(pygrpc_native.aio.server(options=_OPTIONS), folder)
