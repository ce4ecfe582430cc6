"""What metrics cost: CPU per call with them and without, in turns, both ends in one process beside a local Ray.

Usage: python -m bench.metrics_cost [PAIRS]

Calls are small (one integer) and follow each other without a pause, 16 at a time, for two seconds with metrics
switched on, then two without, PAIRS times. All CPU of the process counts: both ends, the I/O thread, the exporter.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray

from ray_serve_grpc import _native, background, config, timing
from ray_serve_grpc.client import gRPCReplicaWrapper
from ray_serve_grpc.seam import adapter
from ray_serve_grpc.server import ReplicaServer

SECONDS = 2.0
AT_ONCE = 16


class Replica:
    """What the server asks of Ray's `Replica`, with user code that does nothing."""

    def get_num_ongoing_requests(self) -> int:
        return 0

    async def handle_request_with_rejection(
        self, metadata: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        yield adapter.ReplicaQueueLengthInfo(True, 1)
        yield args[0]


async def calls_for(seconds: float, wrapper: gRPCReplicaWrapper) -> float:
    """CPU seconds per call."""
    strings = ("request", "internal", "method", *[""] * 6)
    metadata = adapter.metadata_from_wire(strings, b"", is_streaming=False)
    until = time.monotonic() + seconds
    made = 0

    async def one_after_the_other() -> None:
        nonlocal made
        while time.monotonic() < until:
            request = SimpleNamespace(args=[made], kwargs={}, metadata=metadata)
            result = wrapper.send_request_python(request, with_rejection=True)
            await result.get_rejection_response()
            await result.get_async()
            made += 1

    began = time.process_time()
    await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))
    return (time.process_time() - began) / made


def switch(on: bool) -> None:
    background.stop()
    if on:
        background.start()
    else:
        _native.time_calls(False)
        timing.left = 0


async def measure(pairs: int, folder: Path) -> None:
    actor_id = ray.ActorID(os.urandom(16))
    path = str(folder / "r.sock")
    server = ReplicaServer(
        Replica(),  # type: ignore[arg-type]
        host="127.0.0.1",
        unix_path=path,
        identity=actor_id.hex(),
        authorization=None,
    )
    await server.start()
    wrapper = gRPCReplicaWrapper(actor_id, [f"unix:{path}"], deployment="Model")
    await calls_for(SECONDS, wrapper)
    costs: dict[bool, list[float]] = {True: [], False: []}
    for number in range(pairs):
        for on in (True, False) if number % 2 else (False, True):
            switch(on)
            costs[on].append(await calls_for(SECONDS, wrapper) * 1e6)
    wrapper.close()
    await server.stop(1)
    ratios = [on / off - 1 for on, off in zip(costs[True], costs[False], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    print(f"CPU per call, both ends: {statistics.median(costs[True]):.1f} µs with metrics,", end=" ")
    print(f"{statistics.median(costs[False]):.1f} µs without, medians of {pairs} turns each")
    print(f"paired difference: median {quartiles[1]:+.2%}, quartiles {quartiles[0]:+.2%} to {quartiles[2]:+.2%}")


def tick_cost() -> None:
    present = background.Background()
    present.tick()
    samples = []
    for _ in range(50):
        began = time.thread_time()
        present.tick()
        samples.append(time.thread_time() - began)
    print(
        f"one export, with every series told before: {statistics.median(samples) * 1e3:.2f} ms of CPU, once per second"
    )


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    assert config.settings().metrics, "RAY_SERVE_GRPC_METRICS=0"
    with tempfile.TemporaryDirectory(prefix="rsm") as folder:
        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        asyncio.run(measure(pairs, Path(folder)))
        tick_cost()
        ray.shutdown()


if __name__ == "__main__":
    main()
