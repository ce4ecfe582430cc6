"""Reads a result file cell by cell: variants beside each other."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.payloads import format_size

OURS = "native"
#: Ours by another lane, and the floors: shown, but not what ours is compared with.
NOT_RIVALS = ("native-tcp", "native-tls", "unix-socket", "memcpy")

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Test:
    title: str
    figure: str
    unit: str
    more_is_better: bool


TESTS = {
    "latency": Test("latency, one call at a time", "p50_ms", "ms", False),
    "chain": Test("chain: caller, middle, leaf and back", "p50_ms", "ms", False),
    "throughput": Test("throughput", "per_s", "calls/s", True),
    "own": Test("latency, with an answer of the leaf's own", "p50_ms", "ms", False),
    "mixed": Test("latency of 1KB beside calls of another size", "p50_ms", "ms", False),
    "streams": Test("streams without a pause", "per_s", "items/s", True),
    "paced": Test("streams of 50 items/s: lag of an item", "p50_ms", "ms", False),
}


@dataclass(frozen=True)
class Key:
    """Which cell. The place is a mode of threading, or a network, or nothing."""

    place: str
    test: str
    kind: str
    size: int
    in_flight: int

    @property
    def label(self) -> str:
        if not self.size:
            return f"{self.in_flight} stream" + ("s" if self.in_flight > 1 else "")
        more = f", {self.in_flight} in flight" if self.in_flight > 1 else ""
        return f"{self.kind} {format_size(self.size)}{more}"


Cells = dict[Key, dict[str, Entry]]


def by_cell(content: Mapping[str, Any]) -> Cells:
    """Cell -> variant -> entry of the file, in the file's order."""
    cells: Cells = {}
    for entry in content["cells"]:
        key = Key(_place(entry), entry["test"], entry["kind"], entry["size"], entry["in_flight"])
        cells.setdefault(key, {})[entry["variant"]] = entry
    return cells


def _place(entry: Entry) -> str:
    mode, network = entry.get("mode"), entry.get("network")
    return ", ".join(filter(None, (mode and f"{mode} mode", network)))


def places(cells: Cells) -> list[str]:
    return list(dict.fromkeys(key.place for key in cells))


def rows(cells: Cells, place: str, test: str, kind: str | None = None) -> Cells:
    return {
        key: entries
        for key, entries in cells.items()
        if (key.place, key.test) == (place, test) and kind in (None, key.kind)
    }


def variants(cells: Cells) -> list[str]:
    return list(dict.fromkeys(name for entries in cells.values() for name in entries))


def value(entry: Entry | None, figure: str) -> float | None:
    """The median of the rounds."""
    spread = range_of(entry, figure)
    return None if spread is None else spread[1]


def range_of(entry: Entry | None, figure: str) -> tuple[float, float, float] | None:
    """The lowest round, the median, the highest."""
    if entry is None or figure not in entry.get("figures", {}):
        return None
    spread = entry["figures"][figure]
    return float(spread["min"]), float(spread["median"]), float(spread["max"])


def ratio(
    entries: Mapping[str, Entry], figure: str, more_is_better: bool, rivals: Sequence[str] | None = None
) -> float | None:
    """How much better ours is than the best of the rivals: 2 is twice as fast, 0.5 half as fast."""
    mine = value(entries.get(OURS), figure)
    names = rivals or [name for name in entries if name != OURS and name not in NOT_RIVALS]
    others = [other for name in names if (other := value(entries.get(name), figure)) is not None]
    if not mine or not others:
        return None
    return mine / max(others) if more_is_better else min(others) / mine


def disturbance(content: Mapping[str, Any]) -> str:
    """What else the machine did meanwhile."""
    busy = [found for entry in content["cells"] if (found := value(entry, "foreign_cores")) is not None]
    if not busy:
        return ""
    cores = content["machine"]["cores"]
    return f"other processes used {statistics.median(busy):.2f} of {cores} cores (median of the cells)"


def number(amount: float | None) -> str:
    """Three digits."""
    if amount is None:
        return ""
    return f"{amount:,.0f}" if amount >= 1000 else f"{amount:.3g}"
