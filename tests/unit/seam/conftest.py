"""A seam without Ray: its state is fresh in each test, and what is native or Ray's is faked."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest

import ray_serve_grpc
from ray_serve_grpc import config
from ray_serve_grpc.config import Settings
from ray_serve_grpc.seam import activation


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch):
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    for name, empty in (("outcomes", {}), ("forms", {}), ("_reported", set())):
        monkeypatch.setattr(activation, name, empty)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    forget = config.settings.cache_clear
    forget()
    yield
    forget()


@pytest.fixture
def native(monkeypatch):
    """A native module that loads."""
    module = ModuleType("ray_serve_grpc._native")
    module.__version__ = "0.0.0"
    module.statistics = lambda: {
        "client_calls_unix_unary": 2,
        "client_calls_tcp_streaming": 1,
        "server_calls_tcp_unary": 3,
        "client_bytes_sent": 7,
    }
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(ray_serve_grpc, "_native", module, raising=False)
    return module


@pytest.fixture
def settings(monkeypatch):
    """Changes settings: `settings(lanes=("tcp",))`."""

    def change(**values):
        monkeypatch.setattr(config, "settings", lambda: Settings(**values))

    return change


@pytest.fixture
def warnings(caplog):
    """The texts of the plugin's warnings so far."""

    def texts():
        return [r.getMessage() for r in caplog.records if r.name == config.LOGGER_NAME and r.levelname == "WARNING"]

    return texts
