"""The figures of a bench as tables, also where they are not in our favour."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ray_serve_grpc.cli.bench.run import LATENCY, THROUGHPUT, TRANSPORTS

Report = dict[str, Any]

TITLES = {LATENCY: "One call at a time: median in ms", THROUGHPUT: "Several calls in flight: calls per second"}


def show(report: Report, out: Console) -> None:
    for mode, title in TITLES.items():
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, title_style="bold")
        table.add_column("there and back", no_wrap=True)
        if mode == THROUGHPUT:
            table.add_column("in flight", justify="right")
        for transport in TRANSPORTS:
            table.add_column(transport, justify="right", no_wrap=True)
        table.add_column("winner")
        for row in report["rows"]:
            if row["mode"] == mode:
                several = [str(row["in_flight"])] if mode == THROUGHPUT else []
                cells = [_cell(mode, transport, row) for transport in TRANSPORTS]
                table.add_row(size_text(row["bytes"]), *several, *cells, row["winner"] or "none is clearly best")
        out.print()
        out.print(table)
    out.print()
    out.print(
        f"Payload: {report['payload']}. Ray {report['ray_version']}; both replicas on this node; "
        f"ray_serve_grpc carried its calls over {' and '.join(report['lanes'])}. Median of {report['rounds']} rounds "
        f"of {report['seconds']:g} s. Actor calls pass through the object store where a value is not small."
    )


def _cell(mode: str, transport: str, row: Report) -> str:
    figure = row["figures"][transport]
    text = f"{1e3 * figure:.2f}" if mode == LATENCY else f"{figure:.0f}"
    return f"[bold]{text}[/]" if transport == row["winner"] else text


def size_text(size: int) -> str:
    for unit, factor in (("MB", 10**6), ("KB", 10**3)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} B"
