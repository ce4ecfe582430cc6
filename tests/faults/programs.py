"""Programs of this folder that have a cluster of their own, whose nodes or processes they end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.transports import NATIVE, environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@contextlib.contextmanager
def program(
    name: str, *arguments: str, extra: dict[str, str] | None = None, prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Runs `python name arguments… FOLDER`, with pipes to it; FOLDER is a short, empty one of its own.

    Args:
        extra: environment variables.
        prefix: a command that runs it.
    """
    path = os.pathsep.join([str(HERE), str(HERE.parent / "serve"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = environment(NATIVE, dict(os.environ), {"PYTHONPATH": path, **(extra or {})})
    with tempfile.TemporaryDirectory(prefix="rsp", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [*prefix, sys.executable, str(HERE / name), *arguments, folder],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        with process:
            try:
                yield process
            finally:
                # Ray's daemons are in its process group.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def run(name: str, *arguments: str, extra: dict[str, str] | None = None, timeout: float = 200.0) -> str:
    """What a program said until it ended."""
    with program(name, *arguments, extra=extra) as process:
        return process.communicate(timeout=timeout)[0]
