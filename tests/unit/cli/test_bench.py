"""What the bench makes of its figures, and what it promises about signals."""

from __future__ import annotations

import os
import signal

import pytest
from rich.console import Console

from ray_serve_grpc.cli.bench import run, table
from ray_serve_grpc.cli.bench.run import ACTOR, LATENCY, OURS, STOCK, THROUGHPUT


def figures(actor, stock, ours):
    return {ACTOR: actor, STOCK: stock, OURS: ours}


@pytest.mark.parametrize(
    ("mode", "found", "wins"),
    [
        (LATENCY, figures(3.0, 2.0, 1.0), OURS),
        (LATENCY, figures(1.0, 2.0, 3.0), ACTOR),
        (THROUGHPUT, figures(1.0, 30.0, 3.0), STOCK),
        (LATENCY, figures(1.0, 2.0, 1.04), None),
        (THROUGHPUT, figures(100.0, 2.0, 104.0), None),
    ],
)
def test_the_better_one_wins_whoever_it_is(mode, found, wins):
    assert run.winner(mode, found) == wins


@pytest.mark.parametrize(("size", "calls"), [(1, 16), (10_000_000, 6), (10**9, 2)])
def test_large_calls_are_fewer_in_flight(size, calls):
    assert run.in_flight_with(size) == calls


@pytest.mark.parametrize(
    ("ours", "stock", "text"),
    [
        ({"active": False, "reason": "no module", "calls": {}}, {"active": False}, "no module"),
        ({"active": True, "reason": "", "calls": {"stock": {"unary": 1}}}, {"active": False}, "own protocol"),
        ({"active": True, "reason": "", "calls": {"unix": {"unary": 1}}}, {"active": True}, "switched it off"),
    ],
)
def test_figures_of_another_transport_are_not_passed_off_as_ours(ours, stock, text):
    with pytest.raises(run.BenchFailed, match=text):
        run._carried({"shared_memory": {}, **ours}, stock)


def test_losses_are_shown_like_wins():
    rows = [
        {"mode": LATENCY, "bytes": 1_000, "in_flight": 1, "figures": figures(0.001, 0.002, 0.003), "winner": ACTOR},
        {"mode": THROUGHPUT, "bytes": 10**7, "in_flight": 6, "figures": figures(37, 2, 32), "winner": ACTOR},
        {"mode": THROUGHPUT, "bytes": 10**6, "in_flight": 16, "figures": figures(7, 2, 7), "winner": None},
    ]
    report = {"payload": "bytes", "ray_version": "2.60.0", "lanes": ["unix"], "seconds": 1, "rounds": 1, "rows": rows}
    out = Console(width=120)
    with out.capture() as captured:
        table.show(report, out)
    lines = [line.split() for line in captured.get().splitlines()]
    assert ["1", "KB", "1.00", "2.00", "3.00", "actor", "calls"] in lines
    assert ["10", "MB", "6", "37", "2", "32", "actor", "calls"] in lines
    assert ["1", "MB", "16", "7", "2", "7", "none", "is", "clearly", "best"] in lines


def test_taking_down_is_not_cut_short_by_a_second_interrupt():
    before = signal.getsignal(signal.SIGINT)
    with run.undisturbed():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


def test_termination_unwinds_like_an_interrupt():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), run.interrupted_by_termination():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
