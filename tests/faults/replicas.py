"""What the load calls: replicas that write down each request that they run, before anything else.

A line of the ledger is one write to a file opened for appending, so it is whole and it survives the process.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
from collections import defaultdict
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from harness import deployment
from payloads import is_piece, piece

#: Serve's own probe must not be what finds out: it comes late here.
PATIENT = {"health_check_period_s": 5.0, "health_check_timeout_s": 60.0}


def ledger_folder() -> str:
    """Where the replicas of this driver's cluster write."""
    folder = Path(ray._private.worker._global_node.get_session_dir_path()) / "ledger"
    folder.mkdir(exist_ok=True)
    return str(folder)


def runs(folder: str) -> dict[str, list[str]]:
    """Request id -> actor ids, in hex, of the replicas that ran it; one entry for each time."""
    ran: dict[str, list[str]] = defaultdict(list)
    for path in Path(folder).iterdir():
        for line in path.read_text().splitlines():
            ran[line].append(path.name.partition(".")[0])
    return ran


def alive(folder: str, deployment: str) -> dict[str, int]:
    """Actor id in hex -> process id, of the replicas of a deployment that ever wrote here and still live."""
    found = {}
    for path in Path(folder).iterdir():
        actor, pid, kind = path.name.split(".")
        if kind == deployment and is_alive(int(pid)):
            found[actor] = int(pid)
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Server:
    """One request is one call of one of these methods."""

    def __init__(self, folder: str, edition: int = 0) -> None:
        self._edition = edition
        actor = ray.get_runtime_context().get_actor_id()
        name = f"{actor}.{os.getpid()}.{type(self).__name__}"
        self._ledger = os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        piece("", 1)

    def _ran(self, name: str) -> None:
        os.write(self._ledger, f"{name}\n".encode())

    async def pid(self) -> int:
        return os.getpid()

    async def unary(self, name: str, payload: np.ndarray, size: int, answer: int, takes: float) -> Any:
        self._ran(name)
        if takes:
            await asyncio.sleep(takes)
        return is_piece(name, size, payload), piece(f"{name}:0", answer)

    async def stream(self, name: str, payload: np.ndarray, size: int, answer: int, items: int) -> AsyncIterator[Any]:
        self._ran(name)
        right = is_piece(name, size, payload)
        for number in range(items):
            yield right, piece(f"{name}:{number}", answer)
            await asyncio.sleep(0.002)

    async def die(self, name: str, how: str) -> None:
        self._ran(name)
        end(how)
        await asyncio.Event().wait()

    async def hold(self, name: str) -> None:
        self._ran(name)
        try:
            await asyncio.Event().wait()
        finally:
            self._ran(f"{name} ended")

    async def tasks(self) -> int:
        """Of this loop, which runs user code."""
        return len(asyncio.all_tasks())


def end(how: str) -> None:
    """Ends this process as user code can."""
    if how == "exit":
        os._exit(1)
    if how == "SystemExit":
        raise SystemExit(3)
    if how == "abort":
        faulthandler.disable()
        os.abort()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


target = partial(deployment, **{"max_ongoing_requests": 100, "graceful_shutdown_timeout_s": 30, **PATIENT})


@target(num_replicas=3)
class Target(Server):
    pass


@target(num_replicas=2)
class Relay:
    """A hop between: what it passes on keeps its name, and so its line in the ledger of whoever runs it."""

    def __init__(self, further: Any) -> None:
        self._further = further

    async def unary(self, *arguments: Any) -> Any:
        return await self._further.unary.remote(*arguments)

    async def stream(self, *arguments: Any) -> Any:
        async for item in self._further.options(stream=True).stream.remote(*arguments):
            yield item

    async def pid(self) -> int:
        return os.getpid()


def three() -> Any:
    return Target.bind(ledger_folder())


def relayed() -> Any:
    """The same, and a hop before them."""
    return Relay.bind(three())
