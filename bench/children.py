"""Parent's side of a child process that measures: starts it, talks to it, ends it with all that it started.

`answer` is the child's side. Over the connection come (name, arguments); back go (True, value) or (False, text). When
the connection ends, the child ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

from bench.clocks import session_members
from bench.machine import ROOT

BOOT_S = 180.0


class ChildFailed(Exception):
    """It did not start, died, took too long, or what it was asked for failed."""


class Child:
    """A process in a session of its own. `ready()` waits until it can be asked."""

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], env: Mapping[str, str], prefix: Sequence[str] = ()
    ) -> None:
        """Runs `python -m module FD arguments…`; `prefix` is a command that runs it."""
        self.name = name
        self.alive = True
        self.said: Any = None
        """by the child when it was up"""
        self._log = tempfile.TemporaryFile()
        ours, theirs = Pipe()
        self._connection: Connection = ours
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module, str(theirs.fileno()), *arguments],
            env={**env, "PYTHONPATH": str(ROOT)},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        theirs.close()

    def ready(self) -> None:
        """Raises ChildFailed."""
        self.said = self._receive(BOOT_S)

    def ask(self, method: str, *arguments: object, timeout: float) -> Any:
        """Raises ChildFailed."""
        if not self.alive:
            raise ChildFailed("the process was lost before")
        try:
            self._connection.send((method, arguments))
        except OSError as error:
            raise self._lost(str(error)) from None
        return self._receive(timeout)

    def stop(self) -> None:
        """Has it end; `close` waits for it."""
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
            raise ChildFailed(f"{self.name}: {str(value).strip()}")
        return value

    def _lost(self, why: str) -> ChildFailed:
        """It is of no use from here on: an answer that comes late would be taken for another's."""
        self.alive = False
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 2000))
        return ChildFailed(f"{self.name}: {why}\n{self._log.read().decode(errors='replace')}")


@contextlib.contextmanager
def connected(descriptor: int) -> Any:
    """The child's end of the connection. What goes wrong goes to the parent; the parent's end ends it."""
    os.set_inheritable(descriptor, False)
    with Connection(descriptor) as connection:
        try:
            yield connection
        except EOFError:
            pass
        except Exception:
            with contextlib.suppress(OSError):
                connection.send((False, traceback.format_exc()))


def answer(connection: Connection, perform: Callable[[str, tuple[Any, ...]], Any]) -> None:
    """Performs what the parent asks for, until the connection ends with an EOFError."""
    while True:
        name, arguments = connection.recv()
        try:
            reply = True, perform(name, arguments)
        except Exception:
            reply = False, traceback.format_exc()
        connection.send(reply)
