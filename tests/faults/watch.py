"""What a process holds, read from outside of it."""

from __future__ import annotations

import os
from pathlib import Path

#: What may only grow while the load does.
HOLDINGS = ("resident MiB", "files", "threads", "segments")


def holdings(pid: int) -> dict[str, float] | None:
    """None when the process has ended.

    Memory of the process's own alone: segments are counted one by one, since the peers' are mapped too.
    """
    process = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        links = [_link(entry) for entry in (process / "fd").iterdir()]
    except OSError:
        return None
    if "RssAnon" not in status:  # it is a zombie
        return None
    return {
        "resident MiB": int(status["RssAnon"].split()[0]) / 1024,
        "files": len(links),
        "threads": int(status["Threads"]),
        "segments": sum("memfd:ray_serve_grpc" in link for link in links),
    }


def growth(values: list[float]) -> float:
    """How much higher the last quarter lies than the second one; the first is for warming up."""
    quarter = max(1, len(values) // 4)
    return median(values[-quarter:]) - median(values[quarter : 2 * quarter])


def median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0


def _link(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except OSError:
        return ""
