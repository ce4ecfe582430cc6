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

#: Seconds within which what a dead replica had taken fails: most of it; each one, on two busy cores. At rest it takes
#: less than 0.1 s: the connection ends with the process, and nobody has to be asked.
PROMPT_S, LATEST_S = 2.0, 8.0

#: What a replica may hold when it dies: its share of the calls under way.
HELD = 150


def late(failed: list[Request], death: float) -> list[str]:
    """What was told of the death long after it."""
    waited = sorted((r.ended - max(death, r.began), r.name) for r in failed)
    middle = waited[len(waited) // 2 :][:1]
    slow = [each for each in waited if each[0] > LATEST_S] + [each for each in middle if each[0] > PROMPT_S]
    return [f"{name} was told after {seconds:.1f} s" for seconds, name in slow]


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
            assert time.monotonic() - began < LATEST_S
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
