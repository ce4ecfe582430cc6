"""Replicas that die under load: what they had taken fails once, the rest goes elsewhere, and nothing runs twice."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from faults import kill, ready, seconds, under_load
from harness import Cluster, outcome, same_as_actor
from harness.cluster import until
from load import Load, Request
from ray.exceptions import RayActorError
from replicas import alive, is_alive, ledger_folder, runs, three

#: A call that a dead replica had taken fails within 2 s on a machine at rest; these have two cores for it all.
PROMPT_S = 8.0

#: What a replica may hold when it dies: its share of the calls under way.
HELD = 150


def late(failed: list[Request], death: float) -> list[str]:
    """Those that were told of the death long after it."""
    return [
        f"{r.name} was told after {r.ended - death:.1f} s" for r in failed if r.ended - max(death, r.began) > PROMPT_S
    ]


@same_as_actor(native_only=True, expect=True, timeout=240)
def test_a_replica_killed_under_load_fails_what_it_had_taken_and_nothing_else(cluster: Cluster) -> Any:
    handle = ready(cluster, three, "Target", 3)
    load = Load(handle, cluster.key())

    def fault() -> tuple[str, float]:
        actor, pid = random.choice(sorted(alive(ledger_folder(), "Target").items()))
        kill(pid)
        return actor, time.monotonic()

    account, (actor, death) = under_load(load, seconds(), fault, may_fail=HELD)
    assert not late(account.failed, death)
    assert {request.error.actor_id for request in account.failed} <= {actor}
    return True


@pytest.mark.parametrize("how", ["exit", "SystemExit", "abort"])
@same_as_actor(native_only=True, expect=True, timeout=240)
def test_user_code_that_ends_its_replica_under_load_costs_that_one_only(cluster: Cluster, how: str) -> Any:
    """The call that ends it, which is poison to any replica, fails once and is not sent to the next one."""
    handle = ready(cluster, three, "Target", 3)
    load = Load(handle, cluster.key())
    before = alive(ledger_folder(), "Target")

    def fault() -> tuple[float, Any, str]:
        name = f"poison-{cluster.key()}"
        began = time.monotonic()
        response = handle.die.remote(name, how)
        try:
            response.result(timeout_s=30)
        except RayActorError as error:
            return began, error.actor_id, name
        raise AssertionError("the call that ended its replica was answered")

    account, (death, actor, poison) = under_load(load, seconds(), fault, may_fail=HELD)
    assert runs(ledger_folder())[poison] == [actor]
    assert not late(account.failed, death)
    assert {request.error.actor_id for request in account.failed} <= {actor}
    assert [known for known, pid in before.items() if not is_alive(pid)] == [actor]
    return True


@same_as_actor(native_only=True, expect=[12, 12, True], timeout=240)
def test_each_poison_request_costs_one_replica_and_runs_once(cluster: Cluster) -> Any:
    """One after the other, as soon as a replica answers again."""
    handle = ready(cluster, three, "Target", 3)
    names = [f"poison-{cluster.key()}" for _ in range(12)]
    failed = 0
    for name in names:
        assert until(lambda: isinstance(outcome(lambda: handle.pid.remote().result(timeout_s=20)), int), timeout=60)
        error = outcome(lambda name=name: handle.die.remote(name, "exit").result(timeout_s=30))
        failed += "RayActorError" in error["caught by"]
    ran = [runs(ledger_folder()).get(name, []) for name in names]
    return [failed, sum(map(len, ran)), len({actor for actors in ran for actor in actors}) == len(names)]
