"""The deployments: one that measures, and one that gives back what it gets."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

import ray_serve_grpc

#: Calls before the first one that counts.
WARM_UP = 3
#: More than are ever in flight, so that no call is rejected.
MOST_ONGOING = 1000

# Serve's decorator hides from a type checker that a class becomes a deployment.
_deployment: Any = serve.deployment(
    max_ongoing_requests=MOST_ONGOING,
    graceful_shutdown_wait_loop_s=0.1,
    graceful_shutdown_timeout_s=5,
    logging_config={"enable_access_log": False},
)


@_deployment
class Echo:
    async def __call__(self, value: Any) -> Any:
        return value


@_deployment
class Caller:
    """Every measured call goes from this replica to the other one; the driver only says which."""

    def __init__(self, echo: DeploymentHandle[Any]) -> None:
        self._echo = echo

    async def measure(self, size: int, seconds: float, in_flight: int, by_reference: bool) -> dict[str, float]:
        """Calls with `size` bytes there and back for `seconds`: {"p50_s", "calls", "per_second"}."""
        handle = self._echo.options(_by_reference=by_reference)
        value = payload(size)
        for _ in range(WARM_UP):
            if len(await handle.remote(value)) != size:
                raise RuntimeError("what came back is not what was sent")
        times: list[float] = []
        began = time.perf_counter()

        async def keep_calling() -> None:
            while time.perf_counter() - began < seconds:
                start = time.perf_counter()
                await handle.remote(value)
                times.append(time.perf_counter() - start)

        await asyncio.gather(*(keep_calling() for _ in range(in_flight)))
        elapsed = time.perf_counter() - began
        return {"p50_s": statistics.median(times), "calls": len(times), "per_second": len(times) / elapsed}

    async def status(self) -> dict[str, Any]:
        return ray_serve_grpc.status()

    async def kind(self) -> str:
        return type(payload(1)).__name__


def payload(size: int) -> Any:
    """A numpy array of bytes, as most large values are; bytes where there is no numpy."""
    try:
        import numpy
    except ImportError:
        return bytes(size)
    return numpy.zeros(size, numpy.uint8)


def application(variables: dict[str, str], node_ip: str) -> Application:
    """Both replicas on the node with this address, with these environment variables, and without a CPU reserved."""
    options = {
        "num_cpus": 0,
        "resources": {f"node:{node_ip}": 0.001},
        "runtime_env": {"env_vars": variables},
    }
    caller: Any = Caller
    echo: Any = Echo
    built: Application = caller.options(ray_actor_options=options).bind(echo.options(ray_actor_options=options).bind())
    return built


def own_node() -> str:
    """Address of the node that this process runs on."""
    return str(ray.util.get_node_ip_address())
