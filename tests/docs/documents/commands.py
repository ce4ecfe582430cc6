"""The lines of console blocks, as they are run in a test."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from documents.blocks import ROOT
from documents.cluster import Cluster

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: For a block, with a cluster of its own, on a machine that is busy.
_SECONDS = 300

_FETCH = """
import sys, time, urllib.request
for _ in range(300):
    try:
        sys.exit(print(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode()))
    except OSError as error:
        problem = error
        time.sleep(0.2)
sys.exit(f"{sys.argv[1]}: {problem}")
"""


def split(text: str) -> tuple[list[str], str]:
    """(commands, the output that the block shows)."""
    commands, output = [], []
    for line in text.splitlines():
        if line.startswith("$ "):
            commands.append(line.removeprefix("$ "))
        elif commands and not output and commands[-1].endswith("\\"):
            commands[-1] += "\n" + line
        else:
            output.append(line)
    return commands, "\n".join(output)


def run(commands: list[str], folder: Path, cluster: Cluster) -> str:
    """What the commands print, in one shell. Raises AssertionError for one that fails."""
    # Variables of Ray and of the plugin count where a cluster starts: such a command gets a cluster of its own.
    join = not any(re.match(r"RAY_SERVE_\w+=|export RAY_SERVE_", command) for command in commands)
    script = "set -eo pipefail\n" + "\n".join(testable(command) for command in commands)
    for port, actual in ((8000, cluster.http_port), (8265, cluster.dashboard_port)):
        script = script.replace(f"localhost:{port}", f"127.0.0.1:{actual}")
    ran = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=cluster.environment(join=join),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert ran.returncode == 0, f"{script}\nended with {ran.returncode}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    return ran.stdout


def testable(command: str) -> str:
    """`command` without what would change the environment of the tests or run them from within.

    make and pip do as if, and curl waits for an application that is being deployed; everything else runs as it is
    written.
    """
    words = shlex.split(command, comments=True)
    match words:
        case ["make", *_]:
            return f"make --dry-run -C {shlex.quote(str(ROOT))} {shlex.join(words[1:])} >/dev/null"
        case ["python", script] if script.startswith("examples/"):
            assert (ROOT / script).is_file(), command
            return ":"  # test_examples.py runs it
        case ["pip", "install", *packages]:
            for package in packages:
                check_package(package)
            return ":"
        case ["ray-serve-grpc", *_]:
            return command.replace(words[0], "python -m ray_serve_grpc.cli", 1)
        case ["curl", url]:
            return shlex.join(["python", "-c", _FETCH, url])
    return command


def check_package(package: str) -> None:
    """The repository itself, a wheel that it builds, or an extra that it has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, _, extras = package.removesuffix("]").partition("[")
    if name in (".", project["name"]):
        unknown = set(filter(None, extras.split(","))) - set(project["optional-dependencies"])
        assert not unknown, f"pip install {package}: no extra {unknown}"
    else:
        known = any(name in extra for extras in project["optional-dependencies"].values() for extra in extras)
        wheel = re.fullmatch(r"(dist/|/tmp/)?ray_serve_grpc-\*\.whl", package)
        assert known or wheel, f"pip install {package}: nothing that this project knows"
