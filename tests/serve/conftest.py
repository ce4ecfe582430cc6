"""Fixtures of the tests on a real Ray: a pool of clusters, one per transport, shared by the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("harness.comparison")

from harness import transports  # noqa: E402
from harness.pool import Pool  # noqa: E402


@pytest.fixture(scope="session")
def selected(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The transports asked for on the command line."""
    names = tuple(request.config.getoption("--transports").split(","))
    unknown = set(names).difference(transports.ALL)
    if unknown:
        raise pytest.UsageError(f"--transports: unknown {sorted(unknown)}, known are {list(transports.ALL)}")
    return names


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
