"""Puts the applications up, measures, and takes them down again whatever happens."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve

from ray_serve_grpc.cli import cluster
from ray_serve_grpc.cli.bench import app
from ray_serve_grpc.seam import replicas

Report = dict[str, Any]

ACTOR, STOCK, OURS = "actor calls", "Ray's grpc.aio", "ray_serve_grpc"
TRANSPORTS = (ACTOR, STOCK, OURS)

#: Environment variables of the replicas. Ray's own transport takes 4 MiB unless told to take more.
WITHOUT_PLUGIN = {"RAY_SERVE_GRPC_NATIVE": "0", "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1)}
WITH_PLUGIN = {"RAY_SERVE_GRPC_NATIVE": "1"}

#: Bytes that are in flight at once, at most, and calls.
MOST_BYTES = 64 * 10**6
MOST_CALLS = 16

#: A transport wins where it is better than the next one by this factor.
CLEARLY = 1.05
#: Seconds for an application to come up: a runtime environment may have to be made.
START_S = 120.0

LATENCY, THROUGHPUT = "latency", "throughput"


class BenchFailed(Exception):
    """The applications did not come up, or another transport carried the calls. The text says which and why."""


@dataclass(frozen=True)
class Plan:
    sizes: tuple[int, ...]
    #: for each transport, size and mode, in each round
    seconds: float
    rounds: int

    def steps(self) -> int:
        return len(TRANSPORTS) * len(self.sizes) * 2 * self.rounds


QUICK = Plan(sizes=(1_000, 100_000, 1_000_000, 10_000_000), seconds=0.4, rounds=2)
FULL = Plan(sizes=(1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000), seconds=1.5, rounds=3)


@contextlib.contextmanager
def joined(address: str) -> Iterator[str]:
    """In the cluster at `address`; with "auto" and none running, in a local one that ends with the context.

    Raises:
        cluster.NoCluster
    """
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(cluster.joined(address))
        except cluster.NoCluster as error:
            if address != "auto" or not error.absent:
                raise
            found = stack.enter_context(cluster.joined("local"))
        yield found


def measured(plan: Plan, progress: Callable[[str, int], None]) -> Report:
    """Figures of each transport, on the node of this process.

    Args:
        progress: is told what is being done, and how many steps are behind.

    Raises:
        BenchFailed
    """
    # Serve tells of each step of a deployment.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with interrupted_by_termination(), serving(), contextlib.ExitStack() as stack:
        callers = {}
        for name, variables in (("grpc-aio", WITHOUT_PLUGIN), ("ours", WITH_PLUGIN)):
            progress(f"deploying {name}", 0)
            callers[name] = stack.enter_context(deployed(f"ray-serve-grpc-bench-{os.getpid()}-{name}", variables))
        paths = {
            ACTOR: (callers["grpc-aio"], True),
            STOCK: (callers["grpc-aio"], False),
            OURS: (callers["ours"], False),
        }
        samples: dict[tuple[str, str, int], list[float]] = {}
        done = 0
        for turn in range(plan.rounds):
            for size in plan.sizes:
                # Each round begins with another one.
                for transport in TRANSPORTS[turn % 3 :] + TRANSPORTS[: turn % 3]:
                    caller, by_reference = paths[transport]
                    for mode in (LATENCY, THROUGHPUT):
                        progress(f"{transport}, {size} bytes", done)
                        in_flight = 1 if mode == LATENCY else in_flight_with(size)
                        found = _result(caller.measure.remote(size, plan.seconds, in_flight, by_reference))
                        figure = found["p50_s"] if mode == LATENCY else found["per_second"]
                        samples.setdefault((mode, transport, size), []).append(figure)
                        done += 1
        progress("taking the applications down", done)
        lanes = _carried(_result(callers["ours"].status.remote()), _result(callers["grpc-aio"].status.remote()))
        return {
            "payload": _result(callers["ours"].kind.remote()),
            "ray_version": ray.__version__,
            "lanes": lanes,
            "seconds": plan.seconds,
            "rounds": plan.rounds,
            "rows": [_row(mode, size, samples) for mode in (LATENCY, THROUGHPUT) for size in plan.sizes],
        }


def in_flight_with(size: int) -> int:
    return max(2, min(MOST_CALLS, MOST_BYTES // size))


def winner(mode: str, figures: dict[str, float]) -> str | None:
    """The best transport, or None where the best two are about equal. Less is better for latencies only."""
    order = sorted(figures, key=figures.__getitem__, reverse=mode == THROUGHPUT)
    best, second = figures[order[0]], figures[order[1]]
    return order[0] if max(best, second) / min(best, second) >= CLEARLY else None


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """With Serve running; shut down in the end only if it did not run before."""
    if replicas.serve_is_running():
        yield
        return
    serve.start(proxy_location="Disabled")
    try:
        yield
    finally:
        with undisturbed():
            serve.shutdown()


@contextlib.contextmanager
def deployed(name: str, variables: dict[str, str]) -> Iterator[Any]:
    """Handle to the caller of an application of its own, which is deleted in the end.

    Raises:
        BenchFailed: it does not come up.
    """
    try:
        try:
            application = app.application(variables, app.own_node())
            handle = serve.run(application, name=name, route_prefix=None, blocking=False)
        except (RuntimeError, TimeoutError, ray.exceptions.RayError) as error:
            raise BenchFailed(f"the application {name} did not come up: {error}") from error
        yield handle
    finally:
        with undisturbed():
            serve.delete(name)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait: what was put up is taken down first."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def interrupted_by_termination() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _result(response: Any) -> Any:
    return response.result(timeout_s=START_S)


def _carried(ours: Report, stock: Report) -> list[str]:
    """The lanes that carried the calls of ours.

    Raises:
        BenchFailed: something else did.
    """
    lanes = {lane: sum(kinds.values()) for lane, kinds in ours["calls"].items()}
    if not ours["active"] or lanes.pop("stock", 0) or not any(lanes.values()):
        reason = ours["reason"] or "calls took Ray's own protocol"
        raise BenchFailed(f"the plugin did not carry the calls: {reason}; see ray-serve-grpc doctor")
    if stock["active"]:
        raise BenchFailed("the plugin was active where RAY_SERVE_GRPC_NATIVE=0 should have switched it off")
    used = [lane for lane, count in lanes.items() if count]
    return [*used, "shm"] if ours["shared_memory"].get("messages_sent") else used


def _row(mode: str, size: int, samples: dict[tuple[str, str, int], list[float]]) -> Report:
    figures = {transport: statistics.median(samples[mode, transport, size]) for transport in TRANSPORTS}
    in_flight = 1 if mode == LATENCY else in_flight_with(size)
    return {
        "mode": mode,
        "unit": "s" if mode == LATENCY else "calls/s",
        "bytes": size,
        "in_flight": in_flight,
        "figures": figures,
        "winner": winner(mode, figures),
    }
