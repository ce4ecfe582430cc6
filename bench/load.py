"""The loads of a measurement, in the process that calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from bench import payloads
from bench.clocks import Roles, Stopwatch
from bench.samples import Sample

#: How many times longer than asked a measurement of slow calls may take. The call under way is waited for.
_PATIENCE = 5

Call = Callable[[Any], Awaitable[Any]]


async def echo_calls(call: Call, value: Any, in_flight: int, seconds: float, least: int, roles: Roles) -> Sample:
    """`in_flight` calls at a time, for so many seconds, and `least` by each of those if that does not take too long."""
    times: list[float] = []
    watch = Stopwatch(roles)
    until = time.perf_counter() + seconds
    latest = until + _PATIENCE * seconds
    await asyncio.gather(*(_call_on(call, value, until, latest, least, times) for _ in range(in_flight)))
    wall, cpu = watch.read()
    return Sample(len(times), wall, cpu, times)


async def item_streams(open_stream: Callable[[], AsyncIterator[Any]], streams: int, count: int, roles: Roles) -> Sample:
    """So many streams at a time, each of which must yield `count` items."""
    first: list[float] = []

    async def read() -> int:
        started, got = time.perf_counter(), 0
        async for _ in open_stream():
            if not got:
                first.append((time.perf_counter() - started) * 1e3)
            got += 1
        return got

    watch = Stopwatch(roles)
    total = sum(await asyncio.gather(*(read() for _ in range(streams))))
    wall, cpu = watch.read()
    if total != streams * count:
        raise AssertionError(f"{total} items of {streams * count} arrived")
    return Sample(total, wall, cpu, first_ms=first)


async def _call_on(call: Call, value: Any, until: float, latest: float, least: int, times: list[float]) -> None:
    clock, check, done = time.perf_counter, payloads.check, 0
    while True:
        started = clock()
        answer = await call(value)
        ended = clock()
        check(value, answer)
        del answer
        times.append((ended - started) * 1e3)
        done += 1
        if ended >= until and (done >= least or ended >= latest):
            return
