"""TLS on TCP: who is let in, who is not, and what each side is told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

import grpc
import pytest
from cryptography import x509

from ray_serve_grpc import _native
from ray_serve_grpc.bridge import bridge_for

from .certificates import DAY, Authority, self_signed
from .endpoints import PATIENCE, echo, endpoints, message, status, until
from .stock import StockServer, call_stock

RAY_STYLE = [x509.DNSName("127.0.0.1"), x509.DNSName("localhost")]


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def credentials(authority):
    return authority.credentials()


@pytest.fixture(scope="module")
def others():
    return Authority("somebody else").credentials()


async def outcome(ends) -> tuple[int, str]:
    return await status(ends.call(b"x"))


@pytest.mark.parametrize("size", [1, 100_000, 20 << 20])
async def test_messages_of_any_size_pass(credentials, tmp_path, size):
    async with endpoints(echo, "tcp", tmp_path, tls=credentials, channel_tls=credentials) as ends:
        body = bytes(range(256)) * (size // 256 + 1)
        kind, received, buffers = await message(ends.call(body[:size], (bytearray(body),)))
        assert (kind, bytes(received)) == (0, body[:size])
        assert bytes(buffers[0]) == body
        assert ends.channel.lane == "tcp"


async def test_the_unix_socket_stays_plain(credentials, tmp_path):
    async with endpoints(echo, "unix", tmp_path, tls=credentials, channel_tls=credentials) as ends:
        assert (await message(ends.call(b"in")))[1] == b"in"
        assert ends.channel.lane == "unix"


async def test_the_form_of_rays_own_self_signed_certificate_is_accepted(tmp_path):
    """It has the node's address among its DNS names, which grpc accepts."""
    credentials = self_signed(RAY_STYLE)
    async with endpoints(echo, "tcp", tmp_path, tls=credentials, channel_tls=credentials) as ends:
        assert (await message(ends.call(b"in")))[1] == b"in"


async def test_the_token_is_asked_for_as_well(credentials, tmp_path):
    options = {"tls": credentials, "channel_tls": credentials, "authorization": "Bearer secret"}
    async with endpoints(echo, "tcp", tmp_path, **options) as ends:
        assert (await outcome(ends))[0] == _native.STATUS_UNAUTHENTICATED
    async with endpoints(echo, "tcp", tmp_path, **options, channel_authorization="Bearer secret") as ends:
        assert (await outcome(ends))[0] == _native.STATUS_OK


async def refused(tmp_path, server, channel, code=_native.STATUS_UNAUTHENTICATED) -> str:
    """The text that the caller gets: no reason to ask again. The handler is never run."""
    handled = []

    async def handler(call):
        handled.append(call)

    async with endpoints(handler, "tcp", tmp_path, tls=server, channel_tls=channel) as ends:
        call = ends.call(b"x")
        ended, text = await status(call)
        assert (ended, call.sent, handled) == (code, False, [])
    return text


async def test_a_plain_text_caller_is_refused(credentials, tmp_path):
    await refused(tmp_path, credentials, None, _native.STATUS_UNAVAILABLE)


async def test_a_plain_text_server_is_refused(credentials, tmp_path):
    assert "TLS" in await refused(tmp_path, None, credentials)


async def test_a_server_of_another_authority_is_refused(credentials, others, tmp_path):
    own = (*credentials[:2], credentials[2] + others[2])
    assert "UnknownIssuer" in await refused(tmp_path, (*others[:2], own[2]), credentials)


async def test_a_caller_of_another_authority_is_refused(credentials, others, tmp_path):
    trusting = (*others[:2], credentials[2])
    await refused(tmp_path, credentials, trusting)


async def test_a_caller_without_a_certificate_is_refused(credentials, tmp_path):
    context = ssl.create_default_context(cadata=credentials[2].decode())
    context.set_alpn_protocols(["h2"])
    async with endpoints(echo, "tcp", tmp_path, tls=credentials) as ends:
        reader, writer = await asyncio.open_connection("127.0.0.1", ends.server.port, ssl=context)
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            # TLS 1.3 lets the client finish its half before the server looks at it.
            await asyncio.wait_for(reader.read(1 << 16), PATIENCE)
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_without_an_authority_callers_need_no_certificate(credentials, tmp_path):
    context = ssl.create_default_context(cadata=credentials[2].decode())
    context.set_alpn_protocols(["h2"])
    async with endpoints(echo, "tcp", tmp_path, tls=(*credentials[:2], b"")) as ends:
        reader, writer = await asyncio.open_connection("127.0.0.1", ends.server.port, ssl=context)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        assert await asyncio.wait_for(reader.readexactly(9), PATIENCE)
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_a_certificate_for_another_address_is_refused(authority, credentials, tmp_path):
    elsewhere = authority.credentials([x509.DNSName("10.9.8.7"), x509.DNSName("node.elsewhere")])
    text = await refused(tmp_path, elsewhere, credentials)
    assert "not valid for name" in text


@pytest.mark.parametrize("expired", ["server", "caller"])
async def test_an_expired_certificate_is_refused(authority, credentials, tmp_path, expired):
    old = authority.credentials(lifetime=-DAY)
    text = await refused(tmp_path, *((old, credentials) if expired == "server" else (credentials, old)))
    assert "expired" in text.lower()


async def test_certificates_rotate_one_side_after_the_other(tmp_path):
    """The next authority is trusted by both sides first; then each takes its new certificate."""
    before, after = Authority("before"), Authority("after")
    both = before.pem + after.pem
    old, new = before.credentials(trusts=both), after.credentials(trusts=both)
    for server, channel in [(old, old), (new, old), (old, new), (new, new)]:
        async with endpoints(echo, "tcp", tmp_path, tls=server, channel_tls=channel) as ends:
            assert (await message(ends.call(b"in")))[1] == b"in"


async def test_a_channel_finds_the_same_port_with_a_rotated_certificate(authority, credentials, tmp_path):
    async with endpoints(echo, "tcp", tmp_path, tls=credentials, channel_tls=credentials) as ends:
        assert (await outcome(ends))[0] == _native.STATUS_OK
        port = ends.server.port
        await ends.stop()
        loop = asyncio.get_running_loop()
        rotated = _native.Server(
            bridge_for(loop),
            lambda call: loop.create_task(echo(call)),
            host="127.0.0.1",
            port=port,
            tls=authority.credentials(),
        )
        assert (await outcome(ends))[0] == _native.STATUS_OK
        rotated.close()


async def test_failed_handshakes_are_counted_and_told(credentials, others, tmp_path):
    notices = []
    before = _native.statistics()["server_handshake_failures"]
    async with endpoints(echo, "tcp", tmp_path, tls=credentials, on_notice=notices.append) as ends:
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", ends.server.port)) as plain:
                plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100)
                await asyncio.to_thread(plain.recv, 100)
        await until(lambda: _native.statistics()["server_handshake_failures"] == before + 5)
    assert len(notices) == 1
    assert notices[0].startswith("1 connections failed in their TLS handshake; the last: tcp:127.0.0.1:")


@pytest.mark.parametrize("broken", [0, 1, 2])
async def test_credentials_that_cannot_be_used_are_an_error_that_does_not_show_them(credentials, broken):
    files = list(credentials)
    files[broken] = b"-----BEGIN NONSENSE-----\nhidden\n"
    with pytest.raises(ValueError, match=r"^tls: ") as error:
        _native.Channel(["tcp:127.0.0.1:1"], tls=tuple(files))
    assert "hidden" not in str(error.value)


async def test_a_key_of_another_certificate_is_an_error(credentials, others):
    with pytest.raises(ValueError, match="private key"):
        _native.Channel(["tcp:127.0.0.1:1"], tls=(credentials[0], others[1], credentials[2]))


# Peers without the plugin: grpc.aio, set up as Ray sets it up.


async def test_a_stock_caller_reaches_our_server(credentials, tmp_path):
    async with endpoints(echo_stock, "tcp", tmp_path, tls=credentials) as ends:
        assert await call_stock(ends.server.port, b"in", tls=credentials) == (b"in", False)


async def test_a_stock_caller_of_another_authority_is_refused(credentials, others, tmp_path):
    async with endpoints(echo_stock, "tcp", tmp_path, tls=credentials) as ends:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call_stock(ends.server.port, b"in", tls=(*others[:2], credentials[2]))
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_stock_server_is_reached_by_our_channel(credentials):
    async with StockServer(tls=credentials) as server:
        channel = _native.Channel([f"tcp:127.0.0.1:{server.port}"], tls=credentials)
        call = channel.call_stock(_native.METHOD_UNARY, (b"metadata", b"args", b"kwargs"))
        assert (await message(call))[:2] == (0, b"args")
        assert channel.dialect() == _native.DIALECT_STOCK


async def test_both_kinds_of_caller_hold_a_stock_server_to_the_same_names(authority, credentials):
    """What grpc accepts we accept, and the other way round."""
    for names, accepted in [
        (RAY_STYLE, True),
        ([x509.DNSName("localhost")], False),
        ([x509.DNSName("127.0.0.2")], False),
        ([x509.DNSName("*.0.0.1")], False),
    ]:
        async with StockServer(tls=authority.credentials(names)) as server:
            try:
                await call_stock(server.port, b"in", tls=credentials)
                stock = True
            except grpc.aio.AioRpcError:
                stock = False
            channel = _native.Channel([f"tcp:127.0.0.1:{server.port}"], tls=credentials)
            code, _ = await status(channel.call_stock(_native.METHOD_UNARY, (b"", b"in", b"")))
            assert (stock, code == _native.STATUS_OK) == (accepted, accepted), names


async def echo_stock(call):
    call.send(0, call.fields[1])
    call.finish()
