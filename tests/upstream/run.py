"""Runs Ray's own tests of the by-value path over our transport and prints a table.

Ray's tests are not part of this repository: supply the folder `python/ray/serve/tests` of the Ray release that is
installed. Its files run unchanged; `support.py` stands in for its `conftest.py` where that needs parts that Ray's wheel
leaves out.

    python tests/upstream/run.py FOLDER [--transport native|stock] [NAME ...]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent

#: Ray's tests of this path, and what is expected to differ.
FILES = (
    "test_grpc_e2e",
    "test_grpc_replica_wrapper",
    "unit/test_grpc_replica_result",
    "test_handle_1",
    "test_handle_2",
    "test_handle_streaming",
    "test_handle_cancellation",
    "test_http_cancellation",
    "test_handle_same_loop",
    "test_backpressure",
    "test_backpressure_grpc",
    "test_streaming_response",
    "test_multiplex",
    "test_regression",
)
ON_PURPOSE = {
    "test_to_object_ref_not_supported": "our responses can become object references",
}
#: Settings that a file needs besides the transport's.
SETTINGS = {"test_handle_same_loop": {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}}
TRANSPORTS = {"native": "1", "stock": "0"}
TIMEOUT_S = 600


@dataclass
class Tally:
    passed: int = 0
    skipped: int = 0
    differing: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    note: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="python/ray/serve/tests of the installed Ray's release")
    parser.add_argument("names", nargs="*", default=[], help="files to run (default: all of the list)")
    parser.add_argument("--transport", choices=TRANSPORTS, default="native")
    parser.add_argument("--logs", type=Path, help="keep pytest's output of each file here")
    options = parser.parse_args()
    bad = 0
    print(f"{'file':32} {'passed':>6} {'skipped':>7} {'differs':>7} {'failed':>6}")
    for name in options.names or FILES:
        tally = run(options.folder.resolve(), name, options.transport, options.logs)
        bad += len(tally.failed) + bool(tally.note and "not supplied" not in tally.note)
        counts = f"{tally.passed:6} {tally.skipped:7} {len(tally.differing):7} {len(tally.failed):6}"
        print(f"{name:32} {counts}  {tally.note}", flush=True)
        for failure in tally.failed:
            print(f"    {failure}", flush=True)
    return 1 if bad else 0


def run(folder: Path, name: str, transport: str, logs: Path | None) -> Tally:
    file = folder / f"{name}.py"
    if not file.is_file():
        return Tally(note="not supplied")
    variables = {
        **os.environ,
        "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
        "RAY_SERVE_GRPC_NATIVE": TRANSPORTS[transport],
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_UPSTREAM_TESTS": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
        **SETTINGS.get(name, {}),
    }
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        # No configuration of ours: Ray's tests know nothing of our strictness. A conftest.py beside them is left out.
        command = [sys.executable, "-m", "pytest", "-q", "-p", "support", "--noconftest", "-c", os.devnull]
        command += ["--rootdir", str(folder), "-W", "ignore", f"--junitxml={report}", str(file)]
        for setting in ("asyncio_mode=strict", "asyncio_default_fixture_loop_scope=function"):
            command += ["-o", setting]
        try:
            ran = subprocess.run(
                command, env=variables, cwd=scratch, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return Tally(note=f"no end within {TIMEOUT_S} s")
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
            (logs / f"{transport}-{name.replace('/', '-')}.log").write_text(ran.stdout + ran.stderr)
        if not report.is_file():
            return Tally(note=f"pytest ended with {ran.returncode}: {ran.stdout[-300:]}{ran.stderr[-300:]}")
        tally = count(report)
        if ran.returncode not in (0, 1):
            tally.note = f"pytest ended with {ran.returncode}: {ran.stderr.strip()[-300:]}"
        return tally


def count(report: Path) -> Tally:
    tally = Tally()
    for case in ElementTree.parse(report).iter("testcase"):
        test = case.get("name", "")
        if case.find("failure") is not None or case.find("error") is not None:
            known = test.split("[")[0] in ON_PURPOSE
            (tally.differing if known else tally.failed).append(test)
        elif case.find("skipped") is not None:
            tally.skipped += 1
        else:
            tally.passed += 1
    if tally.differing:
        tally.note = "on purpose: " + "; ".join(sorted({ON_PURPOSE[test.split("[")[0]] for test in tally.differing}))
    return tally


if __name__ == "__main__":
    sys.exit(main())
