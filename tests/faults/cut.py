"""Two hosts, and the network between them cut under load. Usage: python cut.py SECOND FOLDER

Runs in the network namespace of the first host; SECOND is that of the other. Each line of standard input names a way to
cut (`Link.ways`); the answer is what was broken, one line each, and then "kept" or "broken".
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import ray
from faults import record
from harness.cluster import until
from load import LIGHT, Account, Load
from ray import serve
from replicas import Target, alive

from bench.serve.cluster import connect_driver
from bench.two_hosts.cluster import second_node, until_joined
from bench.two_hosts.network import ADDRESSES, DEVICE

BEFORE_S, CUT_S, AFTER_S = 3.0, 26.0, 4.0

#: A peer that says nothing is given up 15 s after it was last heard, or a quarter of the timeout later.
NOTICED_S = 20.0

#: Within this nobody can have noticed, and something is always under way.
HELD_UP_S = 2.0

#: For two cores that much else is done on.
SLACK_S = 5.0

#: Seconds for the two hosts to find each other again: TCP tries ever less often, Ray's own connections among them.
HEALED_S = 60.0

#: Requests that may be on their way to the other host, or be held there, until it is given up.
HELD = 200

#: Serve shall not be who gives the replicas up: three probes that fail are enough for it.
NO_PROBES = {"health_check_period_s": 600.0, "health_check_timeout_s": 600.0}

#: Processes end by themselves when nobody asks for so long.
LONGEST_S = 900


class Link:
    """The network as seen from the first host, with packets that are lost at the host that they come to."""

    def __init__(self, second: str) -> None:
        self._there = ["ip", "netns", "exec", second]

    @property
    def ways(self) -> dict[str, list[tuple[list[str], str, list[str]]]]:
        """Way -> (prefix, what is switched on and off, its arguments)."""
        drop = ["INPUT", "-i", DEVICE, "-j", "DROP"]
        here, there = ([], "iptables", drop), (self._there, "iptables", drop)
        return {
            "both ways": [here, there],
            "to the replicas": [there],
            "from the replicas": [here],
            "without a route": [
                ([], "route", ["blackhole", f"{ADDRESSES[1]}/32"]),
                (self._there, "route", ["blackhole", f"{ADDRESSES[0]}/32"]),
            ],
        }

    def switch(self, way: str, *, cut: bool) -> None:
        for prefix, kind, arguments in self.ways[way]:
            if kind == "iptables":
                command = ["iptables", "-I" if cut else "-D", *arguments]
            else:
                command = ["ip", "route", "add" if cut else "del", *arguments]
            subprocess.run([*prefix, *command], check=True)


class Cut:
    """One cut: when it began and ended, and what came of the load."""

    def __init__(self, handle: Any, ledger: str, link: Link, way: str, number: int) -> None:
        self._ledger = ledger
        self._link = link
        self._way = way
        self._load = Load(handle, f"cut{number}", 100.0, LIGHT)

    def run(self) -> list[str]:
        before = alive(self._ledger, "Target")
        asyncio.run(self._load.run(BEFORE_S + AFTER_S, self._fault, at=BEFORE_S / (BEFORE_S + AFTER_S)))
        far = {actor for actor, pid in before.items() if not shares_network(pid)}
        account = Account(self._load, self._ledger)
        record(f"{self._way}: {account.summary()} {account.errors()}")
        # Of what is lost on the way back the caller cannot know that a replica has taken it.
        repeated = 0 if self._way == "to the replicas" else HELD
        lines = account.broken(may_fail=HELD, may_repeat=repeated)
        if blamed := {request.error.actor_id for request in account.failed} - far:
            lines.append(f"errors tell of {blamed}, and not of the other host's {far}")
        if elsewhere := [name for name, actors in account.repeated.items() if not far & set(actors)]:
            lines.append(f"ran twice, and not on the other host: {elsewhere}")
        return lines + self._late(account) + self._missing(before)

    def _fault(self) -> None:
        self._link.switch(self._way, cut=True)
        self._began = time.monotonic()
        time.sleep(CUT_S)
        self._link.switch(self._way, cut=False)

    def _late(self, account: Account) -> list[str]:
        """Requests that ended long after the cut, or were held up when it was known."""
        waited = [(began - self._began, ended - max(began, self._began)) for began, ended in account.ends_of_all()]
        known = [took for at, took in waited if NOTICED_S < at < CUT_S]
        longest = max(took for _, took in waited)
        record(f"{self._way}: longest {longest:.1f} s, {max(known):.1f} s once it is known")
        late = [each for each in waited if each[1] > NOTICED_S + SLACK_S]
        late += [(at, took) for at, took in waited if NOTICED_S < at < CUT_S and took > SLACK_S]
        lines = [f"{took:.1f} s for a request that began {at:.1f} s after the cut" for at, took in late]
        if longest < HELD_UP_S:
            lines.append("no request was held up: nothing was cut")
        return lines

    def _missing(self, before: dict[str, int]) -> list[str]:
        """What does not answer again, or is not what it was."""
        if alive(self._ledger, "Target") != before:
            return ["replicas were replaced"]
        healed = time.monotonic()
        missing = set(before.values()) - answering(self._load.handle, len(before))
        record(f"{self._way}: all answer again {time.monotonic() - healed + AFTER_S:.1f} s after it")
        return [f"{len(missing)} replicas do not answer again"] if missing else []


def answering(handle: Any, replicas: int) -> set[int]:
    """Process ids that answer, until there are so many."""
    pids: set[int] = set()

    def all_do() -> bool:
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            pids.add(handle.pid.remote().result(timeout_s=NOTICED_S))
        return len(pids) == replicas

    until(all_do, timeout=HEALED_S)
    return pids


def shares_network(pid: int) -> bool:
    return os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")


@contextlib.contextmanager
def hosts(second: str, folder: str) -> Iterator[tuple[Any, str]]:
    """Two replicas on each host, called from the first one, and where they write."""
    with (
        tempfile.TemporaryDirectory() as ledger,
        # The second host has a session folder of its own in the place of the first one's.
        tempfile.TemporaryDirectory() as other,
        connect_driver(folder, _node_ip_address=ADDRESSES[0]),
        second_node(second, ray.get_runtime_context().gcs_address, folder, other),
    ):
        until_joined(ray)
        serve.start(proxy_location="Disabled")
        # Routers say each time that a replica is not there, and leave what asked for its queue.
        for name in ("ray.serve", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        target = Target.options(num_replicas=4, ray_actor_options={"num_cpus": 1}, **NO_PROBES)
        yield serve.run(target.bind(ledger), route_prefix=None), ledger


def main() -> None:
    second, folder = sys.argv[1:]
    faulthandler.dump_traceback_later(LONGEST_S, exit=True)
    link = Link(second)
    with hosts(second, folder) as (handle, ledger):
        far = [pid for pid in answering(handle, 4) if not shares_network(pid)]
        print(f"up; {len(far)} replicas on the other host", flush=True)
        for number, way in enumerate(map(str.strip, sys.stdin)):
            lines = Cut(handle, ledger, link, way, number).run()
            print("\n".join([*lines, "broken" if lines else "kept"]), flush=True)


if __name__ == "__main__":
    main()
