"""Measures the cells, variant by variant, round by round."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from bench.children import Child
from bench.results import Results
from bench.rounds import Effort, alternate, items_for
from bench.samples import Sample
from bench.serve.plan import PACE, Cell
from bench.serve.variants import NATIVE, environment

ANSWER_S = 240.0

Say = Callable[[str], None]


def run(results: Results, mode: str, variants: Sequence[str], cells: Sequence[Cell], effort: Effort, say: Say) -> None:
    """Adds an entry per cell and variant to `results`."""
    with clusters(variants, mode, say) as running:
        measure_cells(results, {"mode": mode}, running, cells, effort, say)
        note_lanes(results, mode, running)


def note_lanes(results: Results, mode: str, running: Sequence[Child]) -> None:
    """What carried the calls of our variant, as its caller's replica counted them."""
    for child in running:
        if child.name == NATIVE and child.alive:
            results.about.setdefault("lanes", {})[mode] = child.ask("status", timeout=ANSWER_S)["calls"]


def measure_cells(
    results: Results,
    facts: dict[str, object],
    running: Sequence[Child],
    cells: Sequence[Cell],
    effort: Effort,
    say: Say,
) -> None:
    for number, cell in enumerate(cells, 1):
        say(f"[{' '.join(map(str, facts.values()))} {number}/{len(cells)}] {cell}")
        outcomes = alternate(
            running,
            effort.rounds,
            partial(warm_up, cell, effort.seconds),
            partial(measure, cell, effort.seconds),
        )
        for variant, outcome in outcomes.items():
            results.add({**facts, "variant": variant, **cell.facts()}, outcome, say)


@contextlib.contextmanager
def clusters(variants: Sequence[str], mode: str, say: Say) -> Iterator[list[Child]]:
    """One per variant, all up at the same time; idle ones cost next to nothing."""
    with ready(
        lambda: [
            Child(variant, "bench.serve.cluster", [variant], environment(variant, mode, os.environ))
            for variant in variants
        ],
        say,
    ) as running:
        yield running


@contextlib.contextmanager
def ready(start: Callable[[], list[Child]], say: Say) -> Iterator[list[Child]]:
    began = time.perf_counter()
    running = start()
    try:
        for child in running:
            child.ready()
        say(f"{len(running)} clusters are up after {time.perf_counter() - began:.0f} s")
        yield running
    finally:
        for child in running:
            child.stop()
        for child in running:
            child.close()


def warm_up(cell: Cell, seconds: float, child: Child) -> int:
    """Makes connections and pools warm; for streams, how many items each yields in `seconds`."""
    if cell.test == "streams":
        return items_for(seconds, cell.in_flight, partial(measure, cell, seconds, child))
    measure(cell, seconds / 3, child, 0)
    return 0


def measure(cell: Cell, seconds: float, child: Child, count: int) -> Sample:
    method = "calls"
    arguments: tuple[object, ...]
    if cell.test == "streams":
        method, arguments = "streams", (cell.in_flight, count)
    elif cell.test == "mixed":
        method, arguments = "mixed", (cell.kind, cell.size, seconds)
    elif cell.test == "paced":
        method, arguments = "paced_streams", (cell.in_flight, round(max(1.0, seconds) * PACE), PACE)
    else:
        target = {"chain": "middle", "own": "own"}.get(cell.test, "leaf")
        least = 2 if cell.in_flight > 1 else 5
        arguments = (target, cell.kind, cell.size, cell.in_flight, seconds, least)
    sample = child.ask(method, *arguments, timeout=ANSWER_S)
    assert isinstance(sample, Sample)
    return sample
