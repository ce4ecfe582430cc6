"""Replicas that leave in order under load: every request is answered, by one replica."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from faults import accounted, ready
from harness import Cluster, same_as_actor
from harness.cluster import app_name, until
from load import Account, Load
from ray import serve
from replicas import Server, Target, alive, ledger_folder, target, three

CALLS = int(os.environ.get("FAULT_CALLS", "1500"))


@target(num_replicas=3)
class Leaving(Server):
    pass


def leaving() -> Any:
    return Leaving.bind(ledger_folder())


def deploy(build: Any, deployment: Any, edition: int) -> None:
    serve.run(deployment.bind(ledger_folder(), edition), name=app_name(build), route_prefix=None)


@same_as_actor(native_only=True, expect=True, timeout=300)
def test_nothing_is_lost_when_an_app_is_scaled_down_and_up_under_load(cluster: Cluster) -> Any:
    handle = ready(cluster, three, "Target", 3)
    load = Load(handle, cluster.key())

    def fault() -> None:
        deploy(three, Target.options(num_replicas=1), 0)
        assert until(lambda: len(alive(ledger_folder(), "Target")) == 1, timeout=60)
        deploy(three, Target.options(num_replicas=3), 0)

    asyncio.run(load.make(CALLS, fault))
    accounted(load)
    return True


@same_as_actor(native_only=True, expect=True, timeout=300)
def test_nothing_is_lost_when_an_app_is_deployed_anew_under_load(cluster: Cluster) -> Any:
    handle = ready(cluster, three, "Target", 3)
    load = Load(handle, cluster.key())
    before = alive(ledger_folder(), "Target")

    def fault() -> None:
        deploy(three, Target, os.getpid() + len(before))
        assert until(lambda: not before.keys() & alive(ledger_folder(), "Target").keys(), timeout=90)

    asyncio.run(load.make(CALLS, fault))
    accounted(load)
    return True


@pytest.mark.parametrize("how", ["delete", "shutdown"])
@same_as_actor(native_only=True, expect=[True, True], timeout=300, extra={"RAY_SERVE_GRPC_LOG_LEVEL": "INFO"})
def test_what_was_taken_is_answered_when_serve_goes_under_load(cluster: Cluster, how: str) -> Any:
    """The load ends there: what comes after has no replica to go to."""
    handle = ready(cluster, leaving, "Leaving", 3)
    # A request that finds no replica waits for one, as long as its caller does.
    load = Load(handle, cluster.key(), patience=15.0)

    def fault() -> None:
        load.stop()
        if how == "delete":
            serve.delete(app_name(leaving))
        else:
            serve.shutdown()

    asyncio.run(load.run(3.0, fault, at=0.8))
    account = Account(load, ledger_folder())
    untrue = [request for request in load.open.values() if account.ran.get(request.name)]
    twice = [name for name, actors in account.ran.items() if len(actors) > 1]
    assert not untrue, [(r.name, r.end, r.error) for r in untrue]
    cluster._apps.clear()
    return [not twice, account.ends["answered"] > 100]
