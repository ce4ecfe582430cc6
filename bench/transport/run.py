"""Measures the cells, peer by peer, round by round."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from bench.children import Child, ChildFailed
from bench.payloads import UNITS
from bench.results import Results
from bench.rounds import Effort, alternate, items_for
from bench.samples import Sample
from bench.serve.plan import STREAMS, Cell

ANSWER_S = 120.0
QUICK = Effort(rounds=3, seconds=0.4)
NORMAL = Effort(rounds=5, seconds=0.5)
FULL = Effort(rounds=7, seconds=0.8)

Say = Callable[[str], None]


def cells() -> Iterator[Cell]:
    small = UNITS["KB"]
    yield Cell("latency", "bytes", small)
    yield Cell("throughput", "bytes", small, 10)
    yield Cell("throughput", "bytes", small, 64)
    for size in (100 * UNITS["KB"], UNITS["MB"], 10 * UNITS["MB"]):
        yield Cell("latency", "numpy", size)
        yield Cell("throughput", "numpy", size, 10)
    yield from (Cell("streams", in_flight=streams) for streams in STREAMS)


def run(results: Results, peers: Sequence[str], loop: str, effort: Effort, say: Say) -> None:
    with contextlib.ExitStack() as started:
        clients: list[Child] = []
        servers: dict[str, int] = {}
        for peer in peers:
            try:
                client, servers[peer] = started.enter_context(pair(peer, loop))
                clients.append(client)
            except ChildFailed as failure:
                say(f"{peer} is left out: {str(failure).splitlines()[-1]}")
        wanted = list(cells())
        for number, cell in enumerate(wanted, 1):
            say(f"[{number}/{len(wanted)}] {cell}")
            # What has no transport has no streams, and nothing to gain from several calls at a time.
            able = [client for client in clients if client.name != "memcpy" or cell.test == "latency"]
            outcomes = alternate(
                able,
                effort.rounds,
                partial(warm_up, servers, cell, effort.seconds),
                partial(measure, servers, cell, effort.seconds),
            )
            for peer, outcome in outcomes.items():
                results.add({"variant": peer, **cell.facts()}, outcome, say)


@contextlib.contextmanager
def pair(peer: str, loop: str) -> Iterator[tuple[Child, int]]:
    """A server and a client of it, each a process; the client, and the server's process id."""
    with (
        tempfile.TemporaryDirectory(prefix="rsb", ignore_cleanup_errors=True) as folder,
        contextlib.ExitStack() as ends,
    ):

        def child(side: str) -> Child:
            started = Child(peer, "bench.transport.process", [side, peer, folder, loop], os.environ)
            ends.callback(started.close)
            return started

        server = child("server")
        server.ready()
        client = child("client")
        client.ready()
        yield client, server.said


def warm_up(servers: dict[str, int], cell: Cell, seconds: float, child: Child) -> int:
    if cell.test == "streams":
        return items_for(seconds, cell.in_flight, partial(measure, servers, cell, seconds, child))
    measure(servers, cell, seconds / 2, child, 0)
    return 0


def measure(servers: dict[str, int], cell: Cell, seconds: float, child: Child, count: int) -> Sample:
    server = servers[child.name]
    if cell.test == "streams":
        sample = child.ask("streams", server, cell.in_flight, count, timeout=ANSWER_S)
    else:
        least = 2 if cell.in_flight > 1 else 5
        arguments = (server, cell.kind, cell.size, cell.in_flight, seconds, least)
        sample = child.ask("calls", *arguments, timeout=ANSWER_S)
    assert isinstance(sample, Sample)
    return sample
