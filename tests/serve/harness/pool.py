"""Test process: starts workers, sends them scenarios, collects what came out."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from harness.transports import NATIVE, environment

BOOT_S = 120.0
#: Where the modules of scenarios are.
_TESTS = Path(__file__).resolve().parent.parent
_FAULTS = _TESTS.parent / "faults"

#: Lines that no log of a cluster on our transport may hold.
NOISE = re.compile(
    r"never retrieved|was never awaited|Exception ignored|ResourceWarning|panicked at|Task was destroyed"
    r"|already borrowed|SystemError|Fatal Python error"
)

#: Except for what Ray leaves on every transport: in its proxy when a client of the gRPC ingress goes away, and in its
#: router when it asks a dead replica for its queue.
RAYS_OWN = re.compile(r"coro=<(ProxyResponseGenerator\._await_response|RunningReplica\.get_queue_len)\(\)")


class ScenarioFailed(AssertionError):
    """A scenario raised, hung, or took its process down."""


class Worker:
    """One child process with its own cluster. Started by `start`, ready after `wait_ready`."""

    def __init__(self, transport: str, extra: dict[str, str]) -> None:
        self.transport = transport
        self._extra = extra
        self._directory = Path(tempfile.mkdtemp(prefix="rsw"))
        self._log = self._directory / "worker.log"
        address = str(self._directory / "socket")
        self._listener = Listener(address)
        folders = [extra.get("PYTHONPATH"), str(_TESTS), str(_FAULTS), os.environ.get("PYTHONPATH")]
        path = os.pathsep.join(filter(None, folders))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness.worker", transport, address],
                env={**environment(transport, dict(os.environ), extra), "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self._directory,
            )
        self._connection: Connection | None = None
        self._session = ""

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, module: str, name: str, arguments: dict[str, Any]) -> None:
        self._ready().send((module, name, arguments))

    def receive(self, timeout: float) -> Any:
        connection = self._ready()
        try:
            if not connection.poll(timeout):
                raise ScenarioFailed(f"{self.transport}: no outcome within {timeout:.0f} s\n{self._stacks()}")
            succeeded, value = connection.recv()
        except (EOFError, ConnectionError):
            code = self._process.wait(10)
            raise ScenarioFailed(f"{self.transport}: the driver died with {code}\n{self._tail()}") from None
        if not succeeded:
            raise ScenarioFailed(f"{self.transport}: {value}")
        return value

    def noise(self) -> list[str]:
        """Lines in the cluster's logs that tell of a defect."""
        lines = _matching(self._log)
        if self._session:
            for path in (Path(self._session) / "logs").rglob("*"):
                if path.suffix in {".err", ".out", ".log"} and not path.name.startswith(("gcs_server", "raylet.out")):
                    lines += _matching(path)
        return lines

    def hang_up(self) -> None:
        """Tells the worker to end, if it came up; `close` waits for it."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()

    def close(self) -> None:
        self.hang_up()
        try:
            self._process.wait(60 if self._connection is not None else 1)
        except subprocess.TimeoutExpired:
            pass
        # Whatever of the session is left: Ray's daemons are in the worker's process group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        self._listener.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _ready(self) -> Connection:
        if self._connection is None:
            deadline = time.monotonic() + BOOT_S
            socket = self._listener._listener._socket  # type: ignore[attr-defined]
            socket.settimeout(1.0)
            while True:
                try:
                    self._connection = self._listener.accept()
                    break
                except TimeoutError:
                    if not self.alive or time.monotonic() > deadline:
                        raise ScenarioFailed(f"{self.transport}: did not start\n{self._tail()}") from None
            try:
                if not self._connection.poll(BOOT_S):
                    raise EOFError
                _, self._session = self._connection.recv()
            except EOFError:
                self._drop_connection()
                raise ScenarioFailed(f"{self.transport}: no cluster came up\n{self._tail()}") from None
        return self._connection

    def _drop_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _stacks(self) -> str:
        os.kill(self._process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self._tail()

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-6000:]


class Pool:
    """The workers of a test session, by transport and extra environment variables; started when first used."""

    def __init__(self) -> None:
        self._workers: dict[tuple[str, frozenset[tuple[str, str]]], Worker] = {}
        self._noise: list[str] = []

    def run(
        self,
        transports: Iterable[str],
        module: str,
        name: str,
        arguments: dict[str, Any],
        *,
        timeout: float,
        extra: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """The scenario's outcome on each transport; they run side by side."""
        workers = [self._worker(transport, extra or {}) for transport in transports]
        for worker in workers:
            worker.send(module, name, arguments)
        outcomes, failures = {}, []
        deadline = time.monotonic() + timeout
        for worker in workers:
            try:
                outcomes[worker.transport] = worker.receive(max(1.0, deadline - time.monotonic()))
            except ScenarioFailed as failure:
                failures.append(str(failure))
                if "no outcome within" in str(failure) or not worker.alive:
                    self._discard(worker)
        if failures:
            raise ScenarioFailed("\n".join(failures))
        return outcomes

    def close_variants(self) -> None:
        """Ends the clusters that have extra environment variables."""
        self._discard(*[worker for (_, extra), worker in self._workers.items() if extra])

    def close(self) -> list[str]:
        """Ends all clusters; the lines of noise that those on our transport left in their logs."""
        self._discard(*self._workers.values())
        return self._noise

    def _worker(self, transport: str, extra: dict[str, str]) -> Worker:
        key = (transport, frozenset(extra.items()))
        if key not in self._workers:
            self._workers[key] = Worker(transport, extra)
        return self._workers[key]

    def _discard(self, *workers: Worker) -> None:
        self._workers = {key: other for key, other in self._workers.items() if other not in workers}
        for worker in workers:
            if worker.transport == NATIVE:
                self._noise += worker.noise()
            worker.hang_up()
        for worker in workers:
            worker.close()


def _matching(path: Path) -> list[str]:
    """The noisy lines of a log, each with the lines after it, which tell of where it came from."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    # Lines of other requests come between those of one report.
    noisy = [n for n, line in enumerate(lines) if NOISE.search(line) and not RAYS_OWN.search("".join(lines[n : n + 6]))]
    return ["\n    ".join([f"{path.name}: {lines[n][:300]}", *lines[n + 1 : n + 25]]) for n in noisy[:20]]
