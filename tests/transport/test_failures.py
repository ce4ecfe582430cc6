"""What goes wrong between two endpoints, and what each side is told."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from ray_serve_grpc import _native
from ray_serve_grpc.bridge import bridge_for

from .endpoints import PATIENCE, echo, endpoints, message, status, until
from .relay import Relay

MIB = 1 << 20


async def test_nobody_listening_is_unavailable_and_was_not_sent(lane, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = f"unix:{tmp_path}/none.sock" if lane != "tcp" else f"tcp:127.0.0.1:{port}"
    channel = _native.Channel([endpoint])
    call = channel.call(0, (), b"", b"", ())
    code, text = await status(call)
    assert (code, call.sent) == (_native.STATUS_UNAVAILABLE, False)
    assert endpoint in text
    assert channel.failure() == (code, text)


async def test_a_peer_that_is_gone_is_not_asked_as_fast_as_calls_come(tmp_path):
    before = _native.statistics()["client_connect_failures"]
    channel = _native.Channel([f"unix:{tmp_path}/none.sock"])
    loop = asyncio.get_running_loop()
    began = loop.time()
    for _ in range(6):
        await status(channel.call(0, (), b"", b"", ()))
    # Pauses of 10, 20, 40, 80 and 160 ms.
    assert loop.time() - began > 0.25
    assert _native.statistics()["client_connect_failures"] == before + 6


async def test_the_next_endpoint_is_tried(tmp_path):
    async with endpoints(echo, "tcp", tmp_path) as ends:
        channel = _native.Channel([f"unix:{tmp_path}/none.sock", f"tcp:127.0.0.1:{ends.server.port}"])
        assert (await message(channel.call(0, (), b"", b"hello", ())))[1] == b"hello"
        assert channel.lane == "tcp"


@pytest.mark.parametrize("given", [None, "Bearer wrong", "Bearer secret "])
async def test_a_call_without_the_token_is_refused_before_its_handler(lane, tmp_path, given):
    handled = []

    async def handler(call):
        handled.append(call)

    options = {"authorization": "Bearer secret", "channel_authorization": given}
    before = _native.statistics()["server_unauthenticated"]
    async with endpoints(handler, lane, tmp_path, **options) as ends:
        code, text = await status(ends.call(b"x" * MIB))
    assert code == _native.STATUS_UNAUTHENTICATED
    assert "secret" not in text
    assert handled == []
    await until(lambda: _native.statistics()["server_unauthenticated"] > before)


async def test_a_call_with_the_token_is_served(lane, tmp_path):
    options = {"authorization": "Bearer secret", "channel_authorization": "Bearer secret"}
    async with endpoints(echo, lane, tmp_path, **options) as ends:
        assert (await message(ends.call(b"in")))[1] == b"in"
        assert "secret" not in repr(ends.channel)


async def test_another_process_on_the_port_is_not_the_replica(lane, tmp_path):
    async with endpoints(echo, lane, tmp_path, identity="new", channel_identity="old") as ends:
        call = ends.call()
        code, text = await status(call)
    assert (code, call.sent) == (_native.STATUS_UNAVAILABLE, False)
    assert "'new'" in text.replace('"', "'")


@pytest.mark.parametrize("body", [b"x" * (MIB + 1), [b"x" * MIB, b"y"]])
async def test_a_request_over_the_limit_is_refused_and_the_next_one_served(lane, tmp_path, body):
    async with endpoints(echo, lane, tmp_path, max_message_size=MIB) as ends:
        code, text = await status(ends.call(body))
        assert code == _native.STATUS_RESOURCE_EXHAUSTED
        assert "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE" in text
        assert str(MIB) in text
        assert (await message(ends.call(b"small")))[1] == b"small"


async def test_a_response_over_the_limit_fails_its_call_only(lane, tmp_path):
    async with endpoints(echo, lane, tmp_path, channel_max_message_size=MIB) as ends:
        code, text = await status(ends.call(b"x" * (2 * MIB)))
        assert code == _native.STATUS_RESOURCE_EXHAUSTED
        assert "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE" in text
        assert (await message(ends.call(b"small")))[1] == b"small"


async def test_a_lost_connection_fails_the_calls_on_it_at_once(lane, tmp_path):
    begun = asyncio.Event()

    async def handler(call):
        call.admit(True, 1)
        begun.set()
        await asyncio.Event().wait()

    async with endpoints(handler, lane, tmp_path) as ends:
        call = ends.call()
        await asyncio.wait_for(begun.wait(), PATIENCE)
        ends.server.close()
        code, _ = await status(call)
        assert (code, call.sent) == (_native.STATUS_UNAVAILABLE, True)
        call = ends.call()
        code, _ = await status(call)
        assert (code, call.sent) == (_native.STATUS_UNAVAILABLE, False)


async def test_a_handler_is_told_that_its_caller_is_gone(lane, tmp_path):
    begun, told = asyncio.Event(), asyncio.Event()

    async def handler(call):
        call.watch_cancel(bridge_for(asyncio.get_running_loop()), told.set)
        begun.set()
        await told.wait()

    async with endpoints(handler, lane, tmp_path) as ends:
        reader, writer = await raw_connection(ends, lane)
        writer.write(raw_request())
        await asyncio.wait_for(begun.wait(), PATIENCE)
        writer.close()
        await asyncio.wait_for(told.wait(), PATIENCE)
        del reader


async def test_a_silent_peer_is_given_up_by_keepalive(tmp_path):
    """A listener that completes the handshake and then says nothing more."""
    async with endpoints(echo, "tcp", tmp_path) as ends, Relay(ends.server.port) as relay:
        channel = _native.Channel([f"tcp:127.0.0.1:{relay.port}"], keepalive_interval=0.2, keepalive_timeout=0.5)
        assert (await message(channel.call(0, (), b"", b"a", ())))[1] == b"a"
        relay.freeze()
        call = channel.call(0, (), b"", b"b", ())
        code, _ = await status(call)
        assert code == _native.STATUS_UNAVAILABLE
        relay.thaw()
        assert (await message(channel.call(0, (), b"", b"c", ())))[1] == b"c"


async def test_ongoing_calls_finish_during_the_grace_and_new_ones_are_refused(lane, tmp_path):
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def handler(call):
        begun.set()
        await go_on.wait()
        await echo(call)

    async with endpoints(handler, lane, tmp_path) as ends:
        ongoing = ends.call(b"ongoing")
        await asyncio.wait_for(begun.wait(), PATIENCE)
        stopping = asyncio.ensure_future(ends.stop())
        while True:
            late = ends.call(b"late")
            done, _ = await asyncio.wait([asyncio.ensure_future(status(late))], timeout=0.2)
            if done:
                break
        assert late.status()[0] == _native.STATUS_UNAVAILABLE
        assert late.sent is False
        go_on.set()
        assert (await message(ongoing))[1] == b"ongoing"
        await stopping


async def test_calls_left_after_the_grace_are_cut_off(lane, tmp_path):
    begun = asyncio.Event()

    async def handler(call):
        begun.set()
        await asyncio.Event().wait()

    async with endpoints(handler, lane, tmp_path) as ends:
        call = ends.call()
        await asyncio.wait_for(begun.wait(), PATIENCE)
        await ends.stop(grace=0.1)
        assert (await status(call))[0] == _native.STATUS_UNAVAILABLE


async def test_a_closed_channel_refuses_calls(lane, tmp_path):
    async with endpoints(echo, lane, tmp_path) as ends:
        ongoing = ends.call(b"ongoing")
        await message(ongoing)
        ends.channel.close()
        code, _ = await status(ends.call())
        assert code == _native.STATUS_UNAVAILABLE


async def test_an_unusable_argument_is_named():
    with pytest.raises(ValueError, match="nonsense"):
        _native.Channel(["nonsense"])
    with pytest.raises(ValueError, match="connect_timeout"):
        _native.Channel([], connect_timeout=-1.0)
    with pytest.raises(ValueError, match="method 9"):
        _native.Channel(["tcp:127.0.0.1:1"]).call(9, (), b"", b"", ())


async def test_a_socket_is_private_to_its_user_and_goes_with_its_server(tmp_path):
    path = tmp_path / "s.sock"
    async with endpoints(echo, "unix", tmp_path) as ends:
        assert oct(os.stat(path).st_mode & 0o777) == "0o600"
        del ends
    import gc

    gc.collect()
    assert not path.exists()


async def test_a_port_in_use_is_an_os_error(tmp_path):
    async with endpoints(echo, "tcp", tmp_path) as ends:
        bridge = bridge_for(asyncio.get_running_loop())
        with pytest.raises(OSError, match=r"[Aa]ddress"):
            _native.Server(bridge, print, host="127.0.0.1", port=ends.server.port)


async def raw_connection(ends, lane):
    if lane != "tcp":
        return await asyncio.open_unix_connection(ends.server.unix_path)
    return await asyncio.open_connection("127.0.0.1", ends.server.port)


def raw_request() -> bytes:
    """Preface, SETTINGS, and one complete request of HTTP/2, byte by byte."""

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload

    def literal(name: bytes, value: bytes) -> bytes:
        return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value

    headers = b"".join(
        [
            literal(b":method", b"POST"),
            literal(b":scheme", b"http"),
            literal(b":path", b"/ray_serve_grpc.v1.InterDeploymentService/HandleRequest"),
            literal(b":authority", b"localhost"),
            literal(b"content-type", b"application/grpc"),
            literal(b"te", b"trailers"),
        ]
    )
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(4, 0, 0, b"")
        + frame(1, 4, 1, headers)
        + frame(0, 1, 1, b"\x00" + (0).to_bytes(4, "big"))
    )
