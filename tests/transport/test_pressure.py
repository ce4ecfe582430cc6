"""What a process may not have, shared memory and descriptors: calls take the next lane and are right; it warns once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from ray_serve_grpc import _native

from .endpoints import PATIENCE, SHM_LIMIT, message

#: Both ends in one process of its own, whose limits are changed before or after the first call.
PROGRAM = """
    import asyncio, os, resource, sys
    from pathlib import Path
    import numpy as np
    from ray_serve_grpc import _native
    from ray_serve_grpc.bridge import bridge_for

    MIB = 1 << 20
    folder, pressure = Path(sys.argv[1]), sys.argv[2]
    path = folder / "s.sock"

    def on_call(call):
        call.admit(True, 1)
        call.send(0, call.body, call.buffers)
        call.finish()

    async def message(call):
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        call.watch_message(bridge_for(loop), future)
        await asyncio.wait_for(future, 60)
        taken = call.take()
        assert taken is not None, call.status()
        return taken

    def limit(kind, most):
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))

    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    async def main():
        loop = asyncio.get_running_loop()
        _native.set_log_level(30)
        _native.set_shm_limit(1 << 30)
        if pressure == "no memory files":
            # Python ignores the signal; what stays is the error. Descriptors of pipes and sockets are not files.
            limit(resource.RLIMIT_FSIZE, 0)
        if pressure == "no side socket":
            (Path(f"{path}.fds") / "taken").mkdir(parents=True)
        server = _native.Server(bridge_for(loop), on_call, host="127.0.0.1", unix_path=str(path))
        channel = _native.Channel([f"unix:{path}"])
        await message(channel.call(0, (), b"", b"warm", ()))
        if pressure == "cap":
            _native.set_shm_limit(MIB)
        if pressure == "no large memory files":
            limit(resource.RLIMIT_FSIZE, 64 << 10)
        if pressure == "descriptors":
            # None is left, for segments or anything else; counting them took one.
            limit(resource.RLIMIT_NOFILE, descriptors() - 1)
        for number in range(40):
            arrays = [np.full(size, number, np.uint8) for size in (100 << 10, 2 * MIB, 5 * MIB)]
            calls = [channel.call(0, (), b"", b"", (array,)) for array in arrays]
            for array, call in zip(arrays, calls):
                _, _, (buffer,) = await message(call)
                assert np.array_equal(np.frombuffer(buffer, np.uint8), array)
        counters = _native.statistics()
        if pressure.startswith("no "):
            assert counters["shm_messages_sent"] == 0
        assert channel.lane == "unix"
        for level, _, text in _native.take_log_records():
            print(level, text, flush=True)
        print("right", flush=True)

    asyncio.run(main())
"""

#: What is short -> what the one warning says.
SHORT = {
    "cap": "at its limit, RAY_SERVE_GRPC_SHM_LIMIT=1048576 bytes",
    "descriptors": "Shared memory cannot be had (Too many open files",
    "no memory files": "Shared memory cannot be had (File too large",
    "no large memory files": "Shared memory cannot be had (File too large",
    "no side socket": "s.sock.fds (",
}


@pytest.mark.parametrize("pressure", SHORT)
def test_without_room_for_shared_memory_bytes_take_the_socket(tmp_path, pressure):
    done = run(PROGRAM, tmp_path, pressure)
    *warnings, right = done.stdout.splitlines()
    assert (done.returncode, right) == (0, "right"), done.stderr
    assert [SHORT[pressure] in line for line in warnings] == [True], warnings
    assert warnings[0].startswith("30 ")
    assert "panicked" not in done.stderr


#: A replica that can be made to run out of descriptors. It answers with a checksum, or with what it was asked to tell.
REPLICA = """
    import asyncio, os, resource, sys, zlib
    from ray_serve_grpc import _native
    from ray_serve_grpc.bridge import bridge_for

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    notices = []

    def on_call(call):
        answer = b""
        if call.body == b"none":
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, before[1]))
        elif call.body == b"enough":
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        elif call.body == b"told":
            answer = "\\n".join([text for _, _, text in _native.take_log_records()] + notices).encode()
        else:
            answer = b"%d" % zlib.crc32(call.buffers[0])
        call.admit(True, 1)
        call.send(0, answer, ())
        call.finish()

    async def main():
        _native.set_log_level(30)
        _native.set_shm_limit(1 << 30)
        bridge = bridge_for(asyncio.get_running_loop())
        server = _native.Server(bridge, on_call, host="127.0.0.1", unix_path=sys.argv[1], on_notice=notices.append)
        print("up", flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
"""


@pytest.fixture
def replica(tmp_path):
    path = str(tmp_path / "r.sock")
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(REPLICA), path], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "up\n"
        _native.set_shm_limit(SHM_LIMIT)
        yield f"unix:{path}"
        process.kill()


async def ask(channel, body, *buffers):
    _, answer, _ = await message(channel.call(_native.METHOD_UNARY, (), b"", body, buffers))
    return bytes(answer).decode()


async def test_a_peer_without_a_descriptor_for_shared_memory_is_sent_bytes_and_warns_once(replica):
    channel = _native.Channel([replica])
    await ask(channel, b"none")

    async def sums(count):
        for number in range(count):
            array = np.full(200 << 10, number, np.uint8)
            assert await ask(channel, b"sum", array) == str(zlib.crc32(array))

    # Until a segment is ready at this end, messages take the socket anyway.
    deadline = time.monotonic() + PATIENCE
    while not (warning := await ask(channel, b"told")) and time.monotonic() < deadline:
        await sums(1)
    await sums(40)
    assert "No file descriptor is left for a peer's shared memory" in warning
    assert (len(warning.splitlines()), await ask(channel, b"told")) == (1, "")
    await ask(channel, b"enough")
    channel.close()


async def test_a_peer_without_a_descriptor_for_shared_memory_is_not_waited_for(replica):
    channel = _native.Channel([replica])
    await ask(channel, b"none")
    sent = _native.statistics()["shm_messages_sent"]
    began = time.monotonic()
    for number in range(10):
        array = np.full((2 << 20) + 4096 * number, number, np.uint8)
        assert await ask(channel, b"sum", array) == str(zlib.crc32(array))
    assert _native.statistics()["shm_messages_sent"] == sent
    assert time.monotonic() - began < 5.0
    await ask(channel, b"enough")
    channel.close()


async def test_a_connection_waits_for_a_descriptor_at_the_replica(replica):
    present, coming = _native.Channel([replica]), _native.Channel([replica])
    await ask(present, b"none")
    array = np.zeros(100, np.uint8)
    waiting = asyncio.ensure_future(ask(coming, b"sum", array))

    async def refused() -> None:
        while "could not be accepted" not in await ask(present, b"told"):
            await asyncio.sleep(0.05)

    await asyncio.wait_for(refused(), PATIENCE)
    assert not waiting.done()
    await ask(present, b"enough")
    assert await waiting == str(zlib.crc32(array))
    present.close()
    coming.close()


def run(program: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
