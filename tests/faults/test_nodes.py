"""A node that vanishes under load takes its own replicas with it, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.transports import NATIVE, environment

HERE = Path(__file__).resolve().parent


def test_calls_between_the_nodes_that_stay_go_on_when_one_vanishes():
    with tempfile.TemporaryDirectory(prefix="rsn", ignore_cleanup_errors=True) as folder:
        path = os.pathsep.join([str(HERE), str(HERE.parent / "serve"), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, str(HERE / "nodes.py"), folder],
            env={**environment(NATIVE, dict(os.environ), {}), "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    assert "\nkept\n" in done.stdout, done.stdout + done.stderr
