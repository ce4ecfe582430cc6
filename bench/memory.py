"""Memory of a caller and a replica, as Markdown: what a large call adds, and what many calls leave."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.payloads import UNITS
from bench.serve.run import clusters

ROLES = ("caller", "leaf")
LARGE = 100 * UNITS["MB"]
BATCHES = 10
CALLS_OF_A_BATCH = 1000
#: Unused shared memory is given back after this.
IDLE_S = 70.0  # more than shared memory is kept without use
_SAMPLE_S = 0.02

Say = Callable[[str], None]


def memory(variant: str, mode: str, say: Say) -> Iterator[str]:
    """Blocks of Markdown, as they come."""
    with clusters([variant], mode, say) as (child,):
        pids = [child.said[role][0] for role in ROLES]

        def calls(size: int, least: int) -> None:
            child.ask("calls", "leaf", "numpy", size, 1, 0.0, least, timeout=600)

        calls(1000, 200)
        yield f"{variant}, mode {mode}, caller and replica together, MB of memory (a page that both map counts once)\n"
        idle = _proportional(pids)
        with Highest(pids) as highest:
            calls(LARGE, 5)
        after = _proportional(pids)
        time.sleep(IDLE_S)
        yield _table(
            ["idle", "highest in 5 calls of 100 MB and back", "after them", f"{IDLE_S:.0f} s later"],
            [idle, highest.bytes, after, _proportional(pids)],
        )
        grown = []
        for _ in range(BATCHES):
            calls(UNITS["MB"], CALLS_OF_A_BATCH)
            grown.append(_proportional(pids))
        yield _table([f"{(batch + 1) * CALLS_OF_A_BATCH:,} calls of 1 MB" for batch in range(BATCHES)], grown)


class Highest:
    """The most that the processes have together while the body runs."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.bytes = 0
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Highest:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            self.bytes = max(self.bytes, _proportional(self._pids))


def _proportional(pids: Sequence[int]) -> int:
    rollups = (Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids)
    return sum(int(match[1]) * 1024 for text in rollups if (match := re.search(r"^Pss:\s+(\d+) kB", text, re.M)))


def _table(heads: Sequence[str], figures: Sequence[int]) -> str:
    cells = " | ".join(f"{figure / 1e6:,.0f}" for figure in figures)
    return f"| {' | '.join(heads)} |\n|{' ---: |' * len(heads)}\n| {cells} |\n"
