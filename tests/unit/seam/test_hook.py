"""The import hook: targets are patched right after their first import, and imports never break."""

from __future__ import annotations

import importlib
import inspect
import sys
from importlib.machinery import SourceFileLoader

import pytest

from ray_serve_grpc.seam import hook
from ray_serve_grpc.seam.hook import Hook


@pytest.fixture
def target(tmp_path, monkeypatch):
    """Writes a module that no other test has imported, and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"seam_target_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("VALUE = 1\ndef function(): return VALUE\n")
    yield name
    sys.modules.pop(name, None)


def test_a_target_is_patched_after_it_was_executed(target):
    seen = []
    sys.meta_path.insert(0, Hook({target: "part"}, lambda module, part: seen.append((module.VALUE, part))))
    module = importlib.import_module(target)
    assert seen == [(1, "part")]
    assert importlib.import_module(target) is module
    assert len(seen) == 1


def test_the_module_keeps_its_own_loader_and_source(target):
    sys.meta_path.insert(0, Hook({target: "part"}, lambda module, part: None))
    module = importlib.import_module(target)
    assert type(module.__loader__) is type(module.__spec__.loader) is SourceFileLoader
    assert "VALUE" in inspect.getsource(module.function)


def test_other_modules_are_not_looked_at():
    looked = Hook({"one": "part"}, lambda module, part: pytest.fail("patched"))
    assert looked.find_spec("json") is None


def test_a_failing_patch_leaves_the_import_alone(target, capsys):
    def fail(module, part):
        raise RuntimeError("no luck")

    sys.meta_path.insert(0, Hook({target: "part"}, fail))
    assert importlib.import_module(target).VALUE == 1
    assert "no luck" in capsys.readouterr().err


def test_a_module_that_fails_to_import_fails_as_ever(target, tmp_path):
    (tmp_path / f"{target}.py").write_text("raise LookupError('its own')")
    sys.meta_path.insert(0, Hook({target: "part"}, lambda module, part: pytest.fail("patched")))
    with pytest.raises(LookupError, match="its own"):
        importlib.import_module(target)


def test_a_target_that_is_not_installed_is_still_not_found():
    sys.meta_path.insert(0, Hook({"seam_nowhere": "part"}, lambda module, part: pytest.fail("patched")))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("seam_nowhere")


def test_two_hooks_on_one_target_both_have_their_say(target):
    """Each asks all other finders, so they would ask each other for ever."""
    seen = []
    for name in ("first", "second"):
        sys.meta_path.insert(0, Hook({target: name}, lambda module, part: seen.append(part)))
    importlib.import_module(target)
    assert sorted(seen) == ["first", "second"]


def test_reloading_patches_again(target):
    seen = []
    sys.meta_path.insert(0, Hook({target: "part"}, lambda module, part: seen.append(part)))
    importlib.reload(importlib.import_module(target))
    assert seen == ["part", "part"]


def test_arming_twice_leaves_one_hook():
    assert hook.arm()
    assert hook.arm()
    assert sum(isinstance(finder, Hook) for finder in sys.meta_path) == 1


def test_the_switch_keeps_the_hook_away(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, Hook)])
    monkeypatch.setenv("RAY_SERVE_GRPC_NATIVE", "0")
    assert not hook.arm()
    assert not hook.armed()
