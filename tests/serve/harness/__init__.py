"""Runs one scenario on several transports, each in its own Ray cluster, and compares what came out.

Layout:
    transports  which environment variables make which transport
    pool        (test process) starts worker processes, sends them scenarios, collects outcomes
    worker      (child process) one driver with one Ray cluster; runs scenarios one at a time
    cluster     (child process) what a scenario is handed: apps, URLs, logs
    board       a named actor on which replicas note events and wait at gates
    outcome     errors and results as plain data
    comparison  the `same_as_actor` decorator

`python -m harness.worker` is started with this folder's parent on PYTHONPATH, which the replicas inherit: the
deployments of a test module are imported there, not pickled by value.
"""

from harness.board import Board, board, note, note_sync
from harness.cluster import Cluster, deployment
from harness.comparison import same_as_actor
from harness.outcome import collect, describe, outcome, outcome_async

__all__ = [
    "Board",
    "Cluster",
    "board",
    "collect",
    "deployment",
    "describe",
    "note",
    "note_sync",
    "outcome",
    "outcome_async",
    "same_as_actor",
]
