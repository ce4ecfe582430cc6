"""Ray's ASGIService by grpc.aio alone: what a process without the plugin speaks."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from .certificates import Credentials

METHODS = (
    "HandleRequest",
    "HandleRequestStreaming",
    "HandleRequestWithRejection",
    "HandleRequestWithRejectionStreaming",
)


def field(number: int, value: bytes) -> bytes:
    length, size = bytearray(), len(value)
    while size >= 0x80:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes([number << 3 | 2]) + bytes(length) + value if value else b""


def request(metadata: bytes, args: bytes, kwargs: bytes = b"") -> bytes:
    """An ASGIRequest."""
    return field(1, metadata) + field(2, args) + field(3, kwargs)


def fields_of(message: bytes) -> dict[int, Any]:
    """The fields of a message with short and long strings and small integers, whatever they mean."""
    found: dict[int, Any] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        tag = varint()
        value: Any = varint()
        if tag & 7 == 2:
            value, at = message[at : at + value], at + value
        found[tag >> 3] = value
    return found


async def call_stock(
    port: int,
    args: bytes,
    *,
    method: str = "HandleRequest",
    tls: Credentials | None = None,
    metadata: tuple[tuple[str, str], ...] = (),
) -> tuple[bytes, bool]:
    """(serialized_message, is_error) of a unary call."""
    address = f"127.0.0.1:{port}"
    if tls is None:
        channel = grpc.aio.insecure_channel(address)
    else:
        certificate, key, authorities = tls
        channel = grpc.aio.secure_channel(
            address, grpc.ssl_channel_credentials(authorities, private_key=key, certificate_chain=certificate)
        )
    async with channel:
        answer = await channel.unary_unary(f"/ray.serve.ASGIService/{method}")(
            request(b"metadata", args), timeout=20, metadata=metadata
        )
        found = fields_of(answer)
        return found.get(1, b""), bool(found.get(2, 0))


class StockServer:
    """Answers each call with its args; with `hold`, unary calls never."""

    def __init__(
        self, *, tls: Credentials | None = None, options: tuple[tuple[str, int], ...] = (), hold: bool = False
    ) -> None:
        self.tls = tls
        self.options = options
        self.hold = hold
        self.begun = asyncio.Event()
        self.calls: list[str] = []

    async def __aenter__(self) -> StockServer:
        self.server = grpc.aio.server(options=self.options)
        handlers = {}
        for name in METHODS:
            if name.endswith("Streaming"):
                handlers[name] = grpc.unary_stream_rpc_method_handler(self.stream(name))
            else:
                handlers[name] = grpc.unary_unary_rpc_method_handler(self.unary(name))
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ray.serve.ASGIService", handlers),))
        if self.tls is None:
            self.port = self.server.add_insecure_port("127.0.0.1:0")
        else:
            certificate, key, authorities = self.tls
            credentials = grpc.ssl_server_credentials(
                [(key, certificate)], root_certificates=authorities, require_client_auth=True
            )
            self.port = self.server.add_secure_port("127.0.0.1:0", credentials)
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(0)

    def unary(self, name: str) -> Any:
        async def handle(body: bytes, context: grpc.aio.ServicerContext) -> bytes:
            self.calls.append(name)
            if "Rejection" in name:
                await context.send_initial_metadata((("accepted", "1"), ("num_ongoing_requests", "3")))
            if self.hold:
                self.begun.set()
                await asyncio.Event().wait()
            return field(1, fields_of(body).get(2, b""))

        return handle

    def stream(self, name: str) -> Any:
        async def handle(body: bytes, context: grpc.aio.ServicerContext) -> Any:
            self.calls.append(name)
            if "Rejection" in name:
                await context.send_initial_metadata((("accepted", "1"), ("num_ongoing_requests", "3")))
            for byte in fields_of(body).get(2, b""):
                yield field(1, bytes([byte]))

        return handle
