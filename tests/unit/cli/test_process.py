"""What a process tells of itself."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from ray_serve_grpc.cli import process


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)


def failed(report):
    return {probe["name"]: probe for probe in report["probes"] if probe["outcome"] == "failed"}


def test_a_sound_machine_has_every_lane_and_no_setting_but_the_defaults():
    report = process.report()
    assert failed(report) == {}
    assert report["settings"] == {}
    assert {lane: found["usable"] for lane, found in report["lanes"].items()} == dict.fromkeys(
        ("shm", "unix", "tcp"), True
    )


def test_without_memfd_only_shared_memory_is_lost(monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    report = process.report()
    assert list(failed(report)) == ["memfd"]
    assert report["lanes"]["shm"] == {"usable": False, "reason": "memfd: Function not implemented"}
    assert report["lanes"]["unix"]["usable"]


def test_a_lane_that_is_left_out_is_not_probed_and_not_wrong(monkeypatch):
    monkeypatch.setenv("RAY_SERVE_GRPC_LANES", "tcp")
    report = process.report()
    assert failed(report) == {}
    assert not {"memfd", "socket folder"} & {probe["name"] for probe in report["probes"]}
    assert report["lanes"]["unix"] == {"usable": False, "reason": "RAY_SERVE_GRPC_LANES leaves it out"}
    assert report["settings"]["RAY_SERVE_GRPC_LANES"] == {"value": "tcp", "default": "tcp,unix,shm"}


def test_an_invalid_setting_is_told_with_what_is_allowed(monkeypatch):
    monkeypatch.setenv("RAY_SERVE_GRPC_SHM_LIMIT", "much")
    found = failed(process.report())
    assert "RAY_SERVE_GRPC_SHM_LIMIT='much'" in found["settings"]["detail"]
    assert "RAY_SERVE_GRPC_SHM_LIMIT" in found["settings"]["hint"]


def test_rays_own_variables_are_told(monkeypatch):
    monkeypatch.setenv("RAY_SERVE_USE_GRPC_BY_DEFAULT", "1")
    assert process.report()["settings"] == {"RAY_SERVE_USE_GRPC_BY_DEFAULT": {"value": "1", "default": None}}


def test_certificates_that_are_missing_are_told(monkeypatch):
    monkeypatch.setenv("RAY_USE_TLS", "1")
    report = process.report()
    assert report["tls"] is True
    assert "RAY_TLS_SERVER_CERT" in failed(report)["TLS"]["hint"]


def test_a_replica_needs_neither_click_nor_rich():
    code = "import sys, ray_serve_grpc.cli.process; sys.exit(bool({'click', 'rich', 'ray'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
