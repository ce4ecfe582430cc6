"""The doctor's report as text, which reads as well in a file as on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ray_serve_grpc.cli.doctor import name_of

Report = dict[str, Any]

STYLES = {"ok": "green", "failed": "bold red", "skipped": "dim"}
#: Columns where there is no terminal to fit in.
PLAIN_WIDTH = 120


def show(report: Report) -> None:
    printed(lambda out: _show(report, out))


def printed(render: Callable[[Console], None]) -> None:
    """On stdout; in a pipe or a file without colours, in lines of a fixed width, and without the padding of tables."""
    out = Console(highlight=False)
    if out.is_terminal:
        render(out)
        return
    out = Console(highlight=False, width=PLAIN_WIDTH)
    with out.capture() as captured:
        render(out)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _show(report: Report, out: Console) -> None:
    machine, cluster = report["machine"], report["cluster"]
    _heading(out, "This machine")
    _process(out, machine)
    _probes(out, machine["probes"])
    _settings(out, machine["settings"])
    if cluster is None:
        _heading(out, "Cluster")
        out.print("  none running here")
    else:
        _cluster(out, cluster)
    _findings(out, report["findings"])


def _heading(out: Console, title: str) -> None:
    out.print()
    out.print(Text(title, style="bold"))


def _rows(out: Console, rows: Iterable[tuple[str, ...]], *, titles: tuple[str, ...] = ()) -> None:
    table = Table(box=None, pad_edge=False, show_header=bool(titles), header_style="dim")
    columns = list(rows)
    width = len(titles) or (len(columns[0]) if columns else 0)
    for number in range(width):
        table.add_column(titles[number] if titles else "", no_wrap=number == 0, overflow="fold")
    for row in columns:
        table.add_row(*row)
    out.print(Padding(table, (0, 0, 0, 2)))


def _process(out: Console, told: Report) -> None:
    active = "active" if told["active"] else f"not active: {told['reason']}"
    _rows(
        out,
        [
            ("plugin", f"{told['version']}, {escape(active)}"),
            ("Ray", f"{told['ray_version']}, adapter {told['adapter'] or 'none'}"),
            ("Python", told["python"]),
            ("platform", told["platform"]),
            *(("lane " + lane, _lane(found)) for lane, found in told["lanes"].items()),
        ],
    )


def _lane(found: Report) -> str:
    return "[green]usable[/]" if found["usable"] else f"[yellow]not used[/]: {escape(found['reason'])}"


def _probes(out: Console, probes: list[Report]) -> None:
    _heading(out, "Tried")
    _rows(
        out,
        [
            (probe["name"], f"[{STYLES[probe['outcome']]}]{probe['outcome']}[/]", escape(probe["detail"]))
            for probe in probes
        ],
    )


def _settings(out: Console, changed: dict[str, Report]) -> None:
    _heading(out, "Settings that differ from their defaults")
    if not changed:
        out.print("  none")
        return
    _rows(
        out,
        [
            (variable, escape(found["value"]), "Ray's" if found["default"] is None else f"default {found['default']}")
            for variable, found in changed.items()
        ],
    )


def _cluster(out: Console, cluster: Report) -> None:
    _heading(out, f"Cluster at {cluster['address']}, {cluster['nodes']} node(s)")
    if not cluster["serve"]:
        out.print("  Serve does not run there")
        return
    if not cluster["replicas"]:
        out.print("  no replica runs there")
    else:
        rows = [
            (escape(name_of(replica)), replica["node_ip"], escape(_state(replica)), escape(_versions(replica)))
            for replica in cluster["replicas"]
        ]
        _rows(out, rows, titles=("replica", "node", "plugin", "version, Ray"))
        _heading(out, "Ping from here, round trip in microseconds")
        _rows(
            out,
            [_ping(replica, ping) for replica in cluster["replicas"] for ping in replica["pings"]],
            titles=("replica", "lane", "median", "least", "speaks"),
        )
        for replica in cluster["replicas"]:
            _peer(out, name_of(replica), replica["process"])
    for proxy in cluster["proxies"]:
        _heading(out, f"Proxy of node {proxy['node_id'][:8]}")
        out.print(f"  plugin {escape(_state(proxy))}")


def _peer(out: Console, name: str, told: Report | None) -> None:
    """What of a replica's own report is not as usual."""
    if told is None:
        return
    rows = [
        (f"lane {lane}", escape(found["reason"])) for lane, found in told["lanes"].items() if not found["usable"]
    ] + [(variable, escape(found["value"])) for variable, found in told["settings"].items()]
    if rows:
        _heading(out, f"In {name}")
        _rows(out, rows)


def _state(peer: Report) -> str:
    told = peer["process"]
    if peer.get("java"):
        return "none: it is written in Java"
    if told is None:
        return f"unknown: {peer['error']}"
    return "active" if told["active"] else f"not active: {told['reason']}"


def _versions(replica: Report) -> str:
    told = replica["process"]
    return "" if told is None else f"{told['version']}, {told['ray_version']} ({told['adapter'] or 'no adapter'})"


def _ping(replica: Report, ping: Report) -> tuple[str, ...]:
    if ping["error"]:
        return (escape(name_of(replica)), ping["lane"], "[red]failed[/]", "", escape(ping["error"]))
    times = ping["round_trip_us"]
    speaks = f"ray_serve_grpc {ping['version']}" if ping["version"] else "Ray's own protocol"
    shared = ", shared memory" if ping["shared_memory"] else ""
    return (
        escape(name_of(replica)),
        ping["lane"],
        f"{times['median']:.0f}",
        f"{times['min']:.0f}",
        f"{speaks}{shared}",
    )


def _findings(out: Console, findings: list[Report]) -> None:
    if not findings:
        _heading(out, "Nothing wrong was found.")
        return
    _heading(out, f"Wrong: {len(findings)}")
    for number, finding in enumerate(findings, 1):
        out.print(f"  {number}. [bold red]{escape(finding['where'])}[/]: {escape(finding['problem'])}")
        out.print(Padding(f"hint: {escape(finding['hint'])}", (0, 0, 0, 5)))
