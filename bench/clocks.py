"""CPU time of processes, in nanoseconds, as the scheduler counts it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

#: role -> process ids
Roles = Mapping[str, Iterable[int]]


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process, also of those that ended. 0 when it is gone."""
    # clock_getcpuclockid(3), which Python does not offer: bits 0-1 say "scheduler's clock", bit 2 "of a process".
    with contextlib.suppress(OSError):
        return time.clock_gettime(~pid << 3 | 2)
    return 0.0


def machine_cpu_seconds() -> float:
    """CPU time of everything on the machine, without idle and waiting. Steps of 10 ms."""
    user, nice, system, _, _, irq, softirq, steal, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def session_members(session: int) -> dict[int, str]:
    """Process id -> name of all processes of a session.

    A cluster's driver is started in a session of its own, and Ray's processes stay in it.
    """
    members = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name stands in brackets, and may hold spaces and brackets.
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
            if int(rest.split()[3]) == session:
                members[int(path.parent.name)] = name
    return members


class Stopwatch:
    """CPU seconds by role, and wall seconds, between its making and `read()`."""

    def __init__(self, roles: Roles) -> None:
        self._roles = {role: list(pids) for role, pids in roles.items()}
        self._machine = machine_cpu_seconds()
        self._cpu = self._now()
        self._started = time.perf_counter()

    def read(self) -> tuple[float, dict[str, float]]:
        """Wall seconds; CPU seconds by role, and "foreign": of everything that has no role here."""
        wall = time.perf_counter() - self._started
        cpu = {role: max(0.0, now - self._cpu[role]) for role, now in self._now().items()}
        machine = machine_cpu_seconds() - self._machine
        return wall, cpu | {"foreign": max(0.0, machine - sum(cpu.values()))}

    def _now(self) -> dict[str, float]:
        return {role: sum(map(cpu_seconds, pids)) for role, pids in self._roles.items()}
