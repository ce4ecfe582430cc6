"""Serve's own processes die: calls between live replicas go on as if nothing had been."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from faults import ready, seconds, under_load
from harness import Cluster, same_as_actor
from harness.cluster import until
from load import LIGHT, Load
from replicas import three


@pytest.mark.parametrize("process", ["SERVE_CONTROLLER_ACTOR", "SERVE_PROXY_ACTOR"])
@same_as_actor(native_only=True, expect=True, timeout=240)
def test_no_call_is_lost_when_a_process_of_serve_is_killed(cluster: Cluster, process: str) -> Any:
    handle = ready(cluster, three, "Target", 3)
    load = Load(handle, cluster.key(), 200.0, LIGHT)

    def running() -> dict[str, Any]:
        named = ray.util.list_named_actors(all_namespaces=True)
        return {each["name"]: each["namespace"] for each in named if each["name"].startswith(process)}

    def fault() -> None:
        found = running()
        assert found, f"there is no {process}"
        for name, namespace in found.items():
            ray.kill(ray.get_actor(name, namespace), no_restart=False)

    under_load(load, seconds(), fault)
    assert until(lambda: bool(running()), timeout=60)
    # Replicas are looked after again as well: what is deployed now is the same app.
    ready(cluster, three, "Target", 3)
    return True
