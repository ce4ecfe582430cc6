"""Bulk and small messages share a connection without waiting for each other."""

from __future__ import annotations

import numpy as np

from .endpoints import echo, endpoints, message

#: The small calls that find their way past one big one of 200 frames each way; each waits for a frame of it at most.
#: Behind the whole of it there would be one or two; how many more there are depends on the cores that are free.
MANY = 10


async def test_small_calls_pass_a_big_one(lane, tmp_path):
    big_one = np.zeros(200 << 20, np.uint8)
    async with endpoints(echo, lane, tmp_path) as ends:
        assert (await message(ends.call(b"connected")))[1] == b"connected"
        big = ends.call(b"", (big_one,))
        passed = 0
        while big.status() is None:
            assert (await message(ends.call(b"small")))[1] == b"small"
            passed += 1
        assert passed >= MANY
        _, _, (received,) = await message(big)
        assert len(received) == len(big_one)
