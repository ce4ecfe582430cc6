"""Where a server can be reached from, and by whom."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys

import pytest

from ray_serve_grpc import _native
from ray_serve_grpc.bridge import bridge_for

from .certificates import Authority
from .endpoints import PATIENCE, echo, endpoints, message, status, until
from .raw_http2 import PREFACE, SETTINGS, frame

#: a user that is not this one; only root can become it
NOBODY = 65534


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as trial:
            trial.bind(("::1", 0))
    except OSError:
        return False
    return True


async def test_only_the_address_it_was_given_is_bound(tmp_path):
    async with endpoints(echo, "tcp", tmp_path) as ends:
        for address, reached in [("127.0.0.1", True), ("127.0.0.2", False)]:
            channel = _native.Channel([f"tcp:{address}:{ends.server.port}"])
            code, _ = await status(channel.call(0, (), b"", b"", ()))
            assert (code == _native.STATUS_OK) == reached


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("encrypted", [False, True])
async def test_nodes_with_ipv6_addresses_are_reached(encrypted):
    tls = Authority().credentials() if encrypted else None
    loop = asyncio.get_running_loop()

    def on_call(call):
        call.send(0, call.body)
        call.finish()

    server = _native.Server(bridge_for(loop), on_call, host="::1", tls=tls)
    channel = _native.Channel([f"tcp:[::1]:{server.port}"], tls=tls)
    assert (await message(channel.call(0, (), b"", b"in", ())))[1] == b"in"
    channel.close()
    server.close()


async def test_proxies_of_the_environment_are_never_used(tmp_path, monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:1")
    async with endpoints(echo, "tcp", tmp_path) as ends:
        assert (await message(ends.call(b"in")))[1] == b"in"


async def test_every_socket_file_is_private_to_its_user(tmp_path):
    async with endpoints(echo, "unix", tmp_path) as ends:
        assert (await message(ends.call(b"in")))[1] == b"in"
        sockets = [entry for entry in tmp_path.iterdir() if entry.is_socket()]
        assert sockets
        for entry in sockets:
            found = entry.stat()
            assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o600, os.geteuid()), entry


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("authorization", [None, "Bearer secret"])
async def test_another_user_is_refused_even_if_a_file_lets_it_in(tmp_path_factory, authorization):
    """The kernel tells who is at the other end of the socket."""
    folder = tmp_path_factory.mktemp("open")
    handled = []

    async def handler(call):
        handled.append(call)
        await echo(call)

    before = _native.statistics()["server_handshake_failures"]
    async with endpoints(handler, "unix", folder, authorization=authorization) as ends:
        for entry in (folder, *folder.parents, *folder.iterdir()):
            if entry.stat().st_uid == 0 and entry != folder.anchor and str(entry).startswith("/tmp/"):
                entry.chmod(0o777)
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", AS_NOBODY, ends.server.unix_path, stdout=asyncio.subprocess.PIPE
        )
        told, _ = await asyncio.wait_for(child.communicate(), PATIENCE)
        assert told.decode().split() == ["connected", "closed"]
        await until(lambda: _native.statistics()["server_handshake_failures"] > before)
        assert handled == []


AS_NOBODY = f"""
import os, socket, sys
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
peer = socket.socket(socket.AF_UNIX)
peer.connect(sys.argv[1])
print("connected")
try:
    peer.sendall({PREFACE + frame(SETTINGS)!r})
    answer = peer.recv(1000)
except OSError:
    answer = b""
print("answered" if answer else "closed")
"""


async def test_a_server_that_stops_does_not_wait_for_who_has_said_nothing(tmp_path):
    async with endpoints(echo, "tcp", tmp_path) as ends:
        silent = [await asyncio.open_connection("127.0.0.1", ends.server.port) for _ in range(3)]
        await until(lambda: ends.server.statistics()["connections"] == 3)
        await asyncio.wait_for(ends.stop(grace=60), 5)
        for _, writer in silent:
            writer.close()
            await writer.wait_closed()
