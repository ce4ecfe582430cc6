"""A node that vanishes under load takes its own replicas with it, and nothing else."""

from __future__ import annotations

from programs import run


def test_calls_between_the_nodes_that_stay_go_on_when_one_vanishes():
    said = run("nodes.py")
    assert "\nkept\n" in said, said
