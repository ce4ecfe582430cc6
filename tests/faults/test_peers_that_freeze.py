"""A replica that is stopped where it stands, under load: noticed, left, and used again when it goes on.

What lay in its socket was given up by then and ran elsewhere: it must not run once more. `under_load` fails on any
request that ran twice.
"""

from __future__ import annotations

import random
import signal
import time
from typing import Any

from faults import kill, ready, seconds, under_load
from harness import Cluster, same_as_actor
from load import LIGHT, Load
from replicas import alive, ledger_folder, three

#: The default interval and timeout of keepalive are 15 s together.
FROZEN_S = 18.0
NOTICED_S = 20.0
SLACK_S = 5.0

#: Enough for a connection to be given up with the impatient settings below, and for its requests to run elsewhere.
NAP_S = 3.5
IMPATIENT = {"RAY_SERVE_GRPC_KEEPALIVE_INTERVAL_S": "0.5", "RAY_SERVE_GRPC_KEEPALIVE_TIMEOUT_S": "1"}
NAPS = 6

#: Slots of the replica: what it may hold when it freezes, and what may come to it before it is noticed.
HELD = 100


@same_as_actor(native_only=True, expect=True, timeout=300)
def test_a_frozen_replica_is_left_within_twenty_seconds_and_used_again_after(cluster: Cluster) -> Any:
    handle = ready(cluster, three, "Target", 3)
    load = Load(handle, cluster.key(), 100.0, LIGHT)

    def fault() -> str:
        actor, pid = random.choice(sorted(alive(ledger_folder(), "Target").items()))
        kill(pid, signal.SIGSTOP)
        time.sleep(FROZEN_S)
        kill(pid, signal.SIGCONT)
        return actor

    before = alive(ledger_folder(), "Target")
    account, actor = under_load(load, seconds(), fault, may_fail=HELD)
    waited = [request.ended - request.began for request in account.failed]
    assert max(waited, default=0.0) < NOTICED_S + SLACK_S
    assert {request.error.actor_id for request in account.failed} <= {actor}
    # Serve's own probe is patient here: the same three processes answer again.
    ready(cluster, three, "Target", 3)
    assert alive(ledger_folder(), "Target") == before
    return True


@same_as_actor(native_only=True, expect=True, timeout=300, extra=IMPATIENT)
def test_replicas_that_doze_off_in_turn_run_nothing_twice(cluster: Cluster) -> Any:
    handle = ready(cluster, three, "Target", 3)
    load = Load(handle, cluster.key(), 150.0, LIGHT)

    def fault() -> None:
        for nap in range(NAPS):
            replicas = sorted(alive(ledger_folder(), "Target").items())
            _, pid = replicas[nap % len(replicas)]
            kill(pid, signal.SIGSTOP)
            time.sleep(NAP_S)
            kill(pid, signal.SIGCONT)
            time.sleep(0.5)

    account, _ = under_load(load, seconds(), fault, may_fail=HELD * NAPS)
    assert account.ends["answered"] > account.load.made / 2
    ready(cluster, three, "Target", 3)
    return True
