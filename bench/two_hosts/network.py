"""Two network namespaces joined by a link of a given rate.

All that is made has the process id in its name, stays inside the two namespaces, and goes with them. Nothing of the
machine's own network is changed, and no packet leaves the machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

ADDRESSES = ("10.213.0.1", "10.213.0.2")
DEVICE = "link0"  # in both namespaces


class Unavailable(Exception):
    """Namespaces cannot be made here."""


@dataclass(frozen=True)
class Network:
    namespaces: tuple[str, str]

    def prefix(self, host: int) -> list[str]:
        """A command that runs another one on a host, 0 or 1."""
        return ["ip", "netns", "exec", self.namespaces[host]]

    def limit(self, gbit: float) -> None:
        """Sets the link's rate, each way."""
        # A token bucket must hold what may pass between two ticks of the kernel's slowest clock (100 Hz)
        # with room for a packet of the largest size that a device takes.
        burst = max(256 * 1024, round(gbit * 1e9 / 8 / 100))
        bucket = ["tbf", "rate", f"{round(gbit * 1000)}mbit", "burst", str(burst), "latency", "50ms"]
        for host in (0, 1):
            _run(*self.prefix(host), "tc", "qdisc", "replace", "dev", DEVICE, "root", *bucket)


def check() -> None:
    """Raises Unavailable, saying what is missing."""
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root")
    missing = [tool for tool in ("ip", "tc", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"{', '.join(missing)} not found (Debian: iproute2, util-linux, mount)")


@contextlib.contextmanager
def network(name: str) -> Iterator[Network]:
    """Raises Unavailable. `name` tells several networks of this process apart."""
    check()
    made = Network((f"rsb-{os.getpid()}-{name}-1", f"rsb-{os.getpid()}-{name}-2"))
    try:
        for namespace in made.namespaces:
            _run("ip", "netns", "add", namespace)
        # Made inside the first namespace, so that the machine's own never sees it.
        peer = ["peer", "name", DEVICE, "netns", made.namespaces[1]]
        _run("ip", "-n", made.namespaces[0], "link", "add", DEVICE, "type", "veth", *peer)
        for namespace, address in zip(made.namespaces, ADDRESSES, strict=True):
            _run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _run("ip", "-n", namespace, "link", "set", device, "up")
        yield made
    finally:
        for namespace in made.namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip()}")
