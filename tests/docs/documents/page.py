"""All blocks of one page, run in the order of the page, in a folder of its own."""

from __future__ import annotations

import doctest
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from documents import commands, schemas
from documents.blocks import ROOT, Block
from documents.cluster import Cluster

#: What a Python block prints stands below the line that prints it, after this.
PRINTS = "# -> "


def run(page: list[Block], folder: Path, cluster: Cluster) -> None:
    with Driver.started(folder, cluster) as driver:
        for number, block in enumerate(page):
            if block.title:
                (folder / block.title).write_text(block.text)
            if block.not_run:
                continue
            if block.title and block.language == "python":
                later = "\n".join(other.text for other in page[number + 1 :])
                assert Path(block.title).stem in later, f"{block.place}: no later block uses {block.title}"
                compile(block.text, block.place, "exec")
                continue
            RUNNERS[block.language](block, folder, cluster, driver)


def run_python(block: Block, folder: Path, cluster: Cluster, driver: Driver) -> None:
    printed = driver.execute(block)
    shown = "\n".join(
        line.strip().removeprefix(PRINTS) for line in block.text.splitlines() if line.strip().startswith(PRINTS)
    )
    assert_same_output(block, shown, printed)


def run_console(block: Block, folder: Path, cluster: Cluster, driver: Driver) -> None:
    lines, shown = commands.split(block.text)
    assert lines, f"{block.place}: a console block without a command ('$ …')"
    printed = commands.run(lines, folder, cluster)
    if shown:
        assert_same_output(block, shown, printed)


def run_yaml(block: Block, folder: Path, cluster: Cluster, driver: Driver) -> None:
    for document in yaml.safe_load_all(block.text):
        schemas.check(document, block.place)


def run_json(block: Block, folder: Path, cluster: Cluster, driver: Driver) -> None:
    json.loads(block.text)


def run_text(block: Block, folder: Path, cluster: Cluster, driver: Driver) -> None:
    """A drawing or an output."""
    assert not block.text.startswith("$ "), f"{block.place}: commands belong into a console block"


def run_promql(block: Block, folder: Path, cluster: Cluster, driver: Driver) -> None:
    """A query of metrics that the page describes; Ray puts `ray_` in front of their names."""
    described = block.path.read_text().replace(block.text, "")
    names = re.findall(r"\bray_(\w+)", block.text)
    assert names, f"{block.place}: a query of no metric of ours"
    missing = [name for name in names if name.removesuffix("_total") not in described]
    assert not missing, f"{block.place}: the page does not describe {missing}"


RUNNERS = {
    "python": run_python,
    "console": run_console,
    "yaml": run_yaml,
    "json": run_json,
    "promql": run_promql,
    "text": run_text,
}


def assert_same_output(block: Block, shown: str, printed: str) -> None:
    """`...` in what is shown stands for anything."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    same = doctest.OutputChecker().check_output(shown.strip() + "\n", printed.strip() + "\n", flags)
    assert same, f"{block.place} shows\n{shown}\nand printed\n{printed}"


class Driver:
    """The process that executes a page's Python blocks; started with the first one."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self._folder = folder
        self._cluster = cluster
        self._process: subprocess.Popen[str] | None = None

    @classmethod
    @contextmanager
    def started(cls, folder: Path, cluster: Cluster) -> Iterator[Driver]:
        driver = cls(folder, cluster)
        try:
            yield driver
        finally:
            driver.close()

    def execute(self, block: Block) -> str:
        """What the block prints. Raises AssertionError with the traceback of one that fails."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        request = {"text": block.text, "place": str(block.path.relative_to(ROOT)), "line": block.line}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, f"{block.place} ended its process with {process.wait()}: {self._log().read_text()[-4000:]}"
        answer = json.loads(line)
        assert not answer["error"], f"{block.place}\n{answer['error']}"
        return str(answer["printed"])

    def close(self) -> None:
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin, process.stdout:
            process.stdin.close()
            try:
                process.wait(60)
            finally:
                process.kill()
                process.wait()

    def _start(self) -> subprocess.Popen[str]:
        with self._log().open("wb") as log:
            return subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("driver.py"))],
                cwd=self._folder,
                env=self._cluster.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def _log(self) -> Path:
        return self._folder / "driver.log"
