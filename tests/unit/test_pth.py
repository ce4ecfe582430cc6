"""The wheel's `.pth` file in real interpreters, with a small stand-in for Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PTH = ROOT / "ray_serve_grpc.data" / "purelib" / "ray_serve_grpc_hook.pth"

REPLICA_WRAPPER = """
class ReplicaWrapper: ...
class RunningReplica:
    def __init__(self, replica_info):
        self._replica_info = replica_info
        self._actor_handle = None
        self._actor_replica_wrapper = self._grpc_replica_wrapper = None
    def _get_replica_wrapper(self, pr):
        return pr.metadata._by_reference
    def try_send_request(self, pr, with_rejection):
        return self.send_request_python or self.send_request_java
"""

#: Run in a fresh interpreter: processes the .pth, imports the stand-in, tells what came of it.
PROGRAM = """
import json, sys, site, types
native = sys.modules["ray_serve_grpc._native"] = types.ModuleType("ray_serve_grpc._native")
native.statistics = dict
{before}
site.addsitedir(sys.argv[1])
armed = any(type(finder).__name__ == "Hook" for finder in sys.meta_path)
heavy = [name for name in ("typing", "dataclasses", "logging", "ray") if name in sys.modules]
import ray.serve._private.request_router.replica_wrapper as wrapper
patched = hasattr(wrapper.RunningReplica._get_replica_wrapper, "__wrapped__")
status = sys.modules["ray_serve_grpc"].status() if "ray_serve_grpc" in sys.modules else None
print(json.dumps([armed, heavy, patched, status]))
"""


@pytest.fixture
def site_folder(tmp_path):
    """A folder of site-packages with the .pth file and a Ray of which only the caller's seam exists."""
    packages = ["ray", "ray/serve", "ray/serve/_private", "ray/serve/_private/request_router"]
    for package in packages:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "ray/__init__.py").write_text("__version__ = '9.9.9'")
    (tmp_path / packages[-1] / "replica_wrapper.py").write_text(REPLICA_WRAPPER)
    (tmp_path / PTH.name).write_text(PTH.read_text())
    return tmp_path


def start(site_folder, before="", package=True, **environment):
    """(armed, heavy modules, patched, status), and stderr, of an interpreter without site-packages of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHON"))}
    path = [str(site_folder), *([str(ROOT)] if package else [])]
    done = subprocess.run(
        [sys.executable, "-S", "-B", "-c", PROGRAM.format(before=before), str(site_folder)],
        cwd=site_folder,
        env=clean | {"PYTHONPATH": os.pathsep.join(path)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_the_file_is_one_line_and_not_named_like_the_distribution():
    assert len(PTH.read_text().splitlines()) == 1
    assert PTH.stem not in ("ray_serve_grpc", "ray-serve-grpc")


def test_it_switches_the_plugin_on_and_imports_nothing_heavy(site_folder):
    (armed, heavy, patched, status), stderr = start(site_folder)
    assert armed
    assert heavy == []
    assert patched
    assert status["active"]
    assert status["ray_version"] == "9.9.9"
    assert stderr == ""


def test_the_switch_in_the_environment_keeps_everything_away(site_folder):
    (armed, _, patched, status), stderr = start(site_folder, RAY_SERVE_GRPC_NATIVE="0")
    assert (armed, patched, status, stderr) == (False, False, None, "")


def test_a_missing_package_is_silent(site_folder):
    (armed, _, patched, status), stderr = start(site_folder, package=False)
    assert (armed, patched, status, stderr) == (False, False, None, "")


def test_a_broken_native_module_is_one_warning(site_folder):
    (_, _, patched, status), stderr = start(site_folder, before="sys.modules['ray_serve_grpc._native'] = None")
    assert not patched
    assert not status["active"]
    assert len(stderr.strip().splitlines()) == 1
    assert "native module cannot be loaded" in stderr


def test_a_seam_that_does_not_fit_is_one_warning(site_folder):
    renamed = REPLICA_WRAPPER.replace("_get_replica_wrapper", "_choose_wrapper")
    (site_folder / "ray/serve/_private/request_router/replica_wrapper.py").write_text(
        renamed + "\n    def _get_replica_wrapper(self): ...\n"
    )
    (_, _, patched, status), stderr = start(site_folder)
    assert not patched
    assert "_get_replica_wrapper does not take pr" in status["reason"]
    assert len(stderr.strip().splitlines()) == 1


def test_a_bad_setting_does_not_break_the_import(site_folder):
    (_, _, patched, status), stderr = start(site_folder, RAY_SERVE_GRPC_MAX_MESSAGE_SIZE="huge")
    assert not patched
    assert "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE='huge'" in status["reason"]
    assert "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE='huge'" in stderr
