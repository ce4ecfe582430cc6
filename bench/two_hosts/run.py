"""Measures the cells at each rate of the link, variant by variant, round by round."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence

from bench.children import Child
from bench.results import Results
from bench.rounds import Effort
from bench.serve.plan import Cell
from bench.serve.run import measure_cells, ready
from bench.serve.variants import environment
from bench.two_hosts.network import Network, network

Say = Callable[[str], None]


def run(
    results: Results,
    rates: Sequence[float],
    mode: str,
    variants: Sequence[str],
    cells: Sequence[Cell],
    effort: Effort,
    say: Say,
) -> None:
    """Adds an entry per rate, cell and variant to `results`. Raises network.Unavailable."""
    with clusters(variants, mode, say) as (running, networks):
        for rate in rates:
            for one in networks:
                one.limit(rate)
            measure_cells(results, {"mode": mode, "network": f"{rate:g} Gbit/s"}, running, cells, effort, say)


@contextlib.contextmanager
def clusters(variants: Sequence[str], mode: str, say: Say) -> Iterator[tuple[list[Child], list[Network]]]:
    """A pair of hosts and a cluster on them for each variant."""
    with contextlib.ExitStack() as made:
        networks = [made.enter_context(network(variant)) for variant in variants]

        def start() -> list[Child]:
            return [start_on(one, variant, mode) for one, variant in zip(networks, variants, strict=True)]

        yield made.enter_context(ready(start, say)), networks


def start_on(pair: Network, variant: str, mode: str) -> Child:
    # A cluster of several hosts has one token; one that Ray makes by itself is one host's.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # Several clusters of two nodes start at the same time: on two cores 30 seconds are not always enough.
    patience = {"RAY_raylet_start_wait_time_s": "120"}
    return Child(
        variant,
        "bench.two_hosts.cluster",
        [variant, pair.namespaces[1]],
        environment(variant, mode, os.environ) | token | patience,
        prefix=pair.prefix(0),
    )
