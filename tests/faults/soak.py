"""`make soak`: the mixed load for half an hour, with a fault every few seconds, and what it leaves behind.

Usage: python soak.py SECONDS [FOLDER]. Draws FOLDER/soak.svg and writes FOLDER/soak.json. Ends with 1 when a request
was lost, ran twice or was answered wrong, when one failed that no fault explains, or when a process that lived through
it all holds more at the end than it did once it was warm.

Three deployments: `Target`, whose replicas are killed, frozen, made to end themselves, scaled and deployed anew;
`Steady`, which nothing is done to, and `Relay`, which passes calls on to Target by handle and is killed at times.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Cluster, outcome
from harness.cluster import app_name, until
from load import MOST_UNDER_WAY, Account, Load
from ray import serve
from replicas import Relay, Server, Target, alive, ledger_folder, target
from watch import HOLDINGS, growth, holdings

SAMPLE_S = 5.0
FAULT_EVERY_S = (4.0, 10.0)
RATES = {"Target": 130.0, "Steady": 60.0, "Relay": 30.0}

#: Requests that one fault may fail: what a replica holds.
MAY_FAIL = 100

#: What a warm process may gain: memory that the allocator keeps, connections to the replicas of the moment, threads
#: of pools that fill late.
ALLOWED = {"resident MiB": 60.0, "files": 24.0, "threads": 6.0, "segments": 12.0, "under way": 40.0}


# More slots than requests that the load has under way: Ray's router, once it took its only replica for full, works a
# queue off at a few requests a second, whatever carries the calls.
@target(num_replicas=1, max_ongoing_requests=2 * MOST_UNDER_WAY)
class Steady(Server):
    pass


def app() -> Any:
    return Relay.bind(Target.bind(ledger_folder()))


def steady() -> Any:
    return Steady.bind(ledger_folder())


class Faults:
    """One at a time, at random. Each is a method."""

    def __init__(self, cluster: Cluster, chance: random.Random) -> None:
        self._cluster = cluster
        self._chance = chance
        self._name = app_name(app)
        self._edition = 0
        self.done: list[tuple[float, str]] = []
        self.kinds: tuple[Callable[[], None], ...] = (
            self.kill_replica,
            self.kill_relay,
            self.end_by_user_code,
            self.freeze_replica,
            self.scale,
            self.deploy_anew,
        )

    def one(self) -> str:
        fault = self._chance.choices(self.kinds, (5, 2, 3, 2, 2, 1))[0]
        fault()
        return fault.__name__

    def kill_replica(self) -> None:
        os.kill(self._any_replica(), signal.SIGKILL)

    def kill_relay(self) -> None:
        pid = outcome(lambda: self._cluster.app(app).pid.remote().result(timeout_s=20))
        if isinstance(pid, int):
            os.kill(pid, signal.SIGKILL)

    def end_by_user_code(self) -> None:
        handle = serve.get_deployment_handle("Target", self._name)
        outcome(lambda: handle.die.remote(f"poison-{time.monotonic()}", "exit").result(timeout_s=30))

    def freeze_replica(self) -> None:
        pid = self._any_replica()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self._chance.uniform(0.2, 3.0))
        os.kill(pid, signal.SIGCONT)

    def scale(self) -> None:
        self._run(self._chance.choice((2, 3, 4)))

    def deploy_anew(self) -> None:
        self._edition += 1
        self._run(3)

    def _run(self, replicas: int) -> None:
        target = Target.options(num_replicas=replicas).bind(ledger_folder(), self._edition)
        serve.run(Relay.bind(target), name=self._name, route_prefix=None)

    def _any_replica(self) -> int:
        living: list[int] = []

        def some() -> bool:
            living[:] = alive(ledger_folder(), "Target").values()
            return len(living) > 1

        until(some, timeout=60, poll=0.2)
        return self._chance.choice(living)


class Soak:
    def __init__(self, cluster: Cluster, length: float) -> None:
        chance = random.Random(os.environ.get("SOAK_SEED", "1"))
        self._cluster = cluster
        self._length = length
        self._faults = Faults(cluster, chance)
        self._chance = chance
        handle = cluster.app(app)
        target = serve.get_deployment_handle("Target", app_name(app))
        handles = {"Target": target, "Steady": cluster.app(steady), "Relay": handle}
        self.loads = {name: Load(handles[name], f"soak-{name}", RATES[name]) for name in RATES}
        self.samples: list[dict[str, Any]] = []
        self.faults: list[tuple[float, str]] = []

    def watched(self) -> dict[str, int]:
        """The processes that live through it all."""
        (steady,) = alive(ledger_folder(), "Steady").values()
        return {"driver": os.getpid(), "steady replica": steady}

    async def run(self) -> None:
        self._began = time.monotonic()
        watching = asyncio.ensure_future(self._watch())
        breaking = asyncio.ensure_future(self._break())
        await asyncio.gather(*(load.run(self._length) for load in self.loads.values()))
        breaking.cancel()
        await asyncio.gather(breaking, return_exceptions=True)
        await watching

    async def _break(self) -> None:
        while True:
            await asyncio.sleep(self._chance.uniform(*FAULT_EVERY_S))
            name = await asyncio.to_thread(self._faults.one)
            self.faults.append((time.monotonic() - self._began, name))

    async def _watch(self) -> None:
        seen = dict.fromkeys(self.loads, 0)
        while time.monotonic() - self._began < self._length:
            await asyncio.sleep(SAMPLE_S)
            took: list[float] = []
            for name, load in self.loads.items():
                took += [1000 * seconds for seconds in load.took[seen[name] :]]
                seen[name] = len(load.took)
            took.sort()
            self.samples.append(
                {
                    "at": time.monotonic() - self._began,
                    "p50": took[len(took) // 2] if took else None,
                    "p99": took[len(took) * 99 // 100] if took else None,
                    "under way": sum(load.under_way for load in self.loads.values()),
                    "processes": {name: holdings(pid) for name, pid in self.watched().items()},
                }
            )

    def report(self) -> dict[str, Any]:
        accounts = {
            name: Account(load, ledger_folder(), hops=1 + (name == "Relay")) for name, load in self.loads.items()
        }
        broken = []
        for name, account in accounts.items():
            broken += account.broken(may_fail=0 if name == "Steady" else MAY_FAIL * len(self.faults))
        broken += self._grown() + self._left()
        return {
            "seconds": round(self._length),
            "requests": {name: account.summary() for name, account in accounts.items()},
            "errors": {name: account.errors() for name, account in accounts.items()},
            "faults": self.faults,
            "samples": self.samples,
            "broken": broken,
        }

    def _left(self) -> list[str]:
        """Requests that a replica still counts when all have ended."""
        counts = {}

        def none() -> bool:
            for build, deployment in ((app, "Target"), (app, "Relay"), (steady, "Steady")):
                counts[deployment] = outcome(lambda d=deployment, b=build: self._cluster.ongoing(d, b))
            return not any(counts.values())

        return [] if until(none, timeout=60, poll=0.5) else [f"still counted as ongoing: {counts}"]

    def _grown(self) -> list[str]:
        lines = []
        for process in self.watched():
            for kind in HOLDINGS:
                values = [s["processes"][process][kind] for s in self.samples if s["processes"][process]]
                more = growth(values)
                if more > ALLOWED[kind]:
                    lines.append(f"{process}: {kind} grew by {more:.1f}, {ALLOWED[kind]:.0f} allowed")
        more = growth([sample["under way"] for sample in self.samples])
        if more > ALLOWED["under way"]:
            lines.append(f"requests under way grew by {more:.0f}")
        return lines


def scenario(cluster: Cluster, length: float) -> dict[str, Any]:
    soak = Soak(cluster, length)
    asyncio.run(soak.run())
    return soak.report()


scenario.scenario = scenario  # type: ignore[attr-defined]


def draw(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"font.size": 8, "svg.hashsalt": "soak", "axes.spines.top": False, "axes.spines.right": False}
    )
    import matplotlib.pyplot as plt

    samples = report["samples"][:: max(1, len(report["samples"]) // 150)]
    minutes = [sample["at"] / 60 for sample in samples]
    figure, axes = plt.subplots(3, 2, figsize=(9, 7), sharex=True)
    for axis, kind in zip(axes.flat, HOLDINGS, strict=False):
        for process in ("driver", "steady replica"):
            axis.plot(minutes, [(s["processes"][process] or {}).get(kind) for s in samples], label=process)
        axis.set_title(kind if kind != "resident MiB" else "private resident memory, MiB", loc="left")
        axis.set_ylim(bottom=0)
    axes.flat[0].legend(frameon=False)
    axes.flat[4].plot(minutes, [s["under way"] for s in samples], color="black")
    axes.flat[4].set_title("requests under way at the driver", loc="left")
    axes.flat[5].plot(minutes, [s["p50"] for s in samples], label="p50")
    axes.flat[5].plot(minutes, [s["p99"] for s in samples], label="p99")
    axes.flat[5].set_yscale("log")
    axes.flat[5].set_title("time to an answer, ms", loc="left")
    axes.flat[5].legend(frameon=False)
    times = [at / 60 for at, _ in report["faults"]]
    for axis in axes.flat:
        axis.vlines(times, 0, 1, transform=axis.get_xaxis_transform(), color="red", linewidth=0.3, alpha=0.4)
    for axis in axes[-1]:
        axis.set_xlabel("minutes; each red line is a fault")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    from harness.pool import Pool

    length = float(sys.argv[1])
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else "soak")
    folder.mkdir(parents=True, exist_ok=True)
    pool = Pool()
    try:
        report = pool.run(["native"], "soak", "scenario", {"length": length}, timeout=length + 600)["native"]
    finally:
        noise = pool.close()
    report["broken"] += noise
    (folder / "soak.json").write_text(json.dumps(report, indent=1))
    draw(report, folder / "soak.svg")
    for name, summary in report["requests"].items():
        print(name, summary)
    print(f"{len(report['faults'])} faults")
    print("\n".join(report["broken"]) or "no request lost or run twice, nothing grew")
    return 1 if report["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
