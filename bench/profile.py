"""Where a caller's and a replica's CPU time goes at saturation, as Markdown.

Three views, since none shows all: threads, by the kernel's accounts; Python functions, by py-spy; and what runs below
them (Rust, C, the kernel), by perf. Each is taken under a load of its own, so that they do not slow each other down.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.payloads import format_size
from bench.samples import Sample
from bench.serve.run import clusters

ROLES = ("caller", "leaf")
_RATE = 200  # samples of Python's stacks a second; each stops the process for about a millisecond
_RAMP_S = 1.5  # until the load is steady

Say = Callable[[str], None]


def profile(
    variant: str, mode: str, kind: str, size: int, in_flight: int, seconds: float, lines: int, say: Say
) -> Iterator[str]:
    """Blocks of Markdown, as they come."""
    with clusters([variant], mode, say) as (child,):
        roles: dict[str, list[int]] = child.said
        pids = {role: roles[role][0] for role in ROLES}

        def load(duration: float) -> Sample:
            sample = child.ask("calls", "leaf", kind, size, in_flight, duration, 1, timeout=duration + 60)
            assert isinstance(sample, Sample)
            return sample

        load(_RAMP_S)
        before = {role: _threads(pid) for role, pid in pids.items()}
        sample = load(seconds)
        after = {role: _threads(pid) for role, pid in pids.items()}
        yield (
            f"{variant}, mode {mode}, {kind} {format_size(size)}, {in_flight} in flight: "
            f"{sample.count / sample.seconds:,.0f} calls/s\n"
        )
        for role in ROLES:
            yield _thread_table(role, before[role], after[role], sample.count)
        for role, pid in pids.items():
            with _under(load, seconds):
                yield _python(role, pid, seconds, lines)
        for role, pid in pids.items():
            with _under(load, seconds):
                yield _native(role, pid, seconds, lines)


@contextlib.contextmanager
def _under(load: Callable[[float], Sample], seconds: float) -> Iterator[None]:
    """A load that goes on while the body runs."""
    thread = threading.Thread(target=load, args=(seconds + 2 * _RAMP_S,))
    thread.start()
    time.sleep(_RAMP_S)
    try:
        yield
    finally:
        thread.join()


def _threads(pid: int) -> Counter[str]:
    """Name of thread -> CPU nanoseconds; those of one name together."""
    spent: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            name = re.sub(r"[-_]?\d+$", "", (task / "comm").read_text().strip())
            spent[name] += int((task / "schedstat").read_text().split()[0])
    return spent


def _thread_table(role: str, before: Counter[str], after: Counter[str], calls: int) -> str:
    spent = after - before
    lines = [f"**{role}: CPU by thread**, µs per call", "", "| thread | µs |", "| --- | ---: |"]
    lines += [f"| {name} | {nanoseconds / 1e3 / calls:.1f} |" for name, nanoseconds in spent.most_common(8)]
    lines += [f"| all | {spent.total() / 1e3 / calls:.1f} |", ""]
    return "\n".join(lines)


def _python(role: str, pid: int, seconds: float, lines: int) -> str:
    tool = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if tool is None:
        return f"{role}: no Python functions, since py-spy is not installed.\n"
    with tempfile.NamedTemporaryFile(suffix=".txt") as output:
        command = [tool, "record", "--pid", str(pid), "--duration", str(max(1, round(seconds))), "--rate", str(_RATE)]
        command += ["--gil", "--function", "--format", "raw", "--output", output.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        stacks = Path(output.name).read_text().splitlines()
    if not stacks:
        return f"{role}: py-spy failed: {done.stderr.strip()[-500:]}\n"
    total, own, inclusive = 0, Counter[str](), Counter[str]()
    for line in stacks:
        frames_text, _, count = line.rpartition(" ")
        frames = frames_text.split(";")
        total += int(count)
        own[frames[-1]] += int(count)
        for frame in {frame for frame in frames if "threading.py" not in frame}:
            inclusive[frame] += int(count)
    held = total / (max(1, round(seconds)) * _RATE)
    rows = [f"**{role}: Python functions**, % of the time that it held the GIL, which was {held:.0%} of all", ""]
    rows += ["| alone | function | | with callees | function |", "| ---: | --- | --- | ---: | --- |"]
    for (inner, few), (outer, many) in zip(own.most_common(lines), inclusive.most_common(lines), strict=False):
        rows.append(f"| {few / total:.1%} | `{inner}` | | {many / total:.1%} | `{outer}` |")
    return "\n".join([*rows, ""])


def _native(role: str, pid: int, seconds: float, lines: int) -> str:
    tool = shutil.which("perf")
    if tool is None:
        return f"{role}: nothing below Python, since perf is not installed.\n"
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder) / "perf.data")
        record = [tool, "record", "-e", "cpu-clock", "-F", "499", "-p", str(pid), "-o", data]
        done = subprocess.run([*record, "--", "sleep", str(seconds)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"{role}: perf failed: {done.stderr.strip()[-500:]}\n"
        parts = [
            _perf_table(f"{role}: by library", _perf_lines(tool, data, "dso"), 8),
            _perf_table(f"{role}: by symbol", _perf_lines(tool, data, "dso,symbol"), lines),
        ]
    return "\n".join(parts)


def _perf_lines(tool: str, data: str, sort: str) -> list[tuple[str, str]]:
    """(percent, what)"""
    command = [tool, "report", "--stdio", "--no-children", "-g", "none", "-s", sort, "-i", data]
    environment = {**os.environ, "DEBUGINFOD_URLS": ""}
    shown = subprocess.run(command, capture_output=True, text=True, check=False, env=environment).stdout
    found = (re.match(r"\s*(\d+\.\d+%)\s+(.*\S)", line) for line in shown.splitlines())
    return [
        (match[1], re.sub(r"\s{2,}", " ", match[2]).removesuffix(" - -").replace("|", "/")) for match in found if match
    ]


def _perf_table(title: str, found: list[tuple[str, str]], lines: int) -> str:
    rows = [f"**{title}**, % of its CPU", "", "| % | what |", "| ---: | --- |"]
    return "\n".join([*rows, *(f"| {percent} | `{what[:110]}` |" for percent, what in found[:lines]), ""])
