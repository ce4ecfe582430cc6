"""Times what happens in Python, for a bounded number of values per second.

Timing each value would cost more than everything else that metrics cost. The first `PER_SECOND` values of each
second and process are timed, and the others pay for one look at `left`.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import TypeVar

from ray_serve_grpc import _native

PER_SECOND = 100

#: How many more values are timed in this second. Threads may count one twice.
left = 0

T = TypeVar("T")


def renew() -> None:
    """A second has begun. Nothing is timed in a process where this is never called."""
    global left
    left = PER_SECOND


def timed(stage: str, function: Callable[..., T], *arguments: object) -> T:
    """What `function` returns. Its time is counted unless it raises."""
    global left
    left -= 1
    began = perf_counter_ns()
    value = function(*arguments)
    _native.observe(stage, perf_counter_ns() - began)
    return value
