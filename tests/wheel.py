"""Tries a wheel as its users meet it: `make test-wheel`.

A fresh environment without Rust in its reach gets the wheel, and Ray with it, from pip; a small Serve application runs
there on a cluster of its own, its calls must be carried by the plugin, and `ray-serve-grpc doctor` must find nothing
wrong. With `--sdist`, the wheel is built from the source archive first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

SMOKE = """
import json, os, subprocess, sys, tempfile
import ray
import ray_serve_grpc
from ray import serve


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Doubler:
    def __call__(self, number):
        return 2 * number


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Front:
    def __init__(self, doubler):
        self.doubler = doubler.options(_by_reference=False)

    async def __call__(self, number):
        return await self.doubler.remote(number)

    def calls(self):
        return ray_serve_grpc.status()["calls"]


def main():
    with tempfile.TemporaryDirectory(prefix="rsg", ignore_cleanup_errors=True) as folder:
        ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=200 * 2**20,
                 log_to_driver=False, _temp_dir=folder)
        serve.start(proxy_location="Disabled")
        handle = serve.run(Front.bind(Doubler.bind()), route_prefix=None)
        answer = handle.remote(21).result(timeout_s=60)
        calls = handle.calls.remote().result(timeout_s=60)
        command = [os.path.join(os.path.dirname(sys.executable), "ray-serve-grpc"), "doctor", "--json"]
        address = ray.get_runtime_context().gcs_address
        doctor = subprocess.run([*command, "--address", address], stdout=subprocess.PIPE, text=True)
        print("SMOKE " + json.dumps({"answer": answer, "calls": calls, "code": doctor.returncode,
                                     "doctor": json.loads(doctor.stdout)}))
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
"""

#: Seconds for the application and the doctor.
SMOKE_S = 300


class Wrong(Exception):
    """Something is not as a user needs it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter (default: this one)")
    parser.add_argument("--sdist", action="store_true", help="the file is a source archive: build the wheel from it")
    parser.add_argument("--ray", default="", help="version of Ray (default: pip's choice)")
    parser.add_argument("file", type=Path, help="wheel, or source archive")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rsgwheel") as folder:
        try:
            wheel = built(options.file, options.python, Path(folder)) if options.sdist else options.file
            report = tried(wheel.resolve(), options.python, options.ray, Path(folder))
        except Wrong as error:
            print(f"wheel: FAILED: {error}")
            return 1
    machine = report["machine"]
    print(
        f"wheel: OK {wheel.name}: {needed(wheel)}, Python {machine['python']}, Ray {machine['ray_version']}, "
        f"pings {pings(report)}, {time.monotonic() - began:.0f} s"
    )
    return 0


def built(archive: Path, python: str, folder: Path) -> Path:
    """The wheel that pip builds from the archive, from clean; this needs Rust."""
    run([python, "-m", "venv", str(folder / "build")])
    pip = [str(folder / "build" / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder / "built"), str(archive.resolve())])
    [wheel] = (folder / "built").glob("*.whl")
    return wheel


def tried(wheel: Path, python: str, ray: str, folder: Path) -> dict:
    """The doctor's report of the application's cluster.

    Raises:
        Wrong
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CARGO", "RUST", "RAY_"))}
    environment["PATH"] = f"{folder / 'env' / 'bin'}:/usr/bin:/bin"
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    environment.pop("PYTHONPATH", None)
    for tool in ("cargo", "rustc"):
        if shutil.which(tool, path=environment["PATH"]):
            raise Wrong(f"{tool} is in reach: this would not show that the wheel does without")
    run([python, "-m", "venv", str(folder / "env")])
    own = str(folder / "env" / "bin" / "python")
    pinned = [f"ray[serve]=={ray}"] if ray else []
    pip = [own, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--only-binary", ":all:"]
    run([*pip, str(wheel), *pinned], env=environment)
    script = folder / "smoke.py"
    script.write_text(SMOKE)
    done = run([own, str(script)], env=environment, cwd=folder, timeout=SMOKE_S, stdout=subprocess.PIPE)
    told = [line.removeprefix("SMOKE ") for line in done.stdout.splitlines() if line.startswith("SMOKE ")]
    if not told:
        raise Wrong(f"the application told nothing: {done.stdout[-2000:]}")
    outcome = json.loads(told[0])
    if outcome["answer"] != 42:
        raise Wrong(f"the answer is {outcome['answer']}")
    if outcome["calls"]["unix"]["unary"] != 1 or any(outcome["calls"]["stock"].values()):
        raise Wrong(f"the call was not carried by the plugin's unix lane: {outcome['calls']}")
    if outcome["code"] != 0:
        raise Wrong(f"the doctor ends with {outcome['code']}: {outcome['doctor']['findings']}")
    report: dict = outcome["doctor"]
    if len(report["cluster"]["replicas"]) != 2:
        raise Wrong(f"the doctor sees {report['cluster']['replicas']}")
    return report


def needed(wheel: Path) -> str:
    """The newest glibc that the extension module asks for.

    Raises:
        Wrong: it is newer than the wheel's name says.
    """
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".so")]
        found = re.findall(rb"GLIBC_(\d+)\.(\d+)", archive.read(name))
    newest = max((int(major), int(minor)) for major, minor in found)
    named = re.findall(r"manylinux_(\d+)_(\d+)_", wheel.name)
    if named and newest > min((int(major), int(minor)) for major, minor in named):
        raise Wrong(f"{wheel.name} needs glibc {newest[0]}.{newest[1]}")
    return f"glibc {newest[0]}.{newest[1]} or later{'' if named else ', not tagged as manylinux'}"


def pings(report: dict) -> str:
    found = [ping for replica in report["cluster"]["replicas"] for ping in replica["pings"]]
    return ", ".join(f"{ping['lane']} {ping['round_trip_us']['median']:.0f} us" for ping in found)


def run(command: list[str], **options) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, check=True, text=True, **options)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise Wrong(f"{' '.join(command[:6])}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
