"""Results on a terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench import compare
from bench.compare import TESTS, Cells, Entry, number


def show(content: dict[str, Any]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140
    cells = compare.by_cell(content)
    for place in compare.places(cells):
        for name, test in TESTS.items():
            rows = compare.rows(cells, place, name)
            if not rows:
                continue
            title = f"{test.title}, {place}" if place else test.title
            console.print(_table(f"{title}: {test.unit}", rows, test.figure, test.more_is_better))
            console.print(_table(f"{title}: CPU ms each", rows, "cpu_ms", False))
            if test.figure == "p50_ms":
                console.print(_table(f"{title}: p99, ms", rows, "p99_ms", False))
    console.print(compare.disturbance(content))


def _table(title: str, rows: Cells, figure: str, more_is_better: bool) -> Table:
    variants = compare.variants(rows)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for variant in variants:
        table.add_column(variant, justify="right", no_wrap=True)
    table.add_column("ours is", justify="right", no_wrap=True)
    for key, entries in rows.items():
        times = compare.ratio(entries, figure, more_is_better)
        figures = (_with_spread(entries.get(variant), figure) for variant in variants)
        table.add_row(key.label, *figures, f"[bold]{times:.2f}x" if times else "")
    return table


def _with_spread(entry: Entry | None, figure: str) -> str:
    """The median, and how far the rounds went from it."""
    spread = compare.range_of(entry, figure)
    if spread is None:
        return "failed" if entry else ""
    low, middle, high = spread
    far = max(high - middle, middle - low) / middle if middle else 0.0
    return f"{number(middle)} [dim]±{far:.0%}[/]"
