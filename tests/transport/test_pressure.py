"""What a process may not have, shared memory and descriptors: calls take the next lane and are right."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

#: Both ends in one process of its own, whose limits are changed after the first call.
PROGRAM = """
    import asyncio, os, resource, sys
    from pathlib import Path
    import numpy as np
    from ray_serve_grpc import _native
    from ray_serve_grpc.bridge import bridge_for

    MIB = 1 << 20
    folder, pressure = Path(sys.argv[1]), sys.argv[2]

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

    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    async def main():
        loop = asyncio.get_running_loop()
        _native.set_shm_limit(1 << 30)
        server = _native.Server(bridge_for(loop), on_call, host="127.0.0.1", unix_path=str(folder / "s.sock"))
        channel = _native.Channel([f"unix:{folder}/s.sock"])
        await message(channel.call(0, (), b"", b"warm", ()))
        if pressure == "cap":
            _native.set_shm_limit(MIB)
        if pressure == "descriptors":
            # None is left, for segments or anything else.
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors(), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        for number in range(40):
            arrays = [np.full(size, number, np.uint8) for size in (100 << 10, 2 * MIB, 5 * MIB)]
            calls = [channel.call(0, (), b"", b"", (array,)) for array in arrays]
            for array, call in zip(arrays, calls):
                _, _, (buffer,) = await message(call)
                assert np.array_equal(np.frombuffer(buffer, np.uint8), array)
        counters = _native.statistics()
        assert counters["shm_fallbacks"] > 0
        if pressure == "descriptors":
            assert counters["shm_messages_sent"] == 0
        print("right", flush=True)

    asyncio.run(main())
"""


@pytest.mark.parametrize("pressure", ["cap", "descriptors"])
def test_without_room_for_segments_bytes_take_the_socket(tmp_path, pressure):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), pressure],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
    assert "panicked" not in done.stderr
