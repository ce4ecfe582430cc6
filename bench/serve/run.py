"""Measures the cells, variant by variant, round by round."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from bench.results import Results, rounded
from bench.samples import Sample, figures, to_plain
from bench.serve.plan import PACE, PACED_STREAMS, Cell, Effort
from bench.serve.session import Session, SessionFailed

ANSWER_S = 240.0
SETTLE_S = 0.05  # between two measurements: what the last one left to do is done

Say = Callable[[str], None]


def run(results: Results, mode: str, variants: Sequence[str], cells: Sequence[Cell], effort: Effort, say: Say) -> None:
    """Adds a dict per cell and variant to `results.cells`."""
    with clusters(variants, mode, say) as sessions:
        for number, cell in enumerate(cells, 1):
            say(f"[{mode} {number}/{len(cells)}] {cell}")
            for variant, (samples, error) in measure_cell(sessions, cell, effort).items():
                entry = {"mode": mode, "variant": variant, **cell.facts()}
                if samples:
                    entry["figures"] = rounded(figures(samples))
                    entry["rounds"] = [to_plain(sample) for sample in samples]
                if error:
                    entry["error"] = error
                    say(f"  {variant} failed: {error.splitlines()[-1]}")
                results.cells.append(entry)


@contextlib.contextmanager
def clusters(variants: Sequence[str], mode: str, say: Say) -> Iterator[list[Session]]:
    """One per variant, all up at the same time; idle ones cost next to nothing."""
    began = time.perf_counter()
    sessions: list[Session] = []
    try:
        sessions += [Session(variant, mode) for variant in variants]
        for session in sessions:
            session.ready()
        say(f"{len(sessions)} clusters in mode {mode!r} are up after {time.perf_counter() - began:.0f} s")
        yield sessions
    finally:
        for session in sessions:
            session.stop()
        for session in sessions:
            session.close()


def measure_cell(sessions: Sequence[Session], cell: Cell, effort: Effort) -> dict[str, tuple[list[Sample], str | None]]:
    """Variant -> its samples, and why there are not more. A variant that failed once is left out of later rounds."""
    samples: dict[str, list[Sample]] = {session.variant: [] for session in sessions}
    errors: dict[str, str] = {}
    counts: dict[str, int] = {}
    for round_number in range(-1, effort.rounds):
        turn = round_number % len(sessions)
        for session in (*sessions[turn:], *sessions[:turn]):
            name = session.variant
            if name in errors:
                continue
            try:
                if round_number < 0:
                    counts[name] = warm_up(session, cell, effort.seconds)
                else:
                    samples[name].append(measure(session, cell, effort.seconds, counts[name]))
            except SessionFailed as failure:
                errors[name] = str(failure)
            time.sleep(SETTLE_S)
    return {name: (taken, errors.get(name)) for name, taken in samples.items()}


def warm_up(session: Session, cell: Cell, seconds: float) -> int:
    """Makes connections and pools warm; for streams, how many items each yields in `seconds`."""
    if cell.test != "streams":
        measure(session, cell, seconds / 3, 0)
        return 0
    count = 200
    for _ in range(2):
        rate = measure(session, cell, seconds, count)
        count = max(50, round(rate.count / rate.seconds * seconds / cell.in_flight))
    return count


def measure(session: Session, cell: Cell, seconds: float, count: int) -> Sample:
    if cell.test == "streams":
        method, arguments = "streams", (cell.in_flight, count)
    elif cell.test == "paced":
        method, arguments = "paced_streams", (PACED_STREAMS, round(max(1.0, seconds) * PACE), PACE)
    else:
        target = "middle" if cell.test == "chain" else "leaf"
        least = 2 if cell.in_flight > 1 else 5
        method, arguments = "calls", (target, cell.kind, cell.size, cell.in_flight, seconds, least)
    sample = session.ask(method, *arguments, timeout=ANSWER_S)
    assert isinstance(sample, Sample)
    return sample
