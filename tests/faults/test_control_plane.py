"""Serve's own processes die, and Ray's GCS: calls and streams between live replicas go on as if nothing had been."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray
from faults import accounted, ready, seconds
from harness import Cluster, same_as_actor
from harness.cluster import until
from load import LIGHT, Load
from programs import run
from replicas import relayed

#: Before it, a GCS that is to outlive its process needs a Redis.
HAS_STORAGE = tuple(map(int, ray.__version__.split(".")[:2])) >= (2, 60)


@pytest.mark.parametrize("process", ["SERVE_CONTROLLER_ACTOR", "SERVE_PROXY_ACTOR"])
@same_as_actor(native_only=True, expect=True, timeout=240)
def test_no_call_is_lost_when_a_process_of_serve_is_killed(cluster: Cluster, process: str) -> Any:
    loads = [
        Load(ready(cluster, relayed, "Target", 3), cluster.key(), 200.0, LIGHT),
        Load(cluster.app(relayed), cluster.key(), 40.0, LIGHT),
    ]

    def running() -> dict[str, Any]:
        named = ray.util.list_named_actors(all_namespaces=True)
        return {each["name"]: each["namespace"] for each in named if each["name"].startswith(process)}

    def fault() -> None:
        found = running()
        assert found, f"there is no {process}"
        for name, namespace in found.items():
            ray.kill(ray.get_actor(name, namespace), no_restart=False)

    async def load() -> None:
        await asyncio.gather(loads[0].run(seconds(), fault), loads[1].run(seconds()))

    asyncio.run(load())
    for each, hops in zip(loads, (1, 2), strict=True):
        accounted(each, hops=hops)
    assert until(lambda: bool(running()), timeout=60)
    # Replicas are looked after again as well: what is deployed now is the same app.
    ready(cluster, relayed, "Target", 3)
    return True


def test_calls_go_on_without_a_gcs_also_past_a_replica_that_dies():
    said = run("gcs.py", "gone")
    assert "\nkept\n" in said, said


@pytest.mark.skipif(not HAS_STORAGE, reason="a GCS that keeps its state without Redis came with Ray 2.60")
def test_calls_go_on_while_the_gcs_restarts_and_deployments_after_it(tmp_path):
    said = run("gcs.py", "restart", extra={"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tmp_path)})
    assert "\nkept\n" in said, said
