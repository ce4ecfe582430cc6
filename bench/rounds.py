"""Measures a cell for several variants in turns, round by round."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.children import Child, ChildFailed
from bench.samples import Sample

SETTLE_S = 0.05  # between two measurements: what the last one left to do is done


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    seconds: float
    """of each measurement; big payloads take longer, since a round needs some calls"""


@dataclass
class Outcome:
    """Of one cell, for one variant."""

    samples: list[Sample]
    error: str | None = None
    """why there are not more samples"""


def alternate(
    children: Sequence[Child],
    rounds: int,
    warm_up: Callable[[Child], int],
    measure: Callable[[Child, int], Sample],
) -> dict[str, Outcome]:
    """Variant -> outcome. Each round starts with another variant.

    What `warm_up` returns is handed to `measure`. A variant that failed is left out of later rounds.
    """
    outcomes = {child.name: Outcome([]) for child in children}
    learned: dict[str, int] = {}
    for number in range(-1, rounds):
        turn = number % len(children)
        for child in (*children[turn:], *children[:turn]):
            outcome = outcomes[child.name]
            if outcome.error is not None:
                continue
            try:
                if number < 0:
                    learned[child.name] = warm_up(child)
                else:
                    outcome.samples.append(measure(child, learned[child.name]))
            except ChildFailed as failure:
                outcome.error = str(failure)
            time.sleep(SETTLE_S)
    return outcomes


def items_for(seconds: float, streams: int, measure: Callable[[int], Sample]) -> int:
    """How many items each of so many streams yields in so many seconds, found by trying."""
    count = 200
    for _ in range(2):
        sample = measure(count)
        count = max(50, round(sample.count / sample.seconds * seconds / streams))
    return count
