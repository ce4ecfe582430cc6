"""A caller that is killed with calls under way leaves nothing behind at its replicas."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from faults import kill
from harness import Cluster, outcome, same_as_actor
from harness.cluster import until
from load import MIX, Load
from replicas import Server, alive, ledger_folder, runs, target
from watch import holdings

HELD = 30


@target(num_replicas=1, max_ongoing_requests=500)
class Called(Server):
    pass


@target(num_replicas=1)
class Caller:
    """Keeps calls of every kind under way, on its own loop, until it is killed."""

    def __init__(self, called: Any) -> None:
        self._called = called
        self._kept: list[Any] = []

    async def pid(self) -> int:
        return os.getpid()

    async def press(self, key: str) -> int:
        self._kept += [asyncio.ensure_future(self._hold(f"{key}-held-{n}")) for n in range(HELD)]
        load = Load(self._called, f"{key}-load", 200.0, MIX)
        self._kept.append(asyncio.ensure_future(load.run(3600.0)))
        return os.getpid()

    async def _hold(self, name: str) -> None:
        await self._called.hold.remote(name)


def called() -> Any:
    return Caller.bind(Called.bind(ledger_folder()))


@same_as_actor(native_only=True, expect=[True, True, []], timeout=300)
def test_a_killed_callers_requests_end_and_all_that_they_held_is_given_back(cluster: Cluster) -> Any:
    handle = cluster.app(called)

    def answers() -> bool:
        return isinstance(outcome(lambda: handle.pid.remote().result(timeout_s=20)), int)

    cancelled, freed, levels = [], [], []
    for _ in range(3):
        assert until(answers, timeout=60, poll=0.2)
        key = cluster.key()
        pid = handle.press.remote(key).result(timeout_s=60)
        names = [f"{key}-held-{n}" for n in range(HELD)]
        assert until(lambda names=names: all(name in runs(ledger_folder()) for name in names), timeout=60)
        assert until(lambda key=key: f"{key}-load-200" in runs(ledger_folder()), timeout=60)
        kill(pid)
        ended = [f"{name} ended" for name in names]
        cancelled.append(until(lambda ended=ended: all(e in runs(ledger_folder()) for e in ended), timeout=30))
        freed.append(until(lambda: cluster.ongoing("Called", called) == 0, timeout=30))
        assert until(answers, timeout=60, poll=0.2)
        (replica,) = alive(ledger_folder(), "Called").values()
        levels.append(holdings(replica))
    first, last = levels[0], levels[-1]
    grown = [kind for kind in ("files", "threads", "segments") if last[kind] > first[kind] + 6]
    return [all(cancelled), all(freed), grown and [first, last]]
