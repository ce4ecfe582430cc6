"""Parent's side: starts a cluster in a child process and talks to it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection, Pipe
from typing import Any

from bench.clocks import session_members
from bench.machine import ROOT
from bench.serve.variants import environment

BOOT_S = 180.0


class SessionFailed(Exception):
    """The cluster did not start, died, or a measurement failed or took too long."""


class Session:
    """A cluster with the application, on one transport, in one mode. `ready()` waits for it."""

    def __init__(self, variant: str, mode: str) -> None:
        self.variant = variant
        self.alive = True
        self.roles: dict[str, list[int]] = {}
        self._log = tempfile.TemporaryFile()
        ours, theirs = Pipe()
        self._connection: Connection = ours
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.serve.cluster", variant, str(theirs.fileno())],
            env={**environment(variant, mode, os.environ), "PYTHONPATH": str(ROOT)},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        theirs.close()

    def ready(self) -> None:
        self.roles = self._receive(BOOT_S)["roles"]

    def ask(self, method: str, *arguments: object, timeout: float) -> Any:
        """What the caller's method returns. Raises SessionFailed."""
        if not self.alive:
            raise SessionFailed("the cluster was lost before")
        try:
            self._connection.send((method, arguments))
        except OSError as error:
            raise self._lost(str(error)) from None
        return self._receive(timeout)

    def stop(self) -> None:
        """Has the cluster end; `close` waits for it."""
        self.alive = False
        self._connection.close()

    def close(self) -> None:
        self.stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(45)
        for pid in session_members(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _receive(self, timeout: float) -> Any:
        try:
            if not self._connection.poll(timeout):
                raise self._lost(f"no answer within {timeout:.0f} s")
            succeeded, value = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._lost(repr(error)) from None
        if not succeeded:
            raise SessionFailed(str(value).strip())
        return value

    def _lost(self, why: str) -> SessionFailed:
        """It is of no use from here on: an answer that comes late would be taken for another's."""
        self.alive = False
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 2000))
        return SessionFailed(f"{self.variant}: {why}\n{self._log.read().decode(errors='replace')}")
