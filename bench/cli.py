"""`python -m bench …`"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import IO

import click
from rich.console import Console

from bench import payloads, results, tables
from bench.machine import ROOT
from bench.rounds import Effort
from bench.serve import plan, variants
from bench.transport import peers

DOCUMENT = ROOT / "docs" / "benchmarks.md"
CHARTS = ROOT / "docs" / "benchmarks"

console = Console(highlight=False, markup=False)


class Several(click.ParamType):  # type: ignore[type-arg]
    """A comma-separated choice."""

    name = "list"

    def __init__(self, *choices: str) -> None:
        self._choices = choices

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        chosen = tuple(str(value).split(","))
        for choice in chosen:
            if choice not in self._choices:
                self.fail(f"{choice!r} is not one of {', '.join(self._choices)}", param, ctx)
        return chosen


class Sizes(click.ParamType):  # type: ignore[type-arg]
    name = "list"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return tuple(payloads.parse_size(size) for size in str(value).split(","))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Size(click.ParamType):  # type: ignore[type-arg]
    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else payloads.parse_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Rates(click.ParamType):  # type: ignore[type-arg]
    name = "list"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            return tuple(float(rate) for rate in str(value).split(","))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def main() -> None:
    # Ended like by Ctrl-C: clusters and namespaces are taken down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    commands(prog_name="python -m bench")


@click.group(context_settings={"show_default": True, "max_content_width": 110})
def commands() -> None:
    """Benchmarks of ray_serve_grpc, side by side with what else could carry the calls."""


@commands.command()
@click.option("--sizes", type=Sizes(), default=",".join(payloads.SIZES), help="Payloads.")
@click.option("--kinds", type=Several(*payloads.KINDS), default=",".join(payloads.KINDS), help="Types of payload.")
@click.option("--tests", type=Several(*plan.TESTS), default=",".join(plan.TESTS), help="What to measure.")
@click.option("--variants", "chosen", type=Several(*variants.VARIANTS), default=",".join(variants.VARIANTS))
@click.option(
    "--modes", type=Several(*variants.MODES), default=None, help="Of threading.  [default: both; quick: default]"
)
@click.option("--quick", is_flag=True, help="Short rounds of the main tests: about two minutes for three sizes.")
@click.option("--full", is_flag=True, help="More and longer rounds.")
@click.option("--rounds", type=click.IntRange(1), default=None, help="Turns of each variant.")
@click.option("--seconds", type=float, default=None, help="Of each measurement.")
@click.option("--output", type=click.Path(path_type=Path), default=None, help="Result file.")
def serve(
    sizes: tuple[int, ...],
    kinds: tuple[str, ...],
    tests: tuple[str, ...],
    chosen: tuple[str, ...],
    modes: tuple[str, ...] | None,
    quick: bool,
    full: bool,
    rounds: int | None,
    seconds: float | None,
    output: Path | None,
) -> None:
    """Calls between Ray Serve deployments, over each transport."""
    from bench.serve.run import run

    effort = plan.QUICK if quick else plan.FULL if full else plan.NORMAL
    effort = Effort(rounds or effort.rounds, seconds or effort.seconds)
    if quick and tests == plan.TESTS:
        tests = plan.QUICK_TESTS
    modes = modes or (variants.MODES[:1] if quick else variants.MODES)
    cells = list(plan.cells(tests, kinds, sizes))
    found = results.Results("serve", {"rounds": effort.rounds, "seconds": effort.seconds})
    path = output or results.run_path("serve")
    try:
        for mode in modes:
            run(found, mode, chosen, cells, effort, console.print)
    finally:
        finish(found, path)


@commands.command()
@click.option("--peers", "chosen", type=Several(*peers.NAMES), default=",".join(peers.NAMES), help="Transports.")
@click.option("--loop", type=click.Choice(["asyncio", "uvloop"]), default="asyncio", help="Event loop of both sides.")
@click.option("--quick", is_flag=True, help="Short rounds.")
@click.option("--full", is_flag=True, help="More and longer rounds.")
@click.option("--output", type=click.Path(path_type=Path), default=None, help="Result file.")
def transport(chosen: tuple[str, ...], loop: str, quick: bool, full: bool, output: Path | None) -> None:
    """Two processes without Serve, over our transport and over what else there is."""
    from bench.transport.run import FULL, NORMAL, QUICK, run

    effort = QUICK if quick else FULL if full else NORMAL
    found = results.Results("transport", {"rounds": effort.rounds, "seconds": effort.seconds, "loop": loop})
    path = output or results.run_path("transport")
    try:
        run(found, chosen, loop, effort, console.print)
    finally:
        finish(found, path)


@commands.command("two-hosts")
@click.option("--rates", type=Rates(), default="1,10", help="Of the link, in Gbit/s.")
@click.option("--sizes", type=Sizes(), default="1KB,100KB,1MB,10MB", help="Payloads.")
@click.option("--kinds", type=Several(*payloads.KINDS), default="numpy", help="Types of payload.")
@click.option("--tests", type=Several(*plan.TESTS), default="latency,throughput", help="What to measure.")
@click.option("--variants", "chosen", type=Several(*variants.VARIANTS), default=",".join(variants.VARIANTS))
@click.option("--mode", type=click.Choice(variants.MODES), default=variants.DEFAULT, help="Of threading.")
@click.option("--quick", is_flag=True, help="Short rounds.")
@click.option("--output", type=click.Path(path_type=Path), default=None, help="Result file.")
def two_hosts(
    rates: tuple[float, ...],
    sizes: tuple[int, ...],
    kinds: tuple[str, ...],
    tests: tuple[str, ...],
    chosen: tuple[str, ...],
    mode: str,
    quick: bool,
    output: Path | None,
) -> None:
    """Serve's calls between two network namespaces joined by a link of a given rate. Needs root."""
    from bench.two_hosts.network import Unavailable
    from bench.two_hosts.run import run

    effort = plan.QUICK if quick else plan.FULL
    cells = list(plan.cells(tests, kinds, sizes))
    found = results.Results("two-hosts", {"rounds": effort.rounds, "seconds": effort.seconds})
    try:
        run(found, rates, mode, chosen, cells, effort, console.print)
    except Unavailable as error:
        raise click.ClickException(str(error)) from None
    finally:
        finish(found, output or results.run_path("two-hosts"))


@commands.command()
@click.option("--variant", type=click.Choice(variants.VARIANTS), default=variants.NATIVE)
@click.option("--mode", type=click.Choice(variants.MODES), default=variants.DEFAULT, help="Of threading.")
@click.option("--kind", type=click.Choice(payloads.KINDS), default="bytes", help="Type of payload.")
@click.option("--size", type=Size(), default="1KB", help="Payload.")
@click.option("--in-flight", type=click.IntRange(1), default=64)
@click.option("--seconds", type=float, default=8.0, help="Of each view.")
@click.option("--lines", type=click.IntRange(1), default=25, help="Of each table.")
@click.option("--output", type=click.File("w"), default="-", help="Markdown file.")
def profile(
    variant: str,
    mode: str,
    kind: str,
    size: int,
    in_flight: int,
    seconds: float,
    lines: int,
    output: IO[str],
) -> None:
    """Where a caller's and a replica's CPU time goes at saturation: threads, Python functions, what is below them."""
    from bench.profile import profile

    for block in profile(variant, mode, kind, size, in_flight, seconds, lines, console.print):
        print(block, file=output, flush=True)


@commands.command()
@click.option("--variant", type=click.Choice(variants.VARIANTS), default=variants.NATIVE)
@click.option("--mode", type=click.Choice(variants.MODES), default=variants.DEFAULT, help="Of threading.")
@click.option("--output", type=click.File("w"), default="-", help="Markdown file.")
def memory(variant: str, mode: str, output: IO[str]) -> None:
    """What calls of 100 MB add to the memory of a caller and a replica, and what 10,000 of 1 MB leave."""
    from bench.memory import memory

    for block in memory(variant, mode, console.print):
        print(block, file=output, flush=True)


@commands.command()
@click.option("--results", "folder", type=click.Path(path_type=Path, exists=True), default=results.FOLDER)
@click.option("--charts", type=click.Path(path_type=Path), default=CHARTS, help="Folder.")
@click.option("--form", type=click.Choice(["svg", "png"]), default="svg")
def plot(folder: Path, charts: Path, form: str) -> None:
    """Draws charts of the result files in a folder."""
    from bench import plot

    for bench, content in results.of_folder(folder).items():
        for path in plot.draw(bench, content, charts, form):
            console.print(path)


@commands.command()
@click.option("--results", "folder", type=click.Path(path_type=Path, exists=True), default=results.FOLDER)
@click.option("--charts", type=click.Path(path_type=Path), default=CHARTS, help="Folder.")
@click.option("--output", type=click.Path(path_type=Path), default=DOCUMENT)
def report(folder: Path, charts: Path, output: Path) -> None:
    """Makes docs/benchmarks.md of the result files in a folder, and of limits.md in it, which is written by hand."""
    from bench import report

    limits = folder / "limits.md"
    text = report.make(results.of_folder(folder), charts, limits.read_text() if limits.exists() else "")
    output.write_text(text)
    console.print(output)


def finish(found: results.Results, path: Path) -> None:
    """Also what there is of a run that was broken off."""
    if found.cells:
        found.write(path)
        tables.show(results.load(path))
        console.print(f"{found.seconds:.0f} s; results in {path}")
