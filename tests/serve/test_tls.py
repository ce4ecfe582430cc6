"""A cluster with `RAY_USE_TLS`: calls are encrypted, with the plugin at both ends or at one of them."""

from __future__ import annotations

import ipaddress
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ray
from harness import Cluster, deployment, same_as_actor
from test_interoperation import BUILDS, Callee, Caller

#: read by the harness: calls in Ray's own protocol are meant
HAS_STOCK_REPLICAS = True


def native_calls_native() -> Any:
    return Caller.bind(Callee.bind())


PAIRS = {**BUILDS, "native calls native": native_calls_native}


@cache
def variables() -> dict[str, str]:
    """Ray's settings, with a certificate for this node. Unix sockets stay plain: calls are to take TCP."""
    from cryptography import x509
    from transport.certificates import LOCALHOST, Authority

    node = x509.IPAddress(ipaddress.ip_address(ray.util.get_node_ip_address()))
    folder = Path(tempfile.mkdtemp(prefix="rsgtls"))
    settings = {"RAY_USE_TLS": "1", "RAY_SERVE_GRPC_LANES": "tcp"}
    names = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
    for name, pem in zip(names, Authority().credentials((*LOCALHOST, node)), strict=True):
        path = folder / name
        path.write_bytes(pem)
        path.chmod(0o600)
        settings[name] = str(path)
    return settings


def encrypted(**_parameters: Any) -> dict[str, str]:
    return variables()


@pytest.mark.parametrize("pair", PAIRS)
@same_as_actor(
    native_only=True,
    extra=encrypted,
    timeout=120,
    expect=[[[1, "two"], {"three": [3]}], list(range(30)), 3_000_000, list(range(20))],
)
def test_calls_and_streams_work_under_tls(cluster: Cluster, pair: str) -> Any:
    return [*cluster.app(PAIRS[pair]).calls.remote().result(timeout_s=60)]


@deployment
class Lanes:
    def __init__(self, callee: Any) -> None:
        self._callee = callee

    async def calls(self) -> Any:
        import ray_serve_grpc

        await self._callee.echo.remote(1)
        status = ray_serve_grpc.status()
        return [status["active"], {lane: sum(kinds.values()) for lane, kinds in status["calls"].items()}]


def lanes() -> Any:
    return Lanes.bind(Callee.bind())


@same_as_actor(native_only=True, extra=encrypted, timeout=120, expect=[True, {"unix": 0, "tcp": 1, "stock": 0}])
def test_the_plugin_carries_them(cluster: Cluster) -> Any:
    active, calls = cluster.app(lanes).calls.remote().result(timeout_s=60)
    return [active, {lane: calls[lane] for lane in ("unix", "tcp", "stock")}]


@same_as_actor(native_only=True, extra=encrypted, timeout=120, expect=[[["tcp", "", True]], True, True])
def test_the_doctor_pings_with_the_certificates(cluster: Cluster) -> Any:
    from ray_serve_grpc.cli import cluster as clusters
    from ray_serve_grpc.seam import adapter

    cluster.app(lanes)
    report = clusters.report("", lambda progress: None)
    replica = next(replica for replica in report["replicas"] if replica["deployment"] == "Lanes")
    pings = [[ping["lane"], ping["error"], ping["version"] != ""] for ping in replica["pings"]]
    outcomes = {probe["outcome"] for probe in replica["process"]["probes"] if probe["name"] == "TLS"}
    is_encrypted = adapter.channel_is_encrypted()  # not before Ray 2.58, whose own transport is plain there too
    return [pings, replica["process"]["tls"] == is_encrypted, outcomes == {"ok" if is_encrypted else "skipped"}]
