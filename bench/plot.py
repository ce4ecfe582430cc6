"""Draws the charts of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import compare
from bench.bar import bars
from bench.compare import OURS, TESTS, Cells, Test
from bench.payloads import format_size

_COLOURS = {
    "actor": "#d58a2a",
    "stock": "#7a7a7a",
    "grpc.aio": "#7a7a7a",
    "native": "#1f6fb4",
    "native-tcp": "#7fb2da",
    "native-tls": "#4f86b5",
    "pygrpc-native": "#4c9a6a",
    "pyzmq": "#a65aa0",
    "unix-socket": "#c0b060",
    "memcpy": "#d0d0d0",
}
_LABELS = {"actor": "actor calls, Plasma", "stock": "Ray's grpc.aio", "native": "ray_serve_grpc"}


def name(bench: str, place: str, form: str = "svg") -> str:
    """Of the chart's file."""
    words = f"{bench} {place}".lower().replace(",", "").replace("/s", "").split()
    return "-".join(words) + f".{form}"


def draw(bench: str, content: Mapping[str, Any], folder: Path, form: str) -> Iterator[Path]:
    """A chart for each mode or network. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"font.size": 9, "svg.hashsalt": "bench", "axes.spines.top": False, "axes.spines.right": False}
    )
    cells = compare.by_cell(content)
    folder.mkdir(parents=True, exist_ok=True)
    for place in compare.places(cells):
        path = folder / name(bench, place, form)
        _chart(bench, cells, place, path)
        yield path


def _chart(bench: str, cells: Cells, place: str, path: Path) -> None:
    """A row of panels for each test: the figure by size, and how many times better ours is."""
    import matplotlib.pyplot as plt

    panels = list(_panels(cells, place))
    figure, axes = plt.subplots(len(panels), 2, figsize=(10, 2.9 * len(panels)), squeeze=False, layout="constrained")
    for (title, test, rows), (left, right) in zip(panels, axes, strict=True):
        left.set_title(title, loc="left", fontsize=10)
        _figures(left, rows, test)
        _ratios(right, bench, rows, test)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=130)
    plt.close(figure)


def _panels(cells: Cells, place: str) -> Iterator[tuple[str, Test, Cells]]:
    """(title, test, rows that share an axis)"""
    for test_name, test in TESTS.items():
        rows = compare.rows(cells, place, test_name)
        for kind, many in dict.fromkeys((key.kind, key.in_flight if key.size else 0) for key in rows):
            shared = {key: e for key, e in rows.items() if key.kind == kind and (not key.size or key.in_flight == many)}
            title = f"{test.title}, {kind}" if kind else test.title
            if len(shared) > 1:
                yield title + (f", {many} in flight" if many > 1 else ""), test, shared


def _figures(axes: Any, rows: Cells, test: Test) -> None:
    ticks = [format_size(key.size) if key.size else str(key.in_flight) for key in rows]
    for variant in compare.variants(rows):
        spreads = [compare.range_of(entries.get(variant), test.figure) for entries in rows.values()]
        present = [(x, *spread) for x, spread in enumerate(spreads) if spread is not None]
        if not present:
            continue
        x, low, middle, high = (list(column) for column in zip(*present, strict=True))
        reach = [
            [m - at for m, at in zip(middle, low, strict=True)],
            [at - m for m, at in zip(middle, high, strict=True)],
        ]
        style = {"marker": "o", "markersize": 3.5, "capsize": 2, "linewidth": 2.2 if variant == OURS else 1.2}
        label = _LABELS.get(variant, variant)
        axes.errorbar(x, middle, yerr=reach, label=label, color=_COLOURS.get(variant), **style)
    axes.set_yscale("log")
    axes.set_xticks(range(len(ticks)), ticks)
    axes.set_ylabel(test.unit)
    axes.grid(axis="y", alpha=0.3)


def _ratios(axes: Any, bench: str, rows: Cells, test: Test) -> None:
    """Bars for what ours reaches, and a mark where it should be."""
    ticks = [format_size(key.size) if key.size else str(key.in_flight) for key in rows]
    for x, (key, entries) in enumerate(rows.items()):
        times = compare.ratio(entries, test.figure, test.more_is_better)
        if times is not None:
            axes.bar(x, times, width=0.6, color=_COLOURS[OURS], alpha=0.85)
            axes.annotate(f"{times:.1f}", (x, times), ha="center", va="bottom", fontsize=8)
        for bar in bars(bench, key):
            if bar.figure == test.figure and not bar.rivals:
                axes.hlines(bar.times, x - 0.42, x + 0.42, color="black", linewidth=1.4)
    axes.axhline(1, color="#aa3333", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(ticks)), ticks)
    axes.set_ylabel("times better than the best other")
