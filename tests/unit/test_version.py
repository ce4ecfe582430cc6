"""The version stands in Cargo.toml, and everything else takes it from there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.version import Version

import ray_serve_grpc
from ray_serve_grpc import _native

ROOT = Path(__file__).parents[2]


def text(name: str) -> str:
    return (ROOT / name).read_text()


def declared() -> str:
    section = text("Cargo.toml").split("[workspace.package]")[1].split("\n[")[0]
    found = re.search(r'^version = "(.+)"$', section, re.MULTILINE)
    assert found
    return found[1]


def test_the_core_is_of_this_version():
    assert _native.__version__ == declared()


def test_the_installed_package_is_of_this_version():
    if ray_serve_grpc.__version__ == "unknown":
        pytest.skip("run from a source tree that is not installed")
    assert Version(ray_serve_grpc.__version__) == Version(declared())


def test_no_other_file_declares_a_version():
    assert "version.workspace = true" in text("native/Cargo.toml")
    assert 'dynamic = ["version"]' in text("pyproject.toml")
    assert not re.search(r"^version =", text("pyproject.toml"), re.MULTILINE)
    lock = re.search(r'name = "ray-serve-grpc-native"\nversion = "(.+)"', text("Cargo.lock"))
    assert lock
    assert lock[1] == declared()


def test_the_changelog_begins_with_what_is_unreleased_and_dates_what_is_not():
    heads = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d{2}-\d{2}))?$", text("CHANGELOG.md"), re.MULTILINE)
    names = [name for name, _ in heads]
    assert names[0] == "Unreleased"
    assert all(date for name, date in heads if name != "Unreleased")
    assert names == ["Unreleased", *sorted(names[1:], key=Version, reverse=True)]
    assert all(Version(name) <= Version(declared()) for name in names[1:])
