"""Which process takes the plugin's transport, and what is said when one cannot."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import ray_serve_grpc
from ray_serve_grpc import config
from ray_serve_grpc.config import InvalidSetting
from ray_serve_grpc.seam import activation, hook
from ray_serve_grpc.seam.probe import Mismatch


@pytest.fixture
def patches(monkeypatch):
    """Patches that note what they were put on; an entry of the dict is raised instead."""
    troubles: dict[str, Exception] = {}
    put: list[str] = []

    def fake(part):
        def apply(module):
            if part in troubles:
                raise troubles[part]
            put.append(part)
            return "form"

        module = ModuleType(f"ray_serve_grpc.seam.{part}_patch")
        module.apply = apply
        return module

    for part in hook.TARGETS.values():
        monkeypatch.setitem(sys.modules, f"ray_serve_grpc.seam.{part}_patch", fake(part))
    return troubles, put


@pytest.mark.usefixtures("native")
def test_a_patch_that_fits_makes_the_process_active(patches, warnings):
    _, put = patches
    for part in ("client", "replica"):
        activation.apply(part, ModuleType("ray"))
    assert put == ["client", "replica"]
    status = ray_serve_grpc.status()
    assert status["active"]
    assert status["reason"] == ""
    assert status["adapter"] == "form"
    assert status["parts"] == {"client": "active", "replica": "active"}
    assert status["lanes"] == ["shm", "unix", "tcp"]
    assert status["calls"] == {"unix": {"unary": 2}, "tcp": {"streaming": 1}}
    assert status["served"] == {"tcp": {"unary": 3}}
    assert not warnings()


def test_a_broken_native_module_is_one_warning_and_rays_own_transport(patches, monkeypatch, warnings):
    _, put = patches
    monkeypatch.setitem(sys.modules, "ray_serve_grpc._native", None)
    monkeypatch.delattr(ray_serve_grpc, "_native", raising=False)
    for part in hook.TARGETS.values():
        activation.apply(part, ModuleType("ray"))
    assert put == []
    [warning] = warnings()
    assert "native module cannot be loaded" in warning
    status = ray_serve_grpc.status()
    assert not status["active"]
    assert "native module cannot be loaded" in status["reason"]
    assert status["calls"] == {}


@pytest.mark.usefixtures("native")
def test_a_seam_that_does_not_fit_leaves_the_other_parts_on(patches, warnings):
    troubles, put = patches
    troubles["replica"] = Mismatch("Replica has no _on_initialized")
    for part in hook.TARGETS.values():
        activation.apply(part, ModuleType("ray"))
    assert sorted(put) == ["client", "constants", "handle", "router"]
    [warning] = warnings()
    assert "serve with Ray's own transport: Replica has no _on_initialized" in warning
    status = ray_serve_grpc.status()
    assert status["active"]
    assert status["reason"] == "replica: Replica has no _on_initialized"


@pytest.mark.usefixtures("native")
def test_a_client_seam_that_does_not_fit_makes_the_process_inactive(patches, warnings):
    troubles, _ = patches
    troubles["client"] = Mismatch("RunningReplica has no stub")
    activation.apply("client", ModuleType("ray"))
    activation.apply("client", ModuleType("ray"))
    assert len(warnings()) == 1
    assert not ray_serve_grpc.status()["active"]


@pytest.mark.usefixtures("native")
def test_a_patch_that_crashes_is_a_warning(patches, warnings):
    troubles, _ = patches
    troubles["client"] = RuntimeError("a bug")
    activation.apply("client", ModuleType("ray"))
    [warning] = warnings()
    assert "a bug" in warning


@pytest.mark.usefixtures("native")
def test_a_bad_setting_is_one_warning_in_an_import_and_an_error_in_install(patches, monkeypatch, warnings):
    _, put = patches
    monkeypatch.setenv("RAY_SERVE_GRPC_LANES", "pigeon")
    for part in hook.TARGETS.values():
        activation.apply(part, ModuleType("ray"))
    assert put == []
    [warning] = warnings()
    assert "RAY_SERVE_GRPC_LANES='pigeon'" in warning
    assert "tcp, unix, shm" in warning
    assert "RAY_SERVE_GRPC_LANES" in ray_serve_grpc.status()["reason"]
    with pytest.raises(InvalidSetting, match="RAY_SERVE_GRPC_LANES"):
        ray_serve_grpc.install()


@pytest.mark.usefixtures("native")
def test_the_switch_works_after_the_hook_was_armed(patches, monkeypatch, warnings):
    _, put = patches
    monkeypatch.setenv("RAY_SERVE_GRPC_NATIVE", "0")
    activation.apply("client", ModuleType("ray"))
    assert put == []
    assert not warnings()
    status = ray_serve_grpc.status()
    assert not status["active"]
    assert "RAY_SERVE_GRPC_NATIVE=0" in status["reason"]


@pytest.mark.usefixtures("native")
def test_install_patches_what_was_imported_before(patches, monkeypatch):
    _, put = patches
    for name in hook.TARGETS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "ray.serve.handle", ModuleType("ray.serve.handle"))
    ray_serve_grpc.install()
    ray_serve_grpc.install()
    assert put == ["handle"]


def test_before_ray_is_imported_the_status_says_what_it_waits_for():
    hook.arm()
    status = ray_serve_grpc.status()
    assert not status["active"]
    assert "waits for ray.serve" in status["reason"]
    assert {"active", "reason", "ray_version", "adapter", "lanes", "calls", "pid"} <= status.keys()


def test_asking_for_the_status_does_not_fix_the_settings(monkeypatch):
    ray_serve_grpc.status()
    monkeypatch.setenv("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE", "5000")
    assert config.settings().max_message_size == 5000
