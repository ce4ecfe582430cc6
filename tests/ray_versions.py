"""Runs the transport tests, and a part of the Serve tests, on several versions of Ray: `make test-ray-versions`.

Each version has an environment of its own below .venv-ray/, with the same wheel of the plugin. What is not known here
is found by probing Ray at run time, so a version is only a place to look at.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".venv-ray"

#: the oldest, the first of each form of the seam (docs of the change: 2.55 constructor, 2.58 token and TLS), the newest
VERSIONS = ("2.54.1", "2.55.1", "2.58.0", "2.60.0")

#: what a Ray needs besides what it says itself
PINS = {"2.54.": "protobuf<7", "2.55.": "protobuf<7", "2.58.": "jinja2"}

#: calls, streams, errors, mixed processes, TLS: what Ray changed between these versions
SERVE = (
    "tests/serve/test_handle_calls.py",
    "tests/serve/test_streams.py",
    "tests/serve/test_exceptions.py",
    "tests/serve/test_interoperation.py",
    "tests/serve/test_tls.py",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, required=True, help="the wheel of ray_serve_grpc to test")
    parser.add_argument("--serve", nargs="*", default=SERVE, help="files of tests/serve to run")
    parser.add_argument("versions", nargs="*", help=f"versions of Ray (default: {' '.join(VERSIONS)})")
    options = parser.parse_args()
    outcomes = {version: outcome(version, options.wheel, options.serve) for version in options.versions or VERSIONS}
    print(f"\nPython {sys.version.split()[0]}")
    for version, (code, seconds) in outcomes.items():
        print(f"  ray {version}: {'passed' if code == 0 else f'failed ({code})'} after {seconds:.0f} s")
    return max(code for code, _ in outcomes.values())


def outcome(version: str, wheel: Path, serve: list[str]) -> tuple[int, float]:
    began = time.monotonic()
    print(f"\n==> ray {version}", flush=True)
    try:
        python = environment(version, wheel)
    except subprocess.CalledProcessError as error:
        return error.returncode, time.monotonic() - began
    # Not `python -m pytest`, which would put the sources, and so another build of the core, before the wheel.
    command = [str(python.with_name("pytest")), "-q", "tests/transport", *serve]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    return code, time.monotonic() - began


def environment(version: str, wheel: Path) -> Path:
    """The interpreter of an environment that has this Ray and this wheel."""
    folder = ENVIRONMENTS / version
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pins = [pin for old, pin in PINS.items() if version.startswith(old)]
    subprocess.run([*pip, f"ray[serve]=={version}", f"{wheel}[test]", *pins], check=True)
    # The same version number with other contents is no reason for pip to install it again.
    subprocess.run([*pip, "--force-reinstall", "--no-deps", str(wheel)], check=True)
    return python


if __name__ == "__main__":
    sys.exit(main())
