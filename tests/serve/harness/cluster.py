"""What a scenario is handed: a running cluster on one transport."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from harness.board import Board

#: `serve.deployment` without a CPU reserved, so that many fit, and quick to stop.
deployment = partial(
    serve.deployment,
    ray_actor_options={"num_cpus": 0},
    graceful_shutdown_wait_loop_s=0.1,
    graceful_shutdown_timeout_s=5,
)

_keys = itertools.count()


class Cluster:
    def __init__(self, transport: str, board: Board, *, session: Path, http_port: int, grpc_port: int) -> None:
        self.transport = transport
        self.board = board
        #: Ray's session directory (logs, sockets).
        self.session = session
        self.http = f"http://127.0.0.1:{http_port}"
        self.websocket = f"ws://127.0.0.1:{http_port}"
        self.grpc_target = f"127.0.0.1:{grpc_port}"
        self._apps: dict[str, DeploymentHandle[Any]] = {}

    def app(self, build: Callable[[], Any], *, route: bool = False) -> DeploymentHandle[Any]:
        """Handle to the ingress of the app that `build` makes; deployed on the first use by a test module."""
        name = app_name(build)
        if name not in self._apps:
            self._apps[name] = serve.run(build(), name=name, route_prefix=f"/{name}" if route else None)
        return self._apps[name]

    def handle(self, deployment: str, build: Callable[[], Any]) -> DeploymentHandle[Any]:
        """A fresh handle to one deployment of the app that `build` makes."""
        self.app(build)
        return serve.get_deployment_handle(deployment, app_name(build))

    def drop_apps(self) -> None:
        for name in self._apps:
            serve.delete(name, _blocking=False)
        self._apps.clear()

    def key(self) -> str:
        """A name no other scenario uses on the board."""
        return f"key-{next(_keys)}"

    def replica_actors(self, deployment: str, build: Callable[[], Any]) -> list[Any]:
        """Actor handles of the deployment's live replicas."""
        prefix = f"SERVE_REPLICA::{app_name(build)}#{deployment}#"
        named = ray.util.list_named_actors(all_namespaces=True)
        return [ray.get_actor(a["name"], a["namespace"]) for a in named if a["name"].startswith(prefix)]

    def ongoing(self, deployment: str, build: Callable[[], Any]) -> int:
        """Ongoing requests that the deployment's replicas count, as the autoscaler sees them."""
        actors = self.replica_actors(deployment, build)
        return sum(ray.get([actor.get_num_ongoing_requests.remote() for actor in actors], timeout=20))

    @contextlib.contextmanager
    def log_lines(self, *needles: str) -> Iterator[list[str]]:
        """Fills the list, on leaving, with the lines that the session's logs gained and that hold a needle."""
        found: list[str] = []
        sizes = {path: path.stat().st_size for path in _log_files(self.session)}
        yield found
        for path in _log_files(self.session):
            with contextlib.suppress(OSError), path.open(errors="replace") as file:
                file.seek(sizes.get(path, 0))
                found.extend(f"{path.name}: {line.strip()}" for line in file if any(n in line for n in needles))


def app_name(build: Callable[[], Any]) -> str:
    return f"{build.__module__}.{build.__name__}".replace("_", "-").replace(".", "-")


def until(condition: Callable[[], bool], *, timeout: float = 15.0, poll: float = 0.02) -> bool:
    """Polls state that offers nothing to wait on. False when it did not come true in time."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll)
    return True


def resident_mib() -> int:
    """This process's resident memory."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20


def _log_files(session: Path) -> list[Path]:
    return [
        path for path in (session / "logs").rglob("*") if path.is_file() and path.suffix in {".log", ".err", ".out"}
    ]
