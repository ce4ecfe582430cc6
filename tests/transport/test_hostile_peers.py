"""Bytes that nobody of good will sends: the server lives, its memory is bounded, others are served."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import time

import pytest

from ray_serve_grpc import _native
from ray_serve_grpc.bridge import bridge_for

from .endpoints import PATIENCE, echo, endpoints, message, status, until
from .hostile_server import HEAD, hostile_server, whole_answer
from .raw_http2 import (
    CANCEL,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Attacker,
    call_headers,
    frame,
)

TOKEN = "Bearer s3cret"
AUTHORIZED = {"authorization": TOKEN, "channel_authorization": TOKEN}
MIB = 1 << 20
#: config::HANDSHAKE_TIMEOUT
HANDSHAKE_TIMEOUT = 10.0
#: security::MAX_STRANGERS
MAX_STRANGERS = 256


def resident() -> int:
    """Bytes of memory that this process, and so the server in it, holds."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@contextlib.contextmanager
def little_memory(spare: int):
    """While it lasts this process gets no more than `spare` bytes of address space."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + spare, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@contextlib.asynccontextmanager
async def attacked(tmp_path, handler=echo, **options):
    """A server that asks for a token. Whatever happens to it, it serves a good caller afterwards."""
    async with endpoints(handler, "tcp", tmp_path, **AUTHORIZED, **options) as ends:
        try:
            yield ends
        finally:
            await Attacker.give_up()
        async with endpoints(echo, "tcp", tmp_path) as other:
            assert other.server.port != ends.server.port
        call = ends.call(b"still there")
        assert (await message(call))[1] == b"still there"


# Before a peer has shown the token.


async def test_strangers_that_say_too_little_are_gone_after_ten_seconds(tmp_path):
    beginnings = {
        "nothing": b"",
        "half a preface": PREFACE[:10],
        "a preface": PREFACE,
        "settings": PREFACE + frame(SETTINGS),
        "half a frame": PREFACE + frame(SETTINGS) + b"\x00\x10",
        "headers that never end": PREFACE + frame(SETTINGS) + frame(HEADERS, 0, 1, call_headers()),
    }
    async with attacked(tmp_path) as ends:
        began = time.monotonic()
        attackers = [await Attacker.connect(ends.server.port, first) for first in beginnings.values()]
        polite = await Attacker.connect(ends.server.port)
        polite.send(frame(HEADERS, END_HEADERS, 1, call_headers(TOKEN)))
        await asyncio.wait_for(asyncio.gather(*[attacker.closed() for attacker in attackers]), 2 * HANDSHAKE_TIMEOUT)
        assert time.monotonic() - began > HANDSHAKE_TIMEOUT / 2
        await until(lambda: ends.server.statistics()["connections"] == 1)  # Who showed the token.
        polite.send(frame(DATA, END_STREAM, 1, bytes(5)))
        assert await asyncio.wait_for(polite.until(HEADERS), PATIENCE)


async def test_a_stranger_that_keeps_talking_is_gone_after_ten_seconds_too(tmp_path):
    """One byte of a preface a second, and one PING a second."""
    async with attacked(tmp_path) as ends:
        slow = await Attacker.connect(ends.server.port, b"")
        pinging = await Attacker.connect(ends.server.port)
        began = time.monotonic()

        async def keep_talking():
            for byte in PREFACE:
                with contextlib.suppress(OSError):
                    slow.send(bytes([byte]))
                    pinging.send(frame(PING, 0, 0, bytes(8)))
                await asyncio.sleep(1.0)

        talking = asyncio.ensure_future(keep_talking())
        await asyncio.wait_for(asyncio.gather(slow.closed(), pinging.closed()), 2 * HANDSHAKE_TIMEOUT)
        assert time.monotonic() - began < 1.5 * HANDSHAKE_TIMEOUT
        talking.cancel()


@pytest.mark.parametrize(
    "flood",
    [
        pytest.param(frame(PING, 0, 0, bytes(8)) * 1000, id="pings"),
        pytest.param(frame(SETTINGS, 0, 0, b"\x00\x04\x00\x00\x00\x01") * 1000, id="settings"),
        pytest.param((2 << 20).to_bytes(3, "big") + bytes([DATA, 0, 0, 0, 0, 1]) + bytes(60_000), id="a big frame"),
        pytest.param(frame(CONTINUATION, 0, 1, bytes(16_000)), id="continuations"),
        pytest.param(frame(99, 0, 0, bytes(16_000)), id="unknown frames"),
        pytest.param(frame(WINDOW_UPDATE, 0, 0, b"\x00\x00\x00\x01") * 1000, id="window updates"),
        pytest.param(frame(2, 0, 1, bytes(5)) * 1000, id="priorities"),
    ],
)
async def test_a_stranger_is_read_little_of(tmp_path, flood):
    """256 KiB and no answer that is not read: what it sends stays in its own kernel's buffers."""
    async with attacked(tmp_path) as ends:
        before = resident()
        attackers = [await Attacker.connect(ends.server.port) for _ in range(30)]
        if flood[3] == CONTINUATION:
            for attacker in attackers:
                attacker.send(frame(HEADERS, 0, 1, call_headers()))
        sent = await asyncio.gather(*[a.send_until_blocked(flood, 64 * MIB, 0.5) for a in attackers])
        # Both kernels' buffers hold a few MiB of each.
        assert max(sent) < 16 * MIB
        assert resident() - before < 60 * MIB


async def test_strangers_in_great_number_push_each_other_out(tmp_path):
    async with attacked(tmp_path) as ends:
        assert (await message(ends.call(b"a good caller stays")))[1] == b"a good caller stays"
        for _ in range(MAX_STRANGERS + 50):
            await Attacker.connect(ends.server.port, b"")
        began = time.monotonic()
        await until(lambda: ends.server.statistics()["connections"] == MAX_STRANGERS + 1)
        assert time.monotonic() - began < HANDSHAKE_TIMEOUT / 2
        newcomer = _native.Channel([f"tcp:127.0.0.1:{ends.server.port}"], authorization=TOKEN)
        assert (await message(newcomer.call(0, (), b"", b"in", ())))[1] == b"in"
        newcomer.close()


async def test_calls_with_a_wrong_token_are_counted_told_once_and_never_read(tmp_path):
    notices, handled = [], []

    async def handler(call):
        handled.append(call)
        await echo(call)

    before = _native.statistics()["server_unauthenticated"]
    calls = 1000
    async with attacked(tmp_path, handler, on_notice=notices.append) as ends:
        attacker = await Attacker.connect(ends.server.port)
        headers = call_headers("Bearer wr0ng")
        for stream in range(1, 2 * calls, 2):
            attacker.send(frame(HEADERS, END_HEADERS, stream, headers))
        for _ in range(calls):
            refused = await asyncio.wait_for(attacker.until(HEADERS), PATIENCE)
            assert b"grpc-status" in refused.payload or refused.flags & END_STREAM
        attacker.writer.close()
        await until(lambda: _native.statistics()["server_unauthenticated"] == before + calls)
        assert handled == []
    assert len(notices) == 1
    assert notices[0].startswith("1 calls without the right authentication token were refused; the last: tcp:127.0.0.1")
    assert not any(secret in notices[0] for secret in ("s3cret", "wr0ng"))


async def test_a_body_that_comes_with_a_wrong_token_is_thrown_away(tmp_path):
    async with attacked(tmp_path) as ends:
        before = _native.statistics()["server_bytes_received"]
        attacker = await Attacker.connect(ends.server.port)
        await asyncio.wait_for(attacker.granted(), PATIENCE)
        attacker.send(frame(HEADERS, END_HEADERS, 1, call_headers("Bearer wr0ng")))
        # Not beyond the stream's first window, which would end the connection if it came before the refusal.
        attacker.send(*[frame(DATA, 0, 1, bytes(10_000)) for _ in range(6)])
        assert await asyncio.wait_for(attacker.until(HEADERS), PATIENCE)
        assert _native.statistics()["server_bytes_received"] == before
        attacker.writer.close()


async def test_the_token_is_in_no_repr_and_no_error(tmp_path):
    async with attacked(tmp_path) as ends:
        bad = _native.Channel([f"tcp:127.0.0.1:{ends.server.port}"], authorization="Bearer wr0ng")
        call = bad.call(0, (), b"", b"", ())
        ended = await status(call)
        shown = f"{ended} {bad!r} {call!r} {bad.failure()} {ends.server!r} {ends.channel!r} {ends.server.statistics()}"
        assert not any(secret in shown for secret in ("s3cret", "wr0ng"))
        with pytest.raises(ValueError, match="authorization") as error:
            _native.Channel([], authorization="Bearer s3cret\n")
        assert "s3cret" not in str(error.value)


# With the token, or where none is asked for.


async def test_headers_of_any_size_and_number_are_refused_and_the_next_call_served(tmp_path):
    async with attacked(tmp_path) as ends:
        for more in ([(b"x", b"y" * 70_000)], [(b"name%d" % n, b"") for n in range(3000)]):
            attacker = await Attacker.connect(ends.server.port)
            block = call_headers(TOKEN, more)
            pieces = [block[at : at + 16_000] for at in range(0, len(block), 16_000)]
            attacker.send(frame(HEADERS, END_STREAM, 1, pieces[0]))
            attacker.send(*[frame(CONTINUATION, 0, 1, piece) for piece in pieces[1:-1]])
            attacker.send(frame(CONTINUATION, END_HEADERS, 1, pieces[-1]))
            answer = await asyncio.wait_for(attacker.until(HEADERS, RST_STREAM, GOAWAY), PATIENCE)
            assert answer is None or answer.kind != HEADERS or b"431" in answer.payload or answer.flags & END_STREAM
            attacker.writer.close()


async def test_more_streams_than_allowed_are_refused(tmp_path):
    async with attacked(tmp_path) as ends:
        before = resident()
        attacker = await Attacker.connect(ends.server.port)
        headers = call_headers(TOKEN)
        for stream in range(1, 2 * 17_000, 2):
            attacker.send(frame(HEADERS, END_HEADERS, stream, headers))
            if stream % 1000 == 1:
                await attacker.writer.drain()
        refused = await asyncio.wait_for(attacker.until(RST_STREAM, GOAWAY), PATIENCE)
        assert refused.kind == RST_STREAM
        assert int.from_bytes(refused.payload, "big") == REFUSED_STREAM
        assert resident() - before < 300 * MIB
        attacker.writer.close()


async def test_streams_that_are_reset_at_once_are_bounded(tmp_path):
    """16,384 of them wait at most, of about 10 KiB each."""
    count = 100_000
    async with attacked(tmp_path) as ends:
        before = resident()
        attacker = await Attacker.connect(ends.server.port)
        headers = call_headers(TOKEN)
        cancel = CANCEL.to_bytes(4, "big")
        for stream in range(1, 2 * count, 2):
            attacker.send(frame(HEADERS, END_HEADERS, stream, headers), frame(RST_STREAM, 0, stream, cancel))
            if stream % 1000 == 1:
                try:
                    await asyncio.wait_for(attacker.writer.drain(), PATIENCE)
                except OSError:
                    break
        assert resident() - before < 300 * MIB
        attacker.writer.close()


async def test_answers_that_are_not_read_hold_their_writer_back(tmp_path):
    """One-byte items to a peer that reads nothing."""
    held, stop = asyncio.Event(), asyncio.Event()
    sent = 0

    async def handler(call):
        nonlocal sent
        if call.method == _native.METHOD_UNARY:
            return await echo(call)
        loop = asyncio.get_running_loop()
        while not call.cancelled and sent < 3_000_000:
            sent += 1
            if not call.send(0, b"x"):
                future = loop.create_future()
                call.watch_writable(bridge_for(loop), future)
                done, _ = await asyncio.wait([future], timeout=2.0)
                if not done:
                    held.set()
                    break
        await stop.wait()

    async with attacked(tmp_path, handler) as ends:
        before = resident()
        attacker = await Attacker.connect(ends.server.port)
        path = b"/ray_serve_grpc.v1.InterDeploymentService/HandleRequestStreaming"
        attacker.send(frame(HEADERS, END_HEADERS, 1, call_headers(TOKEN, path=path)))
        attacker.send(frame(DATA, END_STREAM, 1, bytes(5)))
        await asyncio.wait_for(held.wait(), 60)
        assert sent < 3_000_000
        assert resident() - before < 100 * MIB
        stop.set()
        attacker.writer.close()


async def test_a_request_in_frames_of_one_byte_is_read(tmp_path):
    async with attacked(tmp_path) as ends:
        attacker = await Attacker.connect(ends.server.port)
        await asyncio.wait_for(attacker.granted(), PATIENCE)
        attacker.send(frame(HEADERS, END_HEADERS, 1, call_headers(TOKEN)))
        body = b"\x12\xa0\x8d\x06" + bytes(100_000)
        message_bytes = b"\x00" + len(body).to_bytes(4, "big") + body
        for at, byte in enumerate(message_bytes):
            last = at == len(message_bytes) - 1
            attacker.send(frame(DATA, END_STREAM if last else 0, 1, bytes([byte])))
        answer = await asyncio.wait_for(attacker.until(HEADERS), PATIENCE)
        assert not answer.flags & END_STREAM
        attacker.writer.close()


async def test_empty_frames_without_end_do_not_go_on_for_ever(tmp_path):
    async with attacked(tmp_path) as ends:
        before = resident()
        attacker = await Attacker.connect(ends.server.port)
        attacker.send(frame(HEADERS, END_HEADERS, 1, call_headers(TOKEN)))
        await attacker.send_until_blocked(frame(DATA, 0, 1) * 1000, 20 * MIB)
        assert resident() - before < 50 * MIB


async def test_requests_that_never_end_hold_what_they_sent_and_no_more(tmp_path):
    """Each claims to be a message of 1 GiB and sends 1 KiB of it."""
    async with attacked(tmp_path) as ends:
        before = resident()
        attacker = await Attacker.connect(ends.server.port)
        await asyncio.wait_for(attacker.granted(), PATIENCE)
        claim = b"\x00" + (1 << 30).to_bytes(4, "big") + bytes(1024)
        for stream in range(1, 400, 2):
            attacker.send(frame(HEADERS, END_HEADERS, stream, call_headers(TOKEN)), frame(DATA, 0, stream, claim))
        await attacker.writer.drain()
        call = ends.call(b"in between")
        assert (await message(call))[1] == b"in between"
        assert resident() - before < 50 * MIB
        attacker.writer.close()
        await until(lambda: ends.server.statistics()["connections"] == 1)


@pytest.mark.parametrize("seed", range(20))
async def test_random_frames_end_at_most_their_own_connection(tmp_path, seed):
    chance = random.Random(seed)
    async with attacked(tmp_path) as ends:
        for _ in range(20):
            attacker = await Attacker.connect(ends.server.port)
            if chance.random() < 0.7:
                attacker.send(frame(HEADERS, END_HEADERS, 1, call_headers(TOKEN)))
            for _ in range(chance.randrange(30)):
                payload = chance.randbytes(chance.choice([0, 1, 4, 5, 8, 100, 3000]))
                attacker.send(frame(chance.randrange(12), chance.randrange(256), chance.choice([0, 1, 3, 5]), payload))
            attacker.send(chance.randbytes(chance.randrange(50)))
            attacker.writer.close()


async def test_a_hostile_answer_fails_its_call_only(tmp_path):
    """The caller's side: a server that accepts, and then sends anything."""
    for seed in range(30):
        chance = random.Random(seed)

        async def serve(reader, writer, chance=chance):
            await reader.read(1000)
            writer.write(frame(SETTINGS) + frame(SETTINGS, 1))
            for _ in range(chance.randrange(20)):
                payload = chance.randbytes(chance.choice([0, 4, 8, 100]))
                kind, flags = chance.randrange(12), chance.randrange(256)
                writer.write(frame(kind, flags, chance.choice([0, 1, 2, 3]), payload))
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        channel = _native.Channel([f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"])
        code, _ = await status(channel.call(0, (), b"", b"", ()))
        assert code != _native.STATUS_OK
        channel.close()
        server.close()


async def test_a_request_for_which_there_is_no_memory_is_refused_alone(tmp_path):
    async with attacked(tmp_path) as ends:
        attacker = await Attacker.connect(ends.server.port)
        await asyncio.wait_for(attacker.granted(), PATIENCE)
        claim = b"\x00" + ((1 << 31) - 1).to_bytes(4, "big")
        with little_memory(1 << 30):
            attacker.send(frame(HEADERS, END_HEADERS, 1, call_headers(TOKEN)), frame(DATA, 0, 1, claim))
            refused = await asyncio.wait_for(attacker.until(HEADERS), PATIENCE)
            assert refused.flags & END_STREAM
            assert b"\x81\x7b" in refused.payload  # "8", RESOURCE_EXHAUSTED, in HPACK's Huffman code
            assert (await message(ends.call(b"another")))[1] == b"another"
        attacker.writer.close()


async def test_an_answer_for_which_there_is_no_memory_fails_alone():
    async def answer(stream, writer):
        claim = b"\x00" + ((1 << 31) - 1).to_bytes(4, "big")
        bad = frame(HEADERS, END_HEADERS, stream, HEAD) + frame(DATA, 0, stream, claim)
        writer.write(bad if stream == 3 else whole_answer(stream))

    async with hostile_server(answer) as port:
        channel = _native.Channel([f"tcp:127.0.0.1:{port}"])
        with little_memory(1 << 30):
            code, detail = await status(channel.call(0, (), b"", b"", ()))
        assert code == _native.STATUS_RESOURCE_EXHAUSTED
        assert "no memory for a message of 2147483647 bytes" in detail
        assert (await status(channel.call(0, (), b"", b"", ())))[0] == _native.STATUS_OK
        channel.close()


async def test_a_stream_of_tiny_frames_that_nobody_takes_costs_its_bytes_and_no_other_call():
    """HTTP/2 counts bytes and not frames: millions of one byte fit into a window, and would end the connection."""
    count = 1_400_000
    item = b"".join(frame(DATA, 0, 3, bytes([byte])) for byte in b"\x00\x00\x00\x00\x02\x10\x00")
    sent = asyncio.Event()

    async def answer(stream, writer):
        if stream != 3:
            writer.write(whole_answer(stream))
            return
        writer.write(frame(HEADERS, END_HEADERS, stream, HEAD))
        for _ in range(count // 7_000):
            writer.write(item * 1000)
            await writer.drain()
        sent.set()

    async with hostile_server(answer) as port:
        channel = _native.Channel([f"tcp:127.0.0.1:{port}"])
        before = resident()
        unread = channel.call(_native.METHOD_STREAMING, (), b"", b"", ())
        await asyncio.wait_for(sent.wait(), 3 * PATIENCE)
        assert (await status(channel.call(0, (), b"", b"", ())))[0] == _native.STATUS_OK
        assert resident() - before < 60 * MIB
        assert unread.status() is None
        # What was not taken yet is all there.
        taken = 0
        while taken < count // 7_000 * 1000:
            assert await message(unread) is not None
            taken += 1 + len(unread.take_all())
        unread.cancel()
        channel.close()


async def test_an_answer_of_many_messages_to_a_unary_call_is_refused():
    async def answer(stream, writer):
        writer.write(frame(HEADERS, END_HEADERS, stream, HEAD) + frame(DATA, 0, stream, bytes(10)))

    async with hostile_server(answer) as port:
        channel = _native.Channel([f"tcp:127.0.0.1:{port}"])
        code, detail = await status(channel.call(0, (), b"", b"", ()))
        assert (code, detail) == (_native.STATUS_INTERNAL, "more than one message in the answer to a unary call")
        channel.close()
