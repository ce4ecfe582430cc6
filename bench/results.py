"""The result files: JSON, one per run of a bench."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import machine
from bench.rounds import Outcome
from bench.samples import figures, to_plain

#: The files that docs/benchmarks.md is made of, one per bench.
FOLDER = Path(__file__).resolve().parent / "results"


@dataclass
class Results:
    """One run. `cells` holds a dict per cell: what was measured, and its figures or its error."""

    bench: str
    options: dict[str, Any]
    about: dict[str, Any] = field(default_factory=machine.describe)
    started: float = field(default_factory=time.time)
    seconds: float = 0.0
    cells: list[dict[str, Any]] = field(default_factory=list)

    def add(self, facts: dict[str, Any], outcome: Outcome, say: Callable[[str], None]) -> None:
        """An entry of `cells`: which cell and variant, and what came out."""
        entry = dict(facts)
        if outcome.samples:
            entry["figures"] = rounded(figures(outcome.samples))
            entry["rounds"] = [to_plain(sample) for sample in outcome.samples]
        if outcome.error is not None:
            entry["error"] = outcome.error
            say(f"  {facts['variant']} failed: {outcome.error.splitlines()[-1]}")
        self.cells.append(entry)

    def write(self, path: Path) -> None:
        self.seconds = round(time.time() - self.started, 1)
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started))
        content = {"bench": self.bench, "started": started, "seconds": self.seconds, **self.about}
        content |= {"options": self.options, "cells": self.cells}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")


BENCHES = ("serve", "two-hosts", "transport")


def run_path(bench: str) -> Path:
    """Where a run's results go when nobody says where."""
    return FOLDER / "runs" / time.strftime(f"{bench}-%Y%m%d-%H%M%S.json")


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def of_folder(folder: Path) -> dict[str, dict[str, Any]]:
    """Bench -> its result file in a folder, in the order of a report; those that there are."""
    paths = {bench: folder / f"{bench}.json" for bench in BENCHES}
    return {bench: load(path) for bench, path in paths.items() if path.exists()}


def rounded(spreads: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: {key: float(f"{value:.5g}") for key, value in spread.items()} for name, spread in spreads.items()}
