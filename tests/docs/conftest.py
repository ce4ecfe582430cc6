"""One cluster for all pages and examples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("documents.page", "documents.commands")

from documents.cluster import Cluster, running  # noqa: E402


@pytest.fixture(scope="session")
def _session_cluster() -> Iterator[Cluster]:
    with running() as cluster:
        yield cluster


@pytest.fixture
def cluster(_session_cluster: Cluster) -> Iterator[Cluster]:
    """The shared cluster, without applications."""
    yield _session_cluster
    _session_cluster.delete_applications()
