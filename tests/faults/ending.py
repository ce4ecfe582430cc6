"""A driver that ends with calls under way. Usage: python ending.py HOW FOLDER

Before that, Serve is shut down with calls under way and started again in the same process.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import ray
from ray import serve


@serve.deployment(max_ongoing_requests=200, graceful_shutdown_timeout_s=1, ray_actor_options={"num_cpus": 0})
class Slow:
    async def __call__(self, seconds: float) -> float:
        import asyncio

        await asyncio.sleep(seconds)
        return seconds

    async def items(self) -> Any:
        import asyncio

        while True:
            yield bytes(100_000)
            await asyncio.sleep(0.01)


def under_way(handle: Any) -> list[Any]:
    """Calls and streams that have begun and will not end by themselves, one of them awaited in a thread."""
    calls = [handle.remote(600.0) for _ in range(30)]
    streams = [handle.options(stream=True).items.remote() for _ in range(5)]
    for stream in streams:
        next(stream)
    threading.Thread(target=wait_for, args=(calls[0],), daemon=True).start()
    return [*calls, *streams]


def wait_for(call: Any) -> None:
    try:
        call.result()
    except Exception as error:
        print(f"the thread that waited was told: {type(error).__name__}", flush=True)


def main() -> None:
    how, folder = sys.argv[1:]
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=256 * 2**20,
        log_to_driver=False,
        _temp_dir=folder,
    )
    serve.start(proxy_location="Disabled")
    kept = under_way(serve.run(Slow.bind(), route_prefix=None))
    serve.shutdown()
    handle = serve.run(Slow.bind(), route_prefix=None)
    assert handle.remote(0.01).result(timeout_s=60) == 0.01
    kept += under_way(handle)
    if how == "interrupt":
        try:
            print("ready", flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    if how == "ray.shutdown":
        ray.shutdown()
    print("done", flush=True)


if __name__ == "__main__":
    main()
