"""What the tests of this folder share: an app under load, and what to look at around it."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from pathlib import Path
from typing import Any

from harness import Cluster, outcome
from harness.cluster import until
from load import Account, Load
from replicas import alive, ledger_folder


def seconds() -> float:
    """How long a load runs; set FAULT_SECONDS for longer ones."""
    return float(os.environ.get("FAULT_SECONDS", "6"))


def ready(cluster: Cluster, build: Any, deployment: str, replicas: int) -> Any:
    """A handle whose calls reach all the replicas, those included that stand in for what another test killed."""
    handle = cluster.handle(deployment, build)
    pids: set[Any] = set()

    def all_answer() -> bool:
        pids.clear()
        pids.update(str(outcome(lambda: handle.pid.remote().result(timeout_s=20))) for _ in range(8 * replicas))
        living = alive(ledger_folder(), deployment).values()
        return len(living) == replicas and pids == {str(pid) for pid in living}

    assert until(all_answer, timeout=90, poll=0.2), f"{replicas} replicas never came: {pids}"
    return handle


def under_load(load: Load, length: float, fault: Any = None, *, may_fail: int = 0) -> tuple[Account, Any]:
    """The account of a run that broke no promise, and what the fault returned. AssertionError with what was broken."""
    returned = asyncio.run(load.run(length, fault))
    return accounted(load, may_fail=may_fail), returned


def accounted(load: Load, *, may_fail: int = 0, hops: int = 1) -> Account:
    account = Account(load, ledger_folder(), hops=hops)
    broken = account.broken(may_fail=may_fail)
    assert not broken, "\n".join([str(account.summary()), *broken[:20]])
    test = next((frame.function for frame in inspect.stack() if frame.function.startswith("test_")), "")
    record(f"{test}: {account.summary()} {account.errors()}")
    return account


def record(text: str) -> None:
    """Adds to the file that FAULT_LOG names, if it does."""
    if log := os.environ.get("FAULT_LOG"):
        with open(log, "a") as file:
            file.write(f"{text}\n")


def kill(pid: int, number: int = signal.SIGKILL) -> int:
    os.kill(pid, number)
    return pid


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
