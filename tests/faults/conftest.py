"""Faults under load on a real Ray: the clusters of tests/serve, and the load of this folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "serve"), str(HERE.parents[1])]

pytest.register_assert_rewrite("harness.comparison")

from harness.fixtures import _session_pool, _variants_end_with_their_module, pool  # noqa: E402, F401


@pytest.fixture(scope="session")
def selected() -> tuple[str, ...]:
    return ("native",)
