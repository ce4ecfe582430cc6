"""Looks at this machine and at a cluster, and judges what was found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import ray_serve_grpc
from ray_serve_grpc.cli import process
from ray_serve_grpc.cli.probes import FAILED
from ray_serve_grpc.seam import activation

Report = dict[str, Any]

#: Of the shape of the report; goes up when a key changes its meaning or goes.
FORMAT = 1
AUTO = "auto"


@dataclass(frozen=True)
class Finding:
    """Something that is wrong."""

    #: "this machine", or the replica or proxy
    where: str
    problem: str
    hint: str


def examined(address: str, progress: Callable[[str], None]) -> Report:
    """The whole report, as docs/cli.md describes it.

    Args:
        address: of the cluster; with "auto", it is no fault if there is none.
        progress: is told what is being looked at.
    """
    progress("looking at this machine")
    fault = _fitted()
    cluster: Report | None = None
    findings = []
    if fault is not None:
        findings.append(fault)
        machine = process.report()
    else:
        from ray_serve_grpc.cli import cluster as clusters

        progress(f"joining the cluster at {address}")
        try:
            with clusters.joined(address) as joined:
                machine = process.report()
                cluster = clusters.report(joined, progress)
        except clusters.NoCluster as error:
            machine = process.report()
            if address != AUTO or not error.absent:
                findings.append(Finding(f"the cluster at {address}", str(error), error.hint))
    findings += judged(machine, cluster)
    return {
        "format": FORMAT,
        "ok": not findings,
        "findings": [asdict(finding) for finding in findings],
        "machine": machine,
        "cluster": cluster,
    }


def _fitted() -> Finding | None:
    """Has the plugin try itself on the Ray that is here."""
    try:
        activation.try_on()
    except ImportError as error:
        return Finding("this machine", f"Ray Serve cannot be imported: {error}", "pip install 'ray[serve]>=2.54'.")
    return None


def judged(machine: Report, cluster: Report | None) -> list[Finding]:
    """What is wrong, in the order of the report."""
    findings = list(_of_process("this machine", machine))
    if cluster is None:
        return findings
    if cluster["error"]:
        findings.append(Finding("the cluster", cluster["error"], "see `serve status`, and Serve's logs."))
    for replica in cluster["replicas"]:
        findings += _of_replica(replica, machine["version"])
    for proxy in cluster["proxies"]:
        findings += _of_peer(f"the proxy of node {proxy['node_id'][:8]}", proxy, machine["version"])
    return findings


def name_of(replica: Report) -> str:
    return f"{replica['application']}/{replica['deployment']}/{replica['replica']}"


def _of_replica(replica: Report, version: str) -> list[Finding]:
    where = name_of(replica)
    if replica["java"]:
        return []
    findings = _of_peer(where, replica, version)
    for ping in replica["pings"]:
        if ping["error"]:
            hint = f"{ping['endpoint']} must be reachable from here, with this token and these certificates."
            findings.append(Finding(where, f"no ping over {ping['lane']}: {ping['error']}", hint))
    if not replica["pings"]:
        hint = "its node and this one have no lane in common: see RAY_SERVE_GRPC_LANES."
        findings.append(Finding(where, "it cannot be reached by any lane", hint))
    return findings


def _of_peer(where: str, peer: Report, version: str) -> list[Finding]:
    told = peer["process"]
    if told is None:
        hint = (
            "install the same ray_serve_grpc in the environment of every node and of every runtime_env, "
            "and see the log of that process."
        )
        return [Finding(where, f"it does not tell of itself: {peer['error']}", hint)]
    findings = _of_process(where, told)
    if told["version"] != version:
        problem = f"it has version {told['version']}, and this machine {version}"
        findings.append(Finding(where, problem, "install one version everywhere, and start that process anew."))
    return findings


def _of_process(where: str, told: Report) -> list[Finding]:
    findings = []
    if not told["active"]:
        findings.append(Finding(where, f"the plugin is not active: {told['reason']}", _remedy(told["reason"])))
    for part, outcome in told["parts"].items():
        # An inactive client is the finding above.
        if outcome != "active" and (told["active"] or outcome != told["reason"]):
            findings.append(Finding(where, f"the part {part!r} is Ray's own: {outcome}", _remedy(outcome)))
    findings += [
        Finding(where, f"{probe['name']}: {probe['detail']}", probe["hint"])
        for probe in told["probes"]
        if probe["outcome"] == FAILED
    ]
    return findings


def _remedy(reason: str) -> str:
    if reason == activation.SWITCHED_OFF:
        return "take RAY_SERVE_GRPC_NATIVE=0 out of its environment or runtime_env, if that was not meant."
    if "ray_serve_grpc.install()" in reason or "waits for" in reason:
        return "its .pth file did not run: set RAY_preload_python_modules=ray_serve_grpc where Ray starts."
    if "native module" in reason:
        return "install the wheel for that Python and that machine anew."
    if "is not allowed" in reason:
        return "put that setting right, or unset it."
    return f"ray_serve_grpc {ray_serve_grpc.__version__} does not fit there; see whether a newer version does."
