"""Which cells a run measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.payloads import UNITS, format_size
from bench.rounds import Effort

TESTS = ("latency", "own", "chain", "throughput", "in-flight", "streams", "paced", "mixed")
QUICK_TESTS = ("latency", "chain", "throughput", "in-flight")
STREAMS = (1, 32, 128)
BULK = 100 * UNITS["MB"]  # of the calls that small ones are mixed with
PACED_STREAMS, PACE = 32, 50.0  # streams; items per second of each

QUICK = Effort(rounds=3, seconds=0.6)
NORMAL = Effort(rounds=3, seconds=0.8)
FULL = Effort(rounds=5, seconds=1.0)


@dataclass(frozen=True)
class Cell:
    """One test at one size, for every variant."""

    test: str
    kind: str = ""
    size: int = 0
    in_flight: int = 1
    """calls or streams at a time"""

    def __str__(self) -> str:
        if not self.size:
            return f"{self.test}, {self.in_flight} at a time"
        more = f", {self.in_flight} in flight" if self.in_flight > 1 else ""
        return f"{self.test} {self.kind} {format_size(self.size)}{more}"

    def facts(self) -> dict[str, Any]:
        return {"test": self.test, "kind": self.kind, "size": self.size, "in_flight": self.in_flight}


def cells(tests: Sequence[str], kinds: Sequence[str], sizes: Sequence[int]) -> Iterator[Cell]:
    """Small payloads first: what big ones leave behind in the processes comes last."""
    if "in-flight" in tests:
        yield from (Cell("throughput", kind, UNITS["KB"], 64) for kind in kinds)
    if "streams" in tests:
        yield from (Cell("streams", in_flight=streams) for streams in STREAMS)
    if "paced" in tests:
        yield Cell("paced", in_flight=PACED_STREAMS)
    for size in sorted(sizes):
        for kind in kinds:
            if "latency" in tests:
                yield Cell("latency", kind, size)
            if "chain" in tests:
                yield Cell("chain", kind, size)
            if "throughput" in tests:
                yield Cell("throughput", kind, size, 10)
            if "own" in tests and kind == "numpy":
                yield Cell("own", kind, size)
    if "mixed" in tests:
        yield Cell("mixed", "numpy", BULK)
