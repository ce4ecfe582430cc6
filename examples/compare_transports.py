"""Runs the image pipeline over actor calls, Ray's grpc.aio transport and ray_serve_grpc, and compares them.

Each transport has its own process and its own local Ray cluster. All clusters are up at the same time and are measured
in turns, one at a time, so that whatever else the machine does meets all of them alike. The answers must be the same
on all, and every call of ours must have been carried by us.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

ENVIRONMENTS = {
    "actor": {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "0", "RAY_SERVE_PROXY_USE_GRPC": "0", "RAY_SERVE_GRPC_NATIVE": "0"},
    "grpc.aio": {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "1", "RAY_SERVE_PROXY_USE_GRPC": "1", "RAY_SERVE_GRPC_NATIVE": "0"},
    "native": {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "1", "RAY_SERVE_PROXY_USE_GRPC": "1", "RAY_SERVE_GRPC_NATIVE": "1"},
}
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_SERVE_LOG_TO_STDERR": "0"}
NAMES = {"actor": "actor calls", "grpc.aio": "grpc.aio", "native": "ray_serve_grpc"}
CARRIERS = {"actor": "actor call", "grpc.aio": "grpc.aio", "native": "ray_serve_grpc"}
WORDS, TEXTS = 200, 3  # of each text; in each turn
ANSWER_SECONDS = 240  # longest wait for a cluster's start or for a turn

Report = dict[str, Any]


class RunFailed(Exception):
    """A cluster did not start, died, or did not answer in time."""


def main() -> int:
    arguments = parse_arguments()
    transports = arguments.transports.split(",")
    try:
        reports = compare(transports, arguments.requests, arguments.rounds)
    except RunFailed as error:
        say(f"demo: FAILED: {error}")
        return 1
    show(reports)
    faults = find_faults(reports)
    for fault in faults:
        say(f"  wrong: {fault}")
    if faults:
        say(f"demo: FAILED: {len(faults)} thing(s) were not as they should be")
        return 1
    say(f"demo: OK {summary(reports)}")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=30, help="photographs per turn (default: 30)")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each transport (default: 4)")
    parser.add_argument("--transports", default=",".join(ENVIRONMENTS), help="default: %(default)s")
    arguments = parser.parse_args()
    unknown = set(arguments.transports.split(",")) - set(ENVIRONMENTS)
    if unknown or arguments.requests < 1 or arguments.rounds < 1:
        parser.error(f"transports are {', '.join(ENVIRONMENTS)}; requests and rounds are at least 1")
    return arguments


def compare(transports: list[str], requests: int, rounds: int) -> dict[str, Report]:
    began = time.perf_counter()
    with contextlib.ExitStack() as clusters:
        runs, reports = {}, {}
        for number, name in enumerate(transports, 1):
            say(f"[{number}/{len(transports)}] a Ray cluster with the application, its calls over {NAMES[name]}")
            runs[name] = clusters.enter_context(Run(name))
            reports[name] = runs[name].receive()
            say(f"      up and warm after {time.perf_counter() - began:.0f} s")
        for turn in range(rounds):
            # Each round starts with another one.
            for name in transports[turn % len(transports) :] + transports[: turn % len(transports)]:
                runs[name].ask(do="measure", photographs=requests, texts=TEXTS, words=WORDS)
            say(
                f"round {turn + 1} of {rounds}: {requests} photographs and {TEXTS} texts over each transport, "
                f"after {time.perf_counter() - began:.0f} s"
            )
        for name, run in runs.items():
            reports[name] |= run.ask(do="report")
        say("taking the clusters down")
    return reports


class Run:
    """The process of one transport. Leaving the context ends it and its cluster."""

    def __init__(self, transport: str) -> None:
        self._name = NAMES[transport]
        self._link, theirs = socket.socketpair()
        self._link.settimeout(ANSWER_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("pipeline_run.py"))],
                stdin=theirs,
                env=os.environ | QUIET | ENVIRONMENTS[transport],
                start_new_session=True,
            )
        self._lines = self._link.makefile("rw")

    def __enter__(self) -> Run:
        return self

    def ask(self, **command: object) -> Report:
        with contextlib.suppress(BrokenPipeError):  # receive() finds out
            self._lines.write(json.dumps(command) + "\n")
            self._lines.flush()
        return self.receive()

    def receive(self) -> Report:
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise RunFailed(f"{self._name}: no answer within {ANSWER_SECONDS} s") from None
        if not line:
            raise RunFailed(f"{self._name}: the process ended with code {self._process.wait()}")
        return json.loads(line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._lines.close()
        self._link.close()
        for farewell in (None, signal.SIGTERM):
            if farewell:
                self._process.send_signal(farewell)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


# What comes out.

HOPS = {
    "proxy": "HTTP proxy - Frontend",
    "decode": "Frontend - Decoder",
    "normalise": "Frontend - Normaliser",
    "classify": "Frontend - Classifier",
    "tell": "Frontend - Narrator",
}
ROWS = (
    # (title, key of the time, key of the user code's time)
    ("HTTP request", "whole", None),
    ("  HTTP, proxy, 0.2 MB", "http", None),
    ("  Decoder, -> 0.8 MB", "decode", "decode"),
    ("  Normaliser, -> 2.4 MB", "normalise", "normalise"),
    ("  Classifier, 2.4 MB", "classify", "classify"),
    ("Narrator, first word", "first word", None),
    (f"Narrator, {WORDS} words", "all words", None),
)


def p50(report: Report, group: str, key: str) -> float:
    """Milliseconds."""
    return statistics.median(report[group][key])


def show(reports: dict[str, Report]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    carried = Table(title="What carried each hop", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    carried.add_column("hop", no_wrap=True)
    times = Table(title="p50 in ms, one request at a time", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    times.add_column("", no_wrap=True)
    times.add_column("user code", justify="right", no_wrap=True)
    for name in reports:
        carried.add_column(NAMES[name])
        times.add_column(NAMES[name], justify="right", no_wrap=True)
    for hop, title in HOPS.items():
        carried.add_row(title, *(report["lanes"][hop] for report in reports.values()))
    for title, key, work in ROWS:
        user_code = statistics.median(p50(report, "work", work) for report in reports.values()) if work else None
        times.add_row(
            title,
            f"{user_code:.1f}" if user_code is not None else "",
            *(f"{p50(report, 'hops', key):.1f}" for report in reports.values()),
        )
    console.print()
    console.print(carried)
    console.print(times)
    first = next(iter(reports.values()))
    say(f"Classifier: {first['score']:.1%} of the patches it was not fitted on are told apart.")
    say(f"Narrator said: {first['texts'][0][:60]}…\n")


def find_faults(reports: dict[str, Report]) -> list[str]:
    """What should not be: wrong or differing answers, calls that another transport carried."""
    faults = []
    first = next(iter(reports.values()))
    for name, report in reports.items():
        wrong = sum(truth != label for truth, label, _ in report["answers"])
        if wrong > len(report["answers"]) // 20:
            faults.append(f"{NAMES[name]}: {wrong} of {len(report['answers'])} photographs classified wrongly")
        if report["answers"] != first["answers"] or report["texts"] != first["texts"]:
            faults.append(f"{NAMES[name]}: answers differ from those over {NAMES[next(iter(reports))]}")
        if any(len(text.split()) != WORDS for text in report["texts"]):
            faults.append(f"{NAMES[name]}: a text was cut short")
        for process, status in (("the driver", report["driver"]), ("the Frontend's replica", report["transport"])):
            if status["active"] != (name == "native"):
                state = "on" if status["active"] else "off"
                faults.append(f"{NAMES[name]}: the plugin is {state} in {process}: {status['reason']}")
            elif status["active"] and status["reason"]:
                faults.append(f"{NAMES[name]}: in {process}: {status['reason']}")
        faults += [
            f"{NAMES[name]}: {HOPS[hop]} was carried by {carrier}"
            for hop, carrier in report["lanes"].items()
            if not carrier.startswith(CARRIERS[name]) or "stock" in carrier
        ]
    return faults


def summary(reports: dict[str, Report]) -> str:
    """One line: the answers agree, what carried the calls, and how the times compare."""
    answers = f"the same answers on {len(reports)} transports" if len(reports) > 1 else "all answers right"
    carried = ", every hop of ours carried by ray_serve_grpc" if "native" in reports else ""
    wholes = ", ".join(f"{p50(report, 'hops', 'whole'):.1f} ms over {NAMES[name]}" for name, report in reports.items())
    return f"- {answers}{carried}; an HTTP request took {wholes} (p50)"


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
