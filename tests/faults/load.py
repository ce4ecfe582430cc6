"""Calls at a given pace, unary and streams, small and large, of which each is accounted for.

The caller writes down how each request ended, the replicas write down which they ran (`replicas`), and `Account` holds
the two against each other.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from payloads import LONGEST, MIB, is_piece, piece
from ray.exceptions import RayActorError
from replicas import runs

#: Seconds after which a request without an end counts as stuck.
PATIENCE = 60.0

#: Requests under way at most; the pace suffers beyond.
MOST_UNDER_WAY = 400


@dataclass(frozen=True)
class Shape:
    name: str
    share: float
    request: int
    answer: int
    #: of a stream; 0: a unary call
    items: int = 0
    #: seconds that user code takes
    takes: float = 0.0


MIX = (
    Shape("small", 60, 1024, 1024),
    Shape("slow", 6, 1024, 1024, takes=0.3),
    Shape("medium", 16, 100 * 1024, 100 * 1024),
    Shape("stream", 12, 1024, 1024, items=20),
    Shape("stream of arrays", 2.5, 1024, 200 * 1024, items=8),
    Shape("large", 3, MIB, MIB),
    Shape("huge", 0.25, LONGEST, LONGEST),
)

#: The same without what would crowd a thousand calls a second.
LIGHT = tuple(shape for shape in MIX if shape.request * max(shape.items, 1) < MIB)


@dataclass
class Request:
    name: str
    shape: Shape
    began: float
    ended: float = 0.0
    #: answered, failed, wrong, stuck; "" while it is under way
    end: str = ""
    error: BaseException | None = None


class Load:
    """`handle` gets `rate` requests each second, as the mix has them, from the running loop."""

    def __init__(
        self, handle: Any, key: str, rate: float = 250.0, mix: tuple[Shape, ...] = MIX, *, patience: float = PATIENCE
    ) -> None:
        self.key = key
        #: Requests made: they are called <key>-0, <key>-1, …
        self.made = 0
        #: Those that were not answered, so that hours of load need little memory.
        self.open: dict[str, Request] = {}
        #: (when it began, how long it took beside what user code slept) of those that were answered, seconds.
        self.began, self.took = array("d"), array("f")
        self.handle = handle
        self._rate = rate
        self._mix = mix
        self._patience = patience
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def run(self, seconds: float, fault: Callable[[], Any] | None = None, *, at: float = 0.3) -> Any:
        """Runs for so long, with the fault in a thread after the part `at` of it, and until each request ended.

        The load goes on while the fault is being injected. What it returns is returned.
        """
        pace = asyncio.ensure_future(self._pace())
        await asyncio.sleep(seconds * at)
        returned = await asyncio.to_thread(fault) if fault is not None else None
        await asyncio.sleep(seconds * (1 - at))
        self._stopping = True
        await pace
        return returned

    async def make(self, count: int, fault: Callable[[], Any] | None = None) -> Any:
        """Makes `count` requests, with the fault begun in a thread after a third of them."""
        pace = asyncio.ensure_future(self._pace(count))
        while fault is not None and self.made < count // 3:
            await asyncio.sleep(0.05)
        returned = await asyncio.to_thread(fault) if fault is not None else None
        await pace
        return returned

    @property
    def under_way(self) -> int:
        return len(self._tasks)

    def stop(self) -> None:
        """Makes no more requests. From any thread."""
        self._stopping = True

    async def _pace(self, count: int | None = None) -> None:
        chosen = random.Random(self.key)
        shares = [shape.share for shape in self._mix]
        began = time.monotonic()
        while not self._stopping and (count is None or self.made < count):
            shape = chosen.choices(self._mix, shares)[0]
            request = Request(f"{self.key}-{self.made}", shape, time.monotonic())
            self.made += 1
            self.open[request.name] = request
            task = asyncio.ensure_future(self._one(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(max(0.0, began + self.made / self._rate - time.monotonic()))
            while len(self._tasks) >= MOST_UNDER_WAY:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _one(self, request: Request) -> None:
        try:
            right = await asyncio.wait_for(self._call(request.name, request.shape), self._patience)
            request.end = "answered" if right else "wrong"
        except (TimeoutError, asyncio.TimeoutError):
            request.end = "stuck"
        except (Exception, asyncio.CancelledError) as error:
            request.end = "failed"
            request.error = error.with_traceback(None)
        request.ended = time.monotonic()
        if request.end == "answered":
            del self.open[request.name]
            self.began.append(request.began)
            self.took.append(request.ended - request.began - request.shape.takes)

    async def _call(self, name: str, shape: Shape) -> bool:
        payload = piece(name, shape.request)
        if not shape.items:
            right, answer = await self.handle.unary.remote(name, payload, shape.request, shape.answer, shape.takes)
            return right and is_piece(f"{name}:0", shape.answer, answer)
        number = 0
        stream = self.handle.options(stream=True).stream
        async for right, answer in stream.remote(name, payload, shape.request, shape.answer, shape.items):
            if not right or not is_piece(f"{name}:{number}", shape.answer, answer):
                return False
            number += 1
        return number == shape.items


class Account:
    """The requests of a load, and the ledger of the replicas."""

    def __init__(self, load: Load, folder: str, *, hops: int = 1) -> None:
        """`hops` of 2: the replica that ran a request is not the one that the caller spoke to."""
        self.load = load
        self._hops = hops
        self.ran = {name: actors for name, actors in runs(folder).items() if name.startswith(f"{load.key}-")}
        #: How many ended in which way.
        self.ends = Counter(request.end or "lost" for request in load.open.values())
        self.ends["answered"] = len(load.took)

    @property
    def failed(self) -> list[Request]:
        return [request for request in self.load.open.values() if request.end == "failed"]

    def percentile(self, part: float) -> float:
        """Of the times to an answer, milliseconds."""
        took = sorted(self.load.took)
        return 1000 * took[min(int(part * len(took)), len(took) - 1)] if took else 0.0

    @property
    def repeated(self) -> dict[str, list[str]]:
        """Requests that ran more than once, and where."""
        return {name: actors for name, actors in self.ran.items() if len(actors) > 1}

    def ends_of_all(self) -> list[tuple[float, float]]:
        """When each request began, and when it ended."""
        answered = [(began, began + took) for began, took in zip(self.load.began, self.load.took, strict=True)]
        return answered + [(request.began, request.ended) for request in self.load.open.values()]

    def broken(self, *, may_fail: int = 0, may_repeat: int = 0) -> list[str]:
        """What must not be, one line each; nothing in a run that kept its promises.

        Args:
            may_fail: how many may end with the error of a dead replica.
            may_repeat: how many may have run on two replicas, which only a network that is cut can bring about.
        """
        load = self.load
        lines = []
        if sum(self.ends.values()) != load.made:
            lines.append(f"of {load.made} requests {sum(self.ends.values())} are known: {dict(self.ends)}")
        for name in map(f"{load.key}-{{}}".format, range(load.made)):
            ran = self.ran.get(name, [])
            request = load.open.get(name)
            end = "answered" if request is None else request.end or "lost"
            if len(ran) > (2 if may_repeat else 1) or len(set(ran)) < len(ran):
                lines.append(f"{name} was {end}, and ran {len(ran)} times: {ran}")
            if end == "answered" and not ran:
                lines.append(f"{name} was answered and never ran")
            if request is not None:
                lines += _misreported(request, ran if self._hops == 1 else [])
        if extra := len(self.ran) - sum(f"{load.key}-{n}" in self.ran for n in range(load.made)):
            lines.append(f"{extra} requests ran that were never made")
        if may_repeat and len(self.repeated) > may_repeat:
            lines.append(f"{len(self.repeated)} ran twice, where {may_repeat} may")
        if len(self.failed) > may_fail:
            lines.append(f"{len(self.failed)} failed, where {may_fail} may: {self.errors()}")
        return lines

    def errors(self) -> dict[str, int]:
        """Each distinct error, shortened, and how often it came."""
        return dict(Counter(f"{type(r.error).__name__}: {r.error}"[:700] for r in self.failed).most_common(4))

    def summary(self) -> dict[str, Any]:
        began = self.load.began
        return {
            "made": self.load.made,
            "answers per second": round(len(began) / max(max(began) - min(began), 1e-9)) if began else 0,
            **self.ends,
            "ran twice": len(self.repeated),
            "p50 ms": round(self.percentile(0.5), 1),
            "p99 ms": round(self.percentile(0.99), 1),
        }


def _misreported(request: Request, ran: list[str]) -> list[str]:
    """What is wrong with the end of a request that was not answered."""
    who = f"{request.name} ({request.shape.name})"
    error = request.error
    if request.end != "failed":
        return [f"{who} is {request.end or 'lost'}; ran on {ran}"]
    if not isinstance(error, RayActorError):
        return [f"{who} failed with {error!r}"]
    if ran and error.actor_id not in ran:
        return [f"{who} ran on {ran}; its error tells of {error.actor_id}: {error}"]
    return []
