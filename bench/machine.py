"""What the figures were measured on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ray", "ray_serve_grpc", "grpcio", "numpy", "uvloop", "pygrpc-native", "pyzmq")


def describe() -> dict[str, Any]:
    return {
        "machine": {
            "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "kernel": ".".join(platform.release().split(".")[:2]),
            "load_before": os.getloadavg()[0],
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "changed": bool(_git("status", "--porcelain", "--untracked-files=no", "--", "native", "ray_serve_grpc")),
        "native_build": _native_build(),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _native_build() -> str:
    """Tells two builds of the extension module apart."""
    spec = importlib.util.find_spec("ray_serve_grpc._native")
    if spec is None or spec.origin is None:
        return ""
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:12]


def _field(path: Path, name: str) -> str:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
