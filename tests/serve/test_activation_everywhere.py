"""Installed is on: in every process of a Serve app, however it was started; and off where it was switched off."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from harness import Cluster, deployment, same_as_actor
from harness.cluster import app_name, until
from harness.pool import Pool
from harness.transports import NATIVE, STOCK, environment
from harness.worker import free_port

HERE = Path(__file__).resolve().parent


def status(_self: Any = None) -> dict[str, Any]:
    import ray_serve_grpc

    return ray_serve_grpc.status()


@deployment
class Probe:
    def status(self) -> dict[str, Any]:
        return status()

    def items(self) -> Any:
        yield from range(3)

    async def __call__(self, request: Any) -> Any:
        return status()


def probe() -> Any:
    return Probe.bind()


#: What `serve run` and `serve deploy` import.
application = Probe.bind()


def total(calls: dict[str, dict[str, int]], *, but: tuple[str, ...] = ()) -> int:
    return sum(sum(kinds.values()) for lane, kinds in calls.items() if lane not in but)


@same_as_actor(native_only=True, expect=[True, "", ray.__version__, True, True])
def test_status_tells_what_is_active_in_the_driver(cluster: Cluster) -> Any:
    told = status()
    lanes = {"unix", "tcp"}.issubset(told["lanes"])
    return [told["active"], told["reason"], told["ray_version"], bool(told["adapter"]), lanes]


@same_as_actor(native_only=True, expect=[5, 1, {"unix"}])
def test_status_counts_calls_by_lane_and_kind(cluster: Cluster) -> Any:
    handle = cluster.app(probe, route=True)
    handle.status.remote().result(timeout_s=20)
    before = status()["calls"]
    for _ in range(5):
        handle.status.remote().result(timeout_s=20)
    list(handle.options(stream=True).items.remote())
    after = status()["calls"]
    grown = {
        (lane, kind): count - before.get(lane, {}).get(kind, 0)
        for lane, kinds in after.items()
        for kind, count in kinds.items()
        if count != before.get(lane, {}).get(kind, 0)
    }
    streams = sum(count for (_, kind), count in grown.items() if "stream" in kind)
    return [sum(grown.values()) - streams, streams, {lane for lane, _ in grown}]


@same_as_actor(native_only=True, expect={"controller": True, "proxy": True, "replica": True})
def test_the_plugin_is_active_in_controller_proxy_and_replica(cluster: Cluster) -> Any:
    cluster.app(probe, route=True)
    kinds = {"SERVE_CONTROLLER_ACTOR": "controller", "SERVE_PROXY_ACTOR": "proxy", "SERVE_REPLICA": "replica"}
    found: dict[str, bool] = {}
    for named in ray.util.list_named_actors(all_namespaces=True):
        for prefix, kind in kinds.items():
            if named["name"].startswith(prefix):
                actor = ray.get_actor(named["name"], named["namespace"])
                told = ray.get(actor.__ray_call__.remote(status), timeout=20)
                found[kind] = found.get(kind, True) and told["active"]
    return found


@same_as_actor(native_only=True, expect=[True, True])
def test_a_second_driver_calls_over_the_native_transport(cluster: Cluster) -> Any:
    cluster.app(probe, route=True)
    script = f"""
import json, ray
from ray import serve
ray.init(address={ray.get_runtime_context().gcs_address!r}, log_to_driver=False)
handle = serve.get_app_handle({app_name(probe)!r})
served = handle.status.remote().result(timeout_s=20)
import ray_serve_grpc
told = ray_serve_grpc.status()
print("RESULT", json.dumps([told["active"], sum(sum(k.values()) for k in told["calls"].values()) == 1]))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90, check=False)
    for line in ran.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    return ran.stdout + ran.stderr


def served_by_http(cluster: Cluster, requests: int) -> int:
    """Calls over our transport that the app's replica gains by that many HTTP requests."""
    cluster.app(probe, route=True)
    (replica,) = cluster.replica_actors("Probe", probe)
    before = total(ray.get(replica.__ray_call__.remote(status), timeout=20)["served"])
    for _ in range(requests):
        with urllib.request.urlopen(f"{cluster.http}/{app_name(probe)}", timeout=20) as answer:
            answer.read()
    return total(ray.get(replica.__ray_call__.remote(status), timeout=20)["served"]) - before


@same_as_actor(native_only=True, expect=4)
def test_the_proxy_follows_use_grpc_by_default(cluster: Cluster) -> Any:
    return served_by_http(cluster, 4)


@same_as_actor(native_only=True, extra={"RAY_SERVE_PROXY_USE_GRPC": "0"}, expect=[0, True])
def test_the_proxy_keeps_actor_calls_where_it_is_told_to(cluster: Cluster) -> Any:
    return [served_by_http(cluster, 4), cluster.app(probe, route=True).status.remote().result(timeout_s=20)["active"]]


@same_as_actor(native_only=True, expect=0)
def test_a_handle_by_reference_keeps_actor_calls(cluster: Cluster) -> Any:
    handle = cluster.app(probe, route=True).options(_by_reference=True)
    before = total(status()["calls"])
    handle.status.remote().result(timeout_s=20)
    return total(status()["calls"]) - before


def _told_and_called(cluster: Cluster) -> Any:
    import ray_serve_grpc

    handle = cluster.app(probe, route=True)
    replica = handle.status.remote().result(timeout_s=20)
    told = ray_serve_grpc.status()
    return [told["active"], replica["active"], bool(told["reason"]), ray_serve_grpc.__file__]


class _Probes:
    """Scenarios that tests below run with environments made at run time."""

    class told_and_called:
        scenario = staticmethod(_told_and_called)

    class warnings:
        @staticmethod
        def scenario(cluster: Cluster) -> int:
            """Most warnings of the plugin in the log of one process."""
            cluster.app(probe, route=True)
            logs = [path.read_text(errors="replace") for path in (cluster.session / "logs").rglob("*.err")]
            return max(log.count("ray_serve_grpc: ") for log in logs)


def run_probe(pool: Pool, name: str, variables: dict[str, str]) -> Any:
    return pool.run([STOCK], "test_activation_everywhere", f"_Probes.{name}", {}, timeout=90, extra=variables)[STOCK]


@pytest.fixture(autouse=True)
def _needs_native(selected: tuple[str, ...]) -> None:
    if NATIVE not in selected:
        pytest.skip(f"not a test of {', '.join(selected)}")


def test_switched_off_by_environment_it_is_ray_s_own_transport(pool: Pool) -> None:
    driver, replica, reason, _ = run_probe(pool, "told_and_called", {})
    assert (driver, replica, reason) == (False, False, True)


def test_without_its_native_module_it_is_ray_s_own_transport(pool: Pool, tmp_path: Path) -> None:
    """A wheel for another platform, a half-finished upgrade: Serve works, and the log says once per process why."""
    import ray_serve_grpc

    broken = tmp_path / "ray_serve_grpc"
    shutil.copytree(
        Path(ray_serve_grpc.__file__).parent, broken, ignore=shutil.ignore_patterns("_native*", "__pycache__")
    )
    variables = {"RAY_SERVE_GRPC_NATIVE": "1", "PYTHONPATH": str(tmp_path)}
    driver, replica, reason, file = run_probe(pool, "told_and_called", variables)
    assert file.startswith(str(tmp_path)), "the broken copy was not the one that was tested"
    assert (driver, replica, reason) == (False, False, True)
    assert run_probe(pool, "warnings", variables) == 1


@pytest.fixture
def config(tmp_path: Path) -> tuple[Path, str]:
    """A Serve config file, and the URL where its app will answer."""
    port = free_port()
    path = tmp_path / "serve.yaml"
    path.write_text(
        f"""
proxy_location: HeadOnly
http_options: {{host: 127.0.0.1, port: {port}}}
applications:
- {{name: probe, route_prefix: /probe, import_path: "test_activation_everywhere:application"}}
"""
    )
    return path, f"http://127.0.0.1:{port}/probe"


def native_environment(tmp: Path) -> dict[str, str]:
    # A local cluster switches token authentication on; a command that talks to its dashboard has to be told.
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    extra = {"PYTHONPATH": path, "RAY_TMPDIR": str(tmp), "RAY_AUTH_MODE": "token"}
    return environment(NATIVE, dict(os.environ), extra)


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """Ray's sockets need a short path."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="rsc", ignore_cleanup_errors=True) as name:
        yield Path(name)


def answer_of(url: str, process: subprocess.Popen[bytes], timeout: float) -> Any:
    seen: list[Any] = []

    def answered() -> bool:
        if process.poll() is not None:
            raise AssertionError(f"the command ended with {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                seen.append(json.load(answer))
                return True
        except OSError:
            return False

    assert until(answered, timeout=timeout, poll=0.2), f"no answer from {url}"
    return seen[0]


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(40)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def serve_command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", *arguments]


def test_serve_run_activates_it(config: tuple[Path, str], short_directory: Path) -> None:
    path, url = config
    with (short_directory / "output").open("wb") as output:
        process = subprocess.Popen(
            serve_command("run", str(path)),
            env=native_environment(short_directory),
            cwd=HERE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            told = answer_of(url, process, 90)
        finally:
            end(process)
    assert told["active"], told
    assert total(told["served"]) >= 1


HEAD = """
import ray, sys
port, directory = sys.argv[1:]
ray.init(num_cpus=2, include_dashboard=True, dashboard_port=int(port), log_to_driver=False, _temp_dir=directory)
print("up", flush=True)
sys.stdin.read()
"""


def test_serve_deploy_activates_it(config: tuple[Path, str], short_directory: Path) -> None:
    path, url = config
    port = free_port()
    variables = native_environment(short_directory)
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD, str(port), str(short_directory)],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert head.stdout is not None
        assert head.stdout.readline() == b"up\n"
        deploy = serve_command("deploy", "-a", f"http://127.0.0.1:{port}", str(path))
        ran = subprocess.run(deploy, env=variables, capture_output=True, text=True, check=False, timeout=60)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        told = answer_of(url, head, 90)
    finally:
        end(head)
    assert told["active"], told
    assert total(told["served"]) >= 1
