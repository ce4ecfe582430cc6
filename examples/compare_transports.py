"""Runs the image pipeline over actor calls, Ray's grpc.aio transport and ray_serve_grpc, and compares them.

Each transport gets its own process and its own local Ray cluster; `--rounds` repeats all of them, each time starting
with another one. The answers must be the same on all of them, and every call of ours must have been carried by us.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import io
import json
import logging
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENVIRONMENTS = {
    "actor": {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "0", "RAY_SERVE_PROXY_USE_GRPC": "0", "RAY_SERVE_GRPC_NATIVE": "0"},
    "grpc.aio": {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "1", "RAY_SERVE_PROXY_USE_GRPC": "1", "RAY_SERVE_GRPC_NATIVE": "0"},
    "native": {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "1", "RAY_SERVE_PROXY_USE_GRPC": "1", "RAY_SERVE_GRPC_NATIVE": "1"},
}
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_SERVE_LOG_TO_STDERR": "0"}
NAMES = {"actor": "actor calls", "grpc.aio": "grpc.aio", "native": "ray_serve_grpc"}
WORDS, STREAMS, WARM_UP = 200, 10, 15
CHILD_SECONDS = 150

Report = dict[str, Any]


def main() -> int:
    arguments = parse_arguments()
    if arguments.child:
        return run_child(arguments.child, arguments.requests, Path(arguments.report))
    transports = arguments.transports.split(",")
    reports: dict[str, list[Report]] = {name: [] for name in transports}
    total, done = len(transports) * arguments.rounds, 0
    with tempfile.TemporaryDirectory(prefix="rsg-demo-") as folder:
        for turn in range(arguments.rounds):
            for name in transports[turn % len(transports) :] + transports[: turn % len(transports)]:
                done += 1
                say(f"[{done}/{total}] {NAMES[name]}")
                report = run_in_own_process(name, arguments.requests, Path(folder) / f"{done}.json")
                if report is None:
                    say(f"demo: FAILED: the run over {NAMES[name]} did not finish")
                    return 1
                reports[name].append(report)
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
    parser.add_argument("--requests", type=int, default=120, help="classified photographs per run (default: 120)")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each transport (default: 1)")
    parser.add_argument("--transports", default=",".join(ENVIRONMENTS), help="default: %(default)s")
    parser.add_argument("--child", choices=ENVIRONMENTS, help=argparse.SUPPRESS)
    parser.add_argument("--report", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = set(arguments.transports.split(",")) - set(ENVIRONMENTS)
    if unknown or arguments.requests < 1 or arguments.rounds < 1:
        parser.error(f"transports are {', '.join(ENVIRONMENTS)}; requests and rounds are at least 1")
    return arguments


# The parent: one process for each run.


def run_in_own_process(transport: str, requests: int, report: Path) -> Report | None:
    """Runs one transport in a process group of its own. None when it failed or took over CHILD_SECONDS."""
    command = [sys.executable, __file__, "--child", transport, "--requests", str(requests), "--report", str(report)]
    environment = os.environ | QUIET | ENVIRONMENTS[transport]
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        code = child.wait(CHILD_SECONDS)
    except subprocess.TimeoutExpired:
        say(f"    no end after {CHILD_SECONDS} s")
        code = -1
    finally:
        end(child)
    return json.loads(report.read_text()) if code == 0 else None


def end(child: subprocess.Popen[bytes]) -> None:
    """Asks the child to take its cluster down, and makes sure that it is gone."""
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


# The child: a cluster, the application, requests.


def run_child(transport: str, requests: int, report: Path) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    started = time.perf_counter()
    from ray import serve

    import image_pipeline

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    say("    starting Ray and the application")
    with cluster() as port:
        serve.run(image_pipeline.app, name="images", route_prefix="/")
        say(f"    cluster and application are up ({time.perf_counter() - started:.0f} s)")
        result = measure(port, requests)
        result["driver"] = image_pipeline.transport_status()
        report.write_text(json.dumps(result))
    say(f"    done ({time.perf_counter() - started:.0f} s)")
    return 0


@contextlib.contextmanager
def cluster() -> Iterator[int]:
    """A local Ray cluster with Serve's HTTP proxy on a free port. Takes everything down again."""
    import ray
    from ray import serve

    folder = tempfile.mkdtemp(prefix="rsg")
    try:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=256 * 2**20,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
        )
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield port
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def measure(port: int, requests: int) -> Report:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    photographs = list(make_photographs())

    def classify(index: int) -> tuple[str, dict[str, Any]]:
        name, jpeg = photographs[index % len(photographs)]
        return name, json.loads(fetch(connection, "POST", "/classify", jpeg))

    for index in range(WARM_UP):
        classify(index)
        fetch(connection, "GET", f"/tell?words=20&seed={index}")
    fetch(connection, "POST", "/trace", photographs[0][1])
    lanes = json.loads(fetch(connection, "POST", "/trace", photographs[0][1]))
    fetch(connection, "GET", "/report")  # forget the warm-up

    wholes, answers = [], []
    for index in range(requests):
        started = time.perf_counter()
        name, answer = classify(index)
        wholes.append((time.perf_counter() - started) * 1e3)
        answers.append((name, answer["label"], round(answer["share"], 3)))
        if (index + 1) % max(1, requests // 4) == 0:
            say(f"    {index + 1}/{requests} photographs classified")
    texts = [fetch(connection, "GET", f"/tell?words={WORDS}&seed={seed}").decode() for seed in range(STREAMS)]
    say(f"    {STREAMS} texts of {WORDS} words streamed")
    report = json.loads(fetch(connection, "GET", "/report"))
    connection.close()
    report["hops"]["whole"] = wholes
    report["hops"]["http"] = [whole - inner for whole, inner in zip(wholes, report["hops"]["pipeline"], strict=True)]
    return report | {"answers": answers, "texts": texts, "lanes": lanes}


def fetch(connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None) -> bytes:
    connection.request(method, path, body=body)
    response = connection.getresponse()
    content = response.read()
    if response.status != 200:
        raise RuntimeError(f"{method} {path}: HTTP {response.status}: {content[:500].decode(errors='replace')}")
    return content


def make_photographs() -> Iterator[tuple[str, bytes]]:
    """The two photographs as JPEG files, as they are, mirrored, and in four brightnesses."""
    from PIL import Image, ImageEnhance, ImageOps
    from sklearn.datasets import load_sample_image

    from image_pipeline import PHOTOGRAPHS

    for brightness in (1.0, 0.9, 1.1, 0.8):
        for mirrored in (False, True):
            for name in PHOTOGRAPHS:
                picture = ImageEnhance.Brightness(Image.fromarray(load_sample_image(name))).enhance(brightness)
                file = io.BytesIO()
                (ImageOps.mirror(picture) if mirrored else picture).save(file, "JPEG", quality=90)
                yield name, file.getvalue()


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
    ("HTTP request, the whole", "whole", None),
    ("  HTTP, proxy, 0.2 MB", "http", None),
    ("  Decoder, 0.2 -> 0.8 MB", "decode", "decode"),
    ("  Normaliser, 0.8 -> 2.4 MB", "normalise", "normalise"),
    ("  Classifier, 2.4 MB ->", "classify", "classify"),
    ("Narrator, first word", "first word", None),
    (f"Narrator, {WORDS} words", "all words", None),
)


def p50(reports: list[Report], group: str, key: str) -> float:
    """Milliseconds: the median over the rounds of each round's median."""
    return statistics.median(statistics.median(report[group][key]) for report in reports)


def show(reports: dict[str, list[Report]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    carried = Table(title="What carried each hop", title_justify="left", box=box.SIMPLE_HEAD)
    carried.add_column("hop")
    times = Table(title="p50 in ms, one request at a time", title_justify="left", box=box.SIMPLE_HEAD)
    times.add_column("", no_wrap=True)
    times.add_column("user code", justify="right")
    for name in reports:
        carried.add_column(NAMES[name])
        times.add_column(NAMES[name], justify="right")
    for hop, title in HOPS.items():
        carried.add_row(title, *(runs[0]["lanes"][hop] for runs in reports.values()))
    for title, key, work in ROWS:
        everything = [run for runs in reports.values() for run in runs]
        user_code = f"{p50(everything, 'work', work):.1f}" if work else ""
        times.add_row(title, user_code, *(f"{p50(runs, 'hops', key):.1f}" for runs in reports.values()))
    console.print()
    console.print(carried)
    console.print(times)
    score = next(iter(reports.values()))[0]["score"]
    say(f"Classifier: {score:.1%} of the patches it was not fitted on are told apart.")
    say(f"Narrator said: {next(iter(reports.values()))[0]['texts'][0][:90]}…\n")


def find_faults(reports: dict[str, list[Report]]) -> list[str]:
    """What should not be: wrong or differing answers, calls of ours that another transport carried."""
    faults = []
    first = next(iter(reports.values()))[0]
    for name, runs in reports.items():
        for run in runs:
            wrong = sum(truth != label for truth, label, _ in run["answers"])
            if wrong > len(run["answers"]) // 20:
                faults.append(f"{NAMES[name]}: {wrong} of {len(run['answers'])} photographs classified wrongly")
            if run["answers"] != first["answers"] or run["texts"] != first["texts"]:
                faults.append(f"{NAMES[name]}: answers differ from those over {NAMES[next(iter(reports))]}")
            if any(len(text.split()) != WORDS for text in run["texts"]):
                faults.append(f"{NAMES[name]}: a text was cut short")
            for process, status in (("the driver", run["driver"]), ("the Frontend's replica", run["transport"])):
                if status["active"] != (name == "native"):
                    state = "on" if status["active"] else "off"
                    faults.append(f"{NAMES[name]}: the plugin is {state} in {process}: {status['reason']}")
            expected = {"actor": "actor call", "grpc.aio": "grpc.aio", "native": "ray_serve_grpc"}[name]
            faults += [
                f"{NAMES[name]}: {HOPS[hop]} was carried by {carrier}"
                for hop, carrier in run["lanes"].items()
                if not carrier.startswith(expected)
            ]
    return faults


def summary(reports: dict[str, list[Report]]) -> str:
    """One line: the answers agree, what carried the calls, and how the times compare."""
    answers = f"the same answers on {len(reports)} transports" if len(reports) > 1 else "all answers right"
    carried = ", every hop of ours carried by ray_serve_grpc" if "native" in reports else ""
    wholes = ", ".join(f"{p50(runs, 'hops', 'whole'):.1f} ms over {NAMES[name]}" for name, runs in reports.items())
    return f"- {answers}{carried}; an HTTP request took {wholes} (p50)"


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
