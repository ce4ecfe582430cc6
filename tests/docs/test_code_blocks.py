"""Every code block of the README, the documentation and the examples is run, or says why not."""

from __future__ import annotations

from pathlib import Path

import pytest
from documents import page
from documents.blocks import ROOT, blocks, pages
from documents.cluster import Cluster

#: (page, first line) of every block that is shown and not run. The page tells why, in a comment before the block.
NOT_RUN = {
    ("docs/getting-started.md", "$ RAY_SERVE_USE_GRPC_BY_DEFAULT=1 ray start --head"),
    ("docs/kubernetes.md", "FROM rayproject/ray:2.60.0-py311"),
    ("docs/kubernetes.md", "$ kubectl apply -f rayservice.yaml"),
}

RUN = [path for path in pages() if any(not block.not_run for block in blocks(path))]


@pytest.mark.parametrize("path", RUN, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_the_page_shows_works(path: Path, cluster: Cluster, tmp_path: Path) -> None:
    page.run(blocks(path), tmp_path, cluster)


def test_no_other_blocks_are_left_out_than_those_listed_here() -> None:
    marked = {block for path in pages() for block in blocks(path) if block.not_run}
    assert {(str(block.path.relative_to(ROOT)), block.first_line) for block in marked} == NOT_RUN
    for block in marked:
        assert len(block.not_run.split()) >= 3, f"{block.place}: give a reason"


def test_every_block_has_a_language_that_is_run_or_a_mark() -> None:
    unknown = [
        block.place
        for path in pages()
        for block in blocks(path)
        if not block.not_run and block.language not in page.RUNNERS
    ]
    assert not unknown
