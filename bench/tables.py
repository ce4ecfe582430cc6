"""Results on a terminal."""

from __future__ import annotations

import statistics
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.payloads import format_size
from bench.serve.variants import NATIVE

#: test -> (title, figure, unit, whether more is better)
TESTS = {
    "latency": ("latency, one at a time", "p50_ms", "ms", False),
    "chain": ("chain: caller - middle - leaf and back", "p50_ms", "ms", False),
    "throughput": ("throughput", "per_s", "calls/s", True),
    "streams": ("streams without pause", "per_s", "items/s", True),
    "paced": ("streams of 50 items/s: lag", "p50_ms", "ms", False),
}

#: Ours by another lane, and the floors.
NOT_RIVALS = ("native-tcp", "unix-socket", "memcpy")

Cells = dict[tuple[Any, ...], dict[str, dict[str, Any]]]


def by_cell(content: dict[str, Any]) -> Cells:
    """(place, test, kind, size, in flight) -> variant -> entry of the file; in the file's order.

    The place is a mode of threading, or a network, or nothing.
    """
    grouped: Cells = {}
    for entry in content["cells"]:
        place = ", ".join(str(entry[name]) for name in ("mode", "network") if name in entry)
        key = (place, *(entry[name] for name in ("test", "kind", "size", "in_flight")))
        grouped.setdefault(key, {})[entry["variant"]] = entry
    return grouped


def value(entry: dict[str, Any] | None, figure: str) -> float | None:
    if entry is None or figure not in entry.get("figures", {}):
        return None
    return float(entry["figures"][figure]["median"])


def ratio(entries: dict[str, dict[str, Any]], figure: str, more_is_better: bool, ours: str = NATIVE) -> float | None:
    """How much better ours is than the best of the others: 2 is twice as fast, 0.5 half as fast."""
    mine = value(entries.get(ours), figure)
    others = [
        other
        for name, entry in entries.items()
        if name not in NOT_RIVALS and name != ours and (other := value(entry, figure)) is not None
    ]
    if not mine or not others:
        return None
    return mine / max(others) if more_is_better else min(others) / mine


def show(content: dict[str, Any]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140
    cells = by_cell(content)
    for place in dict.fromkeys(key[0] for key in cells):
        for test, (title, figure, unit, more_is_better) in TESTS.items():
            rows = {key: entries for key, entries in cells.items() if key[:2] == (place, test)}
            if not rows:
                continue
            title = f"{title}, {place}" if place else title
            console.print(_table(f"{title}: {unit}", rows, figure, more_is_better))
            console.print(_table(f"{title}: CPU ms each", rows, "cpu_ms", False))
            if test in ("latency", "chain", "paced"):
                console.print(_table(f"{title}: p99, ms", rows, "p99_ms", False))
    console.print(disturbance(content))


def _table(title: str, rows: Cells, figure: str, more_is_better: bool) -> Table:
    variants = list(dict.fromkeys(name for entries in rows.values() for name in entries))
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for variant in variants:
        table.add_column(variant, justify="right", no_wrap=True)
    table.add_column("ours is", justify="right", no_wrap=True)
    for (_, _, kind, size, in_flight), entries in rows.items():
        name = f"{kind} {format_size(size)} x{in_flight}" if size else f"{in_flight} streams"
        times = ratio(entries, figure, more_is_better)
        table.add_row(
            name.removesuffix(" x1"),
            *(with_spread(entries.get(variant), figure) for variant in variants),
            f"[bold]{times:.2f}x" if times else "",
        )
    return table


def disturbance(content: dict[str, Any]) -> str:
    """What else the machine did meanwhile."""
    busy = [found for entry in content["cells"] if (found := value(entry, "foreign_cores")) is not None]
    if not busy:
        return ""
    return f"other processes used {statistics.median(busy):.2f} of {content['machine']['cores']} cores (median)"


def with_spread(entry: dict[str, Any] | None, figure: str) -> str:
    """The median, and how far the rounds went from it."""
    middle = value(entry, figure)
    if entry is None or middle is None:
        return "failed" if entry else ""
    spread = entry["figures"][figure]
    far = max(spread["max"] - middle, middle - spread["min"]) / middle if middle else 0.0
    return f"{number(middle)} [dim]±{far:.0%}[/]"


def number(amount: float | None) -> str:
    if amount is None:
        return ""
    if amount >= 1000:
        return f"{amount:,.0f}"
    return f"{amount:.3g}"
