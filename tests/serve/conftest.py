"""Fixtures of the tests on a real Ray: a pool of clusters, one per transport, shared by the whole session."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("harness.comparison")

from harness import transports  # noqa: E402
from harness.fixtures import _session_pool, _variants_end_with_their_module, pool  # noqa: E402, F401


@pytest.fixture(scope="session")
def selected(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The transports asked for on the command line."""
    names = tuple(request.config.getoption("--transports").split(","))
    unknown = set(names).difference(transports.ALL)
    if unknown:
        raise pytest.UsageError(f"--transports: unknown {sorted(unknown)}, known are {list(transports.ALL)}")
    return names
