"""The network between two hosts is cut under load, in every way: noticed, left, and used again when it heals.

As root: each host is a network namespace with a Ray node in it.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from programs import program

from bench.two_hosts.network import Unavailable, network


@pytest.fixture(scope="module")
def hosts() -> Iterator[subprocess.Popen[str]]:
    if shutil.which("iptables") is None:
        pytest.skip("iptables not found")
    extra = {
        # A cluster of several hosts has one token; one that Ray makes by itself is one host's.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_raylet_start_wait_time_s": "120",
        # Ray shall not be who gives the other host up.
        "RAY_health_check_failure_threshold": "20",
    }
    try:
        with (
            network("cut") as made,
            program("cut.py", made.namespaces[1], extra=extra, prefix=made.prefix(0)) as process,
        ):
            yield process
            process.communicate(timeout=60)
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("way", ["both ways", "to the replicas", "from the replicas", "without a route"])
def test_calls_leave_a_host_that_is_cut_off_and_come_back_to_it(hosts, way):
    hosts.stdin.write(f"{way}\n")
    hosts.stdin.flush()
    said = []
    for line in hosts.stdout:
        said.append(line)
        if line in ("kept\n", "broken\n"):
            break
    assert said[-1:] == ["kept\n"], "".join(said)
