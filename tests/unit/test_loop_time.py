"""Nothing of ours keeps an event loop busy for long: the CPU time of each callback, whatever the size of a message.

CPU time of the loop's thread and not time on the wall: another process may have had the core.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fakes import metadata, pending, replica_server

from ray_serve_grpc.client import gRPCReplicaWrapper

MIB = 1 << 20

#: Seconds of CPU that one callback may take.
LONGEST = 0.005

CALLS = 12


@pytest.fixture
def turns(monkeypatch) -> Iterator[list[tuple[float, str]]]:
    """(seconds of CPU, what ran) of each callback that asyncio runs."""
    taken: list[tuple[float, str]] = []
    run = asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        before = time.thread_time()
        run(handle)
        taken.append((time.thread_time() - before, repr(handle)))

    monkeypatch.setattr(asyncio.Handle, "_run", measured)
    gc.collect()
    gc.disable()
    yield taken
    gc.enable()


def array(size: int) -> Any:
    return np.ones(size, np.uint8)


@pytest.mark.parametrize("lane", ["unix", "tcp"])
@pytest.mark.parametrize(
    ("make", "size"),
    # Python makes `bytes` by a copy under the GIL, about half a millisecond per MB: docs/large-arrays.md says so.
    [(array, size) for size in (1024, 100 * 1024, MIB, 20 * MIB)] + [(bytes, size) for size in (1024, 2 * MIB)],
)
async def test_a_call_never_blocks_the_loops_of_its_ends(lane, size, make, tmp_path, turns):
    async def user_code(value: Any) -> Any:
        return value

    actor_id, server = replica_server(user_code, tmp_path / "r.sock")
    port = await server.start()
    endpoint = f"unix:{tmp_path}/r.sock" if lane == "unix" else f"tcp:127.0.0.1:{port}"
    wrapper = gRPCReplicaWrapper(actor_id, [endpoint], deployment="Model")
    value = make(size)
    try:
        for number in range(CALLS):
            if number == 2:
                turns.clear()  # the first ones import and connect
            result = wrapper.send_request_python(pending(value, about=metadata()), with_rejection=True)
            assert (await asyncio.wait_for(result.get_rejection_response(), 60)).accepted
            assert len(await asyncio.wait_for(result.get_async(), 60)) == size
    finally:
        wrapper.close()
        await server.stop(0)
    # One hiccup of the machine, which its caches and page faults are, is not a blocked loop.
    assert len(turns) > CALLS
    slow = sorted(turns, reverse=True)[:3]
    assert slow[-1][0] < LONGEST, slow
