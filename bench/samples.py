"""What one measurement gives, and how the rounds of a cell become figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Sample:
    """One measurement: plain data that crosses process borders."""

    count: int
    """calls, or items of streams"""
    seconds: float
    cpu_seconds: dict[str, float]
    """by role; "foreign" is everything else on the machine"""
    times_ms: list[float] = field(default_factory=list)
    """latency of each call, or lag of each item; empty where only the rate counts"""
    first_ms: list[float] = field(default_factory=list)
    """from the call to a stream's first item"""


#: Roles whose CPU time is not a call's own cost: the rest of a cluster works whether there are calls or not.
IDLERS = ("rest", "foreign")


def figures(rounds: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Name of the figure -> median, min and max over the rounds."""
    by_round = [_figures(sample) for sample in rounds]
    pooled = sorted(time for sample in rounds for time in sample.times_ms)
    merged = {
        name: {
            "median": statistics.median(one[name] for one in by_round),
            "min": min(one[name] for one in by_round),
            "max": max(one[name] for one in by_round),
        }
        for name in by_round[0]
    }
    if "p99_ms" in merged:
        # A round alone has too few calls for a 99th percentile.
        merged["p99_ms"]["median"] = percentile(pooled, 99)
    return merged


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Nearest rank."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _figures(sample: Sample) -> dict[str, float]:
    values: dict[str, float] = {"count": sample.count, "per_s": sample.count / sample.seconds}
    if sample.times_ms:
        ordered = sorted(sample.times_ms)
        values |= {"p50_ms": statistics.median(ordered), "p99_ms": percentile(ordered, 99)}
    if sample.first_ms:
        values["first_ms"] = statistics.median(sample.first_ms)
    each = 1e3 / max(1, sample.count)
    for role, seconds in sample.cpu_seconds.items():
        if role != "foreign":
            values[f"cpu_{role}_ms"] = seconds * each
    values["cpu_ms"] = sum(seconds for role, seconds in sample.cpu_seconds.items() if role not in IDLERS) * each
    values["foreign_cores"] = sample.cpu_seconds.get("foreign", 0.0) / sample.seconds
    return values


def to_plain(sample: Sample) -> dict[str, Any]:
    """A round as it stands in a result file: figures, not each call's time."""
    return {name: float(f"{value:.6g}") for name, value in _figures(sample).items()}
