"""A named actor on which replicas note events and wait at gates, so that tests need no sleeps.

It is reached by Ray's own actor calls whatever the transport under test. Event and gate names carry a key that
the scenario makes up, since one board serves a whole cluster.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from functools import cache
from typing import Any

import ray

NAME = "board"
NAMESPACE = "tests"
_PATIENCE_S = 20.0


class _BoardActor:
    def __init__(self) -> None:
        self._notes: dict[str, list[Any]] = defaultdict(list)
        self._open: set[str] = set()
        self._changed = asyncio.Condition()

    async def note(self, event: str, value: Any = None) -> None:
        async with self._changed:
            self._notes[event].append(value)
            self._changed.notify_all()

    async def notes(self, event: str) -> list[Any]:
        return list(self._notes[event])

    async def wait(self, event: str, count: int) -> list[Any]:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._notes[event]) >= count)
            return list(self._notes[event])

    async def open(self, gate: str) -> None:
        async with self._changed:
            self._open.add(gate)
            self._changed.notify_all()

    async def passage(self, gate: str) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: gate in self._open)


class Board:
    """The driver's blocking view of the board."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    def create(cls) -> Board:
        remote = ray.remote(num_cpus=0, max_concurrency=10_000)(_BoardActor)
        return cls(remote.options(name=NAME, namespace=NAMESPACE).remote())

    def note(self, event: str, value: Any = None) -> None:
        ray.get(self._actor.note.remote(event, value), timeout=_PATIENCE_S)

    def notes(self, event: str) -> list[Any]:
        return list(ray.get(self._actor.notes.remote(event), timeout=_PATIENCE_S))

    def count(self, event: str) -> int:
        return len(self.notes(event))

    def wait(self, event: str, count: int = 1, *, timeout: float = _PATIENCE_S) -> list[Any]:
        """Waits until `event` was noted `count` times. Raises `GetTimeoutError` when it was not in time."""
        return list(ray.get(self._actor.wait.remote(event, count), timeout=timeout))

    def open(self, gate: str) -> None:
        ray.get(self._actor.open.remote(gate), timeout=_PATIENCE_S)


@cache
def board() -> Any:
    """The board's actor handle, for replicas: `await board().note.remote(event)`."""
    return ray.get_actor(NAME, namespace=NAMESPACE)


async def note(event: str, value: Any = None) -> None:
    await board().note.remote(event, value)


async def passage(gate: str) -> None:
    """Waits until the driver opens `gate`."""
    await board().passage.remote(gate)


def note_sync(event: str, value: Any = None) -> None:
    ray.get(board().note.remote(event, value), timeout=_PATIENCE_S)


def passage_sync(gate: str) -> None:
    ray.get(board().passage.remote(gate), timeout=_PATIENCE_S)
