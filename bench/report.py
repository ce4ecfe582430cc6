"""Makes docs/benchmarks.md of the result files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import compare, plot
from bench.bar import Bar, bars
from bench.compare import OURS, TESTS, Cells, Entry, number
from bench.payloads import format_size

TITLES = {
    "serve": "Calls between deployments",
    "two-hosts": "Calls between two hosts",
    "transport": "The transport alone",
}
PLACES = {
    "default mode": "Default mode of threading",
    "throughput mode": "Throughput-optimised mode (`RAY_SERVE_THROUGHPUT_OPTIMIZED=1`)",
}
_SHORT = {"own": "own answer", "throughput": "calls/s"}
EXPLANATIONS = {
    "serve": """\
A caller's replica calls a leaf's replica, which sends the payload back, on one machine. `actor` is Serve's default:
actor calls, payloads through Plasma. `stock` is Ray's own grpc.aio transport, its message limit raised. `native` is
ray_serve_grpc. An echo is what ray#59908 measured; since a transport may hand memory that it got on as it is, the
latency is measured with an answer of the leaf's own too.""",
    "two-hosts": """\
The same, with the two replicas on Ray nodes in two network namespaces, joined by a veth pair whose rate `tc tbf`
limits. Plasma must copy between two stores here. Both hosts share the machine's cores.""",
    "transport": """\
Two processes without Ray, each of which unpickles what it gets and pickles what it sends. `native` over a Unix socket,
as between replicas on one node, and over TCP; `pygrpc-native` is its server with a grpc.aio client; `pyzmq` sends
pickles of protocol 5 with their buffers as frames of their own, over a Unix socket. Two floors stand beside them, and
are not counted among the others: `unix-socket` is asyncio's streams with a length and a pickle and nothing else, and
`memcpy` is the two copies that an echo between processes cannot do without.""",
}


def make(contents: Mapping[str, Mapping[str, Any]], charts: Path, limits: str) -> str:
    """`contents`: bench -> its result file. `charts`: folder of the charts, beside the document. `limits`: Markdown
    about what limits the cells below the bar, written by hand."""
    lines = [
        "<!-- Made by `python -m bench report` of the files in bench/results. Do not edit. -->",
        "# Benchmarks",
        "",
        "Measured side by side in one run: each variant in processes of its own, all alive at the same time, taking",
        "turns cell by cell and round by round. A figure is the median of the rounds, with the lowest and the highest",
        "round behind it. *Ours is* tells how many times better ours is than the best of the others: 2x is half the",
        "latency, or twice the calls. The bar is what the project set out to reach. 1 KB is 1,024 bytes.",
        "CPU counts the caller's and the called processes, and the raylet with the object store in it.",
        "",
        "`make bench` measures again in about ten minutes, `make bench-full` all of this; the code is in `bench/`.",
        "",
        *_summary(contents),
    ]
    for bench, content in contents.items():
        lines += ["", f"## {TITLES[bench]}", "", EXPLANATIONS[bench], "", *_about(content), ""]
        cells = compare.by_cell(content)
        lines += _glance(cells)
        for place in compare.places(cells):
            lines += _place(bench, cells, place, charts)
    if limits:
        lines += ["", "## What limits the cells below the bar", "", limits.strip()]
    return "\n".join(lines).rstrip() + "\n"


def _summary(contents: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """How many bars are reached, and each that is not."""
    reached, missed, slower = 0, [], []
    for bench, content in contents.items():
        for key, entries in compare.by_cell(content).items():
            own = TESTS[key.test]
            times = compare.ratio(entries, own.figure, own.more_is_better)
            name = ", ".join(filter(None, (TITLES[bench], key.place, key.test, key.label)))
            if times is not None and times < 1:
                slower.append(f"- {name}: {_times(times)}")
            for bar in bars(bench, key):
                times = compare.ratio(entries, bar.figure, bar.more_is_better, bar.rivals)
                if times is not None and times >= bar.times:
                    reached += 1
                else:
                    missed.append(f"- {name}, {_bar(bar)}: {_times(times)}")
    yield f"{reached} of {reached + len(missed)} bars are reached."
    if missed:
        yield from ("", f"Below the bar ({len(missed)}):", "", *missed)
    if slower:
        yield from ("", f"Slower than the best of the others ({len(slower)}):", "", *slower)


def _glance(cells: Cells) -> Iterator[str]:
    """How many times better ours is, by size: a column for each mode, test and kind."""
    columns: dict[tuple[str, str, str, int], Cells] = {}
    for key, entries in cells.items():
        if key.size:
            columns.setdefault((key.place, key.test, key.kind, key.in_flight), {})[key] = entries
    columns = {column: rows for column, rows in columns.items() if len(rows) > 1}
    if not columns:
        return
    yield from ("Ours is so many times better than the best of the others:", "")
    sizes = sorted({key.size for rows in columns.values() for key in rows})
    yield _row(
        ["", *("<br>".join(filter(None, (_SHORT.get(test, test), kind, place))) for place, test, kind, _ in columns)]
    )
    yield _row(["---", *("---:" for _ in columns)])
    for size in sizes:
        ratios = []
        for (_, test, _, _), rows in columns.items():
            entries = next((entries for key, entries in rows.items() if key.size == size), {})
            times = compare.ratio(entries, TESTS[test].figure, TESTS[test].more_is_better)
            ratios.append("" if times is None else f"{times:.1f}")
        yield _row([format_size(size), *ratios])
    yield ""


def _about(content: Mapping[str, Any]) -> Iterator[str]:
    machine, versions = content["machine"], content["versions"]
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    options = ", ".join(f"{name} {value}" for name, value in content["options"].items())
    yield f"- {machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, Linux {machine['kernel']}"
    yield f"- {names}"
    yield f"- commit {content['commit']}{', with changes' if content['changed'] else ''}, {content['started']}"
    for mode, lanes in content.get("lanes", {}).items():
        carried = (f"{sum(kinds.values()):,} by {lane}" for lane, kinds in lanes.items() if any(kinds.values()))
        yield f"- calls of ours, {mode} mode: {', '.join(carried)}"
    yield f"- {options} each; {content['seconds']:.0f} s in all; {compare.disturbance(content)}"


def _place(bench: str, cells: Cells, place: str, charts: Path) -> Iterator[str]:
    if place:
        yield from (f"### {PLACES.get(place, place.removeprefix('default mode, '))}", "")
    chart = charts / plot.name(bench, place)
    if chart.exists():
        yield from (f"![{TITLES[bench]}, {place}]({charts.name}/{chart.name})", "")
    for name, test in TESTS.items():
        rows = compare.rows(cells, place, name)
        if not rows:
            continue
        yield from (f"**{test.title[0].upper()}{test.title[1:]}**, {test.unit}", "")
        yield from _table(bench, rows, test.figure, test.more_is_better)
        more = {"p99_ms": "99th percentile, ms", "first_ms": "First item of a stream, ms", "cpu_ms": "CPU, ms each"}
        shown: tuple[str, ...] = ("first_ms", "cpu_ms") if name == "streams" else ("p99_ms", "cpu_ms")
        shown = {"throughput": ("cpu_ms",), "mixed": ("p99_ms",)}.get(name, shown)
        yield from (f"<details><summary>{', '.join(more[figure].split(',')[0] for figure in shown)}</summary>", "")
        for figure in shown:
            yield from (more[figure], "", *_table(bench, rows, figure, False))
        yield from ("</details>", "")


def _table(bench: str, rows: Cells, figure: str, more_is_better: bool) -> Iterator[str]:
    variants = compare.variants(rows)
    header = ["", *variants, "ours is", "bar", ""]
    yield _row(header)
    yield _row(["---", *("---:" for _ in header[1:-1]), "---"])
    for key, entries in rows.items():
        times = compare.ratio(entries, figure, more_is_better)
        own = [bar for bar in bars(bench, key) if bar.figure == figure]
        yield _row(
            [
                key.label,
                *(_with_range(entries.get(variant), figure, bold=variant == OURS) for variant in variants),
                _times(times),
                "; ".join(map(_bar, own)),
                _verdict(entries, own),
            ]
        )
    yield ""


def _row(columns: Sequence[str]) -> str:
    return f"| {' | '.join(columns)} |"


def _with_range(entry: Entry | None, figure: str, *, bold: bool) -> str:
    spread = compare.range_of(entry, figure)
    if spread is None:
        return "failed" if entry is not None and "error" in entry else ""
    low, middle, high = map(number, spread)
    return f"{f'**{middle}**' if bold else middle} ({low}–{high})"  # noqa: RUF001


def _bar(bar: Bar) -> str:
    unit = {"cpu_ms": " CPU", "per_s": "", "p50_ms": ""}[bar.figure]
    rivals = f" of {' and '.join(bar.rivals)}" if bar.rivals else ""
    return f"{bar.times:.2g}x{unit}{rivals}"


def _verdict(entries: Mapping[str, Entry], own: Sequence[Bar]) -> str:
    if not own:
        return ""
    for bar in own:
        times = compare.ratio(entries, bar.figure, bar.more_is_better, bar.rivals)
        if times is None or times < bar.times:
            return f"below: {_times(times)}" if bar.rivals else "below"
    return "reached"


def _times(times: float | None) -> str:
    return "not measured" if times is None else f"{times:.2f}x"
