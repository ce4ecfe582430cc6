"""The clusters of a test session, for a conftest to import."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.pool import Pool


@pytest.fixture(scope="session")
def _session_pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    noise = pool.close()
    assert not noise, "the logs of clusters on our transport tell of defects:\n" + "\n".join(noise[:40])


@pytest.fixture(scope="module", autouse=True)
def _variants_end_with_their_module(_session_pool: Pool) -> Iterator[None]:
    yield
    _session_pool.close_variants()


@pytest.fixture
def pool(_session_pool: Pool) -> Pool:
    return _session_pool
