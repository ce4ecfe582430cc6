"""`ray-serve-grpc doctor` and `bench` on a running cluster with a user's application on it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray
from harness import Cluster, deployment, same_as_actor
from harness.cluster import app_name, until
from ray import serve

#: Tells the harness that replicas without the plugin are meant.
HAS_STOCK_REPLICAS = True

OFF = {"num_cpus": 0, "runtime_env": {"env_vars": {"RAY_SERVE_GRPC_NATIVE": "0"}}}

#: Longest run of a command, seconds.
PATIENCE = 150.0


@deployment
class Plain:
    def __call__(self) -> int:
        return 1


@deployment
class Front:
    def __init__(self, behind: Any) -> None:
        self._behind = behind

    async def __call__(self) -> int:
        return await self._behind.remote()


def sound() -> Any:
    return Plain.bind()


def mixed() -> Any:
    return Front.bind(Plain.options(name="Without", ray_actor_options=OFF).bind())


def command(*arguments: str) -> list[str]:
    address = ray.get_runtime_context().gcs_address
    return [sys.executable, "-m", "ray_serve_grpc.cli", *arguments, "--address", address]


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command("doctor", *arguments), capture_output=True, text=True, timeout=PATIENCE, check=False)


def of_app(things: list[dict[str, Any]], key: str, build: Any) -> list[dict[str, Any]]:
    """Those of this application: others of this module, or what is left of one before it, are not asked for."""
    return [thing for thing in things if thing[key].partition("/")[0] == app_name(build)]


@same_as_actor(native_only=True, timeout=PATIENCE, expect=[0, True, [], ["Plain"], True, ["unix", "tcp"], True, True])
def test_a_sound_cluster_passes_and_each_lane_is_pinged(cluster: Cluster) -> Any:
    cluster.app(sound).remote().result(timeout_s=30)
    found: list[subprocess.CompletedProcess[str]] = []

    def passes() -> bool:
        """Replicas of another test may be on their way out."""
        found.append(doctor("--json"))
        return found[-1].returncode == 0

    until(passes, timeout=PATIENCE / 2)
    report = json.loads(found[-1].stdout)
    replicas = of_app(report["cluster"]["replicas"], "application", sound)
    [replica] = replicas
    pings = replica["pings"]
    return [
        found[-1].returncode,
        report["ok"],
        report["findings"],
        [replica["deployment"] for replica in replicas],
        replica["process"]["active"],
        [ping["lane"] for ping in pings],
        all(0 < ping["round_trip_us"]["min"] <= ping["round_trip_us"]["median"] for ping in pings),
        [ping["shared_memory"] for ping in pings] == [True, False]
        and {ping["version"] for ping in pings} == {report["machine"]["version"]},
    ]


@same_as_actor(native_only=True, timeout=PATIENCE, expect=[1, [True, False], ["Without"], True, ["", "tcp"], True])
def test_a_replica_without_the_plugin_is_found_and_the_exit_code_is_1(cluster: Cluster) -> Any:
    cluster.app(mixed).remote().result(timeout_s=30)
    done = doctor("--json")
    report = json.loads(done.stdout)
    replicas = of_app(report["cluster"]["replicas"], "application", mixed)
    findings = of_app(report["findings"], "where", mixed)
    [ping] = replicas[1]["pings"]
    return [
        done.returncode,
        [replica["process"]["active"] for replica in replicas],
        [finding["where"].split("/")[1] for finding in findings],
        "RAY_SERVE_GRPC_NATIVE=0" in findings[0]["hint"],
        [ping["version"], ping["lane"]],
        described(report),
    ]


def described(report: dict[str, Any]) -> bool:
    """Whether docs/cli.md names every key of the report."""
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    cluster = report["cluster"]
    replica = cluster["replicas"][0]
    keys = {*report, *cluster, *replica, *replica["pings"][0], *report["findings"][0], *cluster["proxies"][0]}
    return [key for key in sorted(keys) if f"`{key}`" not in text] == []


@same_as_actor(native_only=True, timeout=PATIENCE, expect=[[True, True], {"unix"}, [True], True])
def test_a_bench_tells_a_figure_for_each_transport_and_leaves_only_the_users_application(cluster: Cluster) -> Any:
    from ray_serve_grpc.cli.bench import run

    handle = cluster.app(sound)
    before = set(serve.status().applications)
    steps: list[str] = []
    report = run.measured(
        run.Plan(sizes=(1_000,), seconds=0.1, rounds=1), lambda what, done: steps.append(f"{done} {what}")
    )
    positive = [all(figure > 0 for figure in row["figures"].values()) for row in report["rows"]]
    left = {name for name in set(serve.status().applications) - before if "bench" in name}
    last = steps[-1].startswith(f"{2 * len(run.TRANSPORTS)} ")
    return [positive, set(report["lanes"]) - {"shm"}, [not left and last], handle.remote().result(timeout_s=30) == 1]


@same_as_actor(native_only=True, timeout=PATIENCE, expect=[130, [], 1])
def test_ctrl_c_takes_the_bench_down_and_nothing_else(cluster: Cluster) -> Any:
    handle = cluster.app(sound)
    bench = subprocess.Popen(command("bench", "--quick"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def benches() -> list[str]:
        return [name for name in serve.status().applications if "bench" in name]

    try:
        until(lambda: bool(benches()), timeout=PATIENCE / 2, poll=0.2)
        bench.send_signal(signal.SIGINT)
        code = bench.wait(PATIENCE / 2)
    finally:
        bench.kill()
        bench.wait()
    return [code, benches(), handle.remote().result(timeout_s=30)]
