"""Drivers that end with calls under way, in every way: soon, with their own exit code, and without spam."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from harness.transports import NATIVE, environment

#: How often each ending is tried.
TIMES = int(os.environ.get("ENDING_TIMES", "1"))

PROGRAM = Path(__file__).with_name("ending.py")

#: What Python and Rust say of what was left in disorder.
SPAM = re.compile(
    r"Traceback|never retrieved|was never awaited|Exception ignored|panicked at|Task was destroyed|Fatal Python error"
)


@pytest.mark.parametrize("how", ["exit", "ray.shutdown", "interrupt"])
def test_a_driver_ends_with_calls_under_way(how):
    for _ in range(TIMES):
        with tempfile.TemporaryDirectory(prefix="rse", ignore_cleanup_errors=True) as folder:
            process = subprocess.Popen(
                [sys.executable, str(PROGRAM), how, folder],
                env=environment(NATIVE, dict(os.environ), {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            try:
                if how == "interrupt":
                    said = []
                    for line in process.stdout:
                        said.append(line)
                        if line == "ready\n":
                            break
                    process.send_signal(signal.SIGINT)
                    out = "".join(said) + process.communicate(timeout=120)[0]
                else:
                    out, _ = process.communicate(timeout=180)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
        assert process.returncode == 0, out
        assert "done" in out, out
        assert not SPAM.search(out), out
