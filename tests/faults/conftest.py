"""Faults under load on a real Ray: the clusters of tests/serve, and the load of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "serve"))

pytest.register_assert_rewrite("harness.comparison")

from harness.pool import Pool  # noqa: E402


@pytest.fixture(scope="session")
def selected() -> tuple[str, ...]:
    return ("native",)


@pytest.fixture(scope="session")
def _session_pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    noise = pool.close()
    assert not noise, "the logs of the clusters tell of defects:\n" + "\n".join(noise[:40])


@pytest.fixture(scope="module", autouse=True)
def _variants_end_with_their_module(_session_pool: Pool) -> Iterator[None]:
    yield
    _session_pool.close_variants()


@pytest.fixture
def pool(_session_pool: Pool) -> Pool:
    return _session_pool
