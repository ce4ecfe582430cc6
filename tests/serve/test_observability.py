"""What users see: metrics at Ray's Prometheus endpoint, the dashboard on them, spans, lines of a replica's log."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from harness import Cluster, deployment, same_as_actor, spans
from harness.cluster import app_name, until
from harness.prometheus import Prometheus, binary, exposed

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "ray_serve_grpc.json"
#: Ray's processes report every 10 s otherwise. Serve's tracing is on, for the test of spans.
OFTEN = {
    "RAY_metrics_report_interval_ms": "1000",
    "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": spans.IMPORT_PATH,
    "RAY_SERVE_TRACING_SAMPLING_RATIO": "1.0",
}


@deployment
class Inner:
    async def echo(self, value: Any) -> Any:
        return value

    def fail(self) -> None:
        raise ValueError("words of user code")


@deployment
class Outer:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def __call__(self, request: Any) -> str:
        return await self._inner.echo.remote("over http")

    async def echo(self, value: Any) -> Any:
        return await self._inner.echo.remote(value)

    async def items(self, count: int) -> Any:
        for number in range(count):
            yield number


def layers() -> Any:
    return Outer.bind(Inner.bind())


def work(cluster: Cluster) -> None:
    """A bit of everything."""
    import httpx

    handle = cluster.app(layers, route=True)
    for number in range(20):
        assert handle.echo.remote(number).result(timeout_s=30) == number
    assert list(handle.options(stream=True).items.remote(3)) == [0, 1, 2]
    # The first of 128 KiB finds no segment of its size, and takes the socket.
    for size in (1 << 14, 1 << 18, 1 << 18, 1 << 18):
        assert handle.echo.remote(np.ones(size)).result(timeout_s=30).sum() == size
    with pytest.raises(ValueError, match="words of user code"):
        cluster.handle("Inner", layers).fail.remote().result(timeout_s=30)
    assert httpx.get(f"{cluster.http}/{app_name(layers)}", timeout=30).text == "over http"


#: What `work` cannot but cause.
CAUSED = {
    f"ray_serve_grpc_{name}"
    for name in (
        "calls_total",
        "in_flight",
        "bytes_total",
        "connections",
        "connections_made_total",
        "wakeups_total",
        "wakeup_completions_total",
        "shm_messages_total",
        "shm_segments",
        "shm_bytes",
        "fallbacks_total",
        "stage_seconds_bucket_total",
        "stage_seconds_sum_total",
        "stage_seconds_count_total",
    )
}

STAGES = {"call_unary", "call_streaming", "wire", "queue", "user_code", "serialise", "deserialise"}

NATIVE = "ray_serve_grpc.v1.InterDeploymentService"
#: Spans from the root to user code, Serve's own by name.
PATH_OF_A_REQUEST = [
    "proxy_http_request Outer",
    "route_to_replica Outer",
    "CLIENT of ours",
    "SERVER of ours",
    "replica_handle_request Outer",
    "route_to_replica Inner",
    "CLIENT of ours",
    "SERVER of ours",
    "replica_handle_request Inner",
]


def endpoint() -> str:
    return f"127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}"


def told(outcome: dict[str, Any]) -> bool:
    from ray_serve_grpc.metrics_table import TABLE

    assert CAUSED <= set(outcome["names"]) <= {metric.exposed for metric in TABLE}
    assert outcome["origins"] >= [["Inner", "replica"], ["Outer", "replica"]]
    served = {(row["deployment"], row["outcome"], row["lane"], row["kind"]): row["value"] for row in outcome["served"]}
    assert served["Outer", "ok", "unix", "streaming"] == 2  # the proxy's requests are streams
    assert served["Inner", "user_error", "unix", "unary"] == 1
    assert served["Inner", "ok", "unix", "unary"] == 25
    assert {row["application"] for row in outcome["served"]} == {outcome["application"]}
    assert {"driver", "proxy", "replica"} == set(outcome["components"])
    assert set(outcome["stages"]) == STAGES
    return True


@same_as_actor(native_only=True, expect=told, timeout=150, extra=OFTEN)
def test_every_kind_of_process_exports_with_serves_tags(cluster: Cluster) -> dict[str, Any]:
    work(cluster)
    series: list[tuple[str, dict[str, str], float]] = []

    def served() -> list[dict[str, Any]]:
        found = [
            labels | {"value": value}
            for name, labels, value in series
            if name == "ray_serve_grpc_calls_total" and labels["role"] == "replica" and labels["deployment"]
        ]
        return sorted(found, key=lambda row: (row["deployment"], row["outcome"], row["kind"]))

    def stages() -> set[str]:
        return {labels["stage"] for _, labels, _ in series if "stage" in labels}

    def complete() -> bool:
        series[:] = exposed(endpoint())
        proxies = [labels for _, labels, _ in series if labels["component"] == "proxy"]
        told_names = CAUSED <= {name for name, _, _ in series} and stages() >= STAGES
        return told_names and bool(proxies) and sum(row["value"] for row in served()) >= 52

    assert until(complete, timeout=90, poll=0.5), sorted({name for name, _, _ in series})
    return {
        "names": sorted({name for name, _, _ in series}),
        "origins": sorted([row["deployment"], row["component"]] for row in served()[::2]),
        "served": served(),
        "application": app_name(layers),
        "components": sorted({labels["component"] for _, labels, _ in series}),
        "stages": sorted(stages()),
    }


@pytest.mark.skipif(binary() is None, reason="no prometheus on the PATH (Debian: apt-get install prometheus)")
@same_as_actor(
    native_only=True,
    expect=lambda outcome: outcome["errors"] == {} and len(outcome["answered"]) >= 15,
    timeout=150,
    extra=OFTEN,
)
def test_a_prometheus_evaluates_every_expression_of_the_dashboard(cluster: Cluster) -> dict[str, Any]:
    work(cluster)
    expressions = [
        target["expr"].replace("$__rate_interval", "30s").replace("$application", ".*").replace("$deployment", ".*")
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel["targets"]
    ]
    with Prometheus(endpoint()) as prometheus:
        errors, answered = {}, []

        def all_answered() -> bool:
            work(cluster)
            there = {name for name, _, _ in exposed(endpoint())}
            errors.clear()
            answered.clear()
            due = []
            for expression in expressions:
                try:
                    result = prometheus.query(expression)
                except ValueError as error:
                    errors[expression] = str(error)
                    return True
                if result:
                    answered.append(expression)
                elif set(re.findall(r"ray_serve_grpc_\w+", expression)) <= there:
                    due.append(expression)
            return not due and len(answered) >= 15

        assert until(all_answered, timeout=90, poll=1.0), answered
    return {"errors": errors, "answered": answered}


@same_as_actor(native_only=True, expect=[True, True, True], extra=OFTEN, timeout=90)
def test_a_replica_logs_its_start_and_its_end_in_serves_format(cluster: Cluster) -> list[bool]:
    from ray import serve

    with cluster.log_lines("ray_serve_grpc", "Takes no more calls", "Stopped serving") as lines:
        handle = serve.run(Inner.options(name="Short").bind(), name="short", route_prefix=None)
        assert handle.echo.remote(1).result(timeout_s=30) == 1
        serve.delete("short")
    mine = [line for line in lines if line.startswith("replica_short_Short_")]
    serving = [
        line for line in mine if re.search(r"INFO [\d-]+ [\d:,]+ short_Short \w+ -- Serving calls by value", line)
    ]
    return [
        len(serving) == 1 and "lanes shm, unix, tcp; TLS off; token" in serving[0],
        sum("Takes no more calls" in line for line in mine) == 1,
        sum("Stopped serving" in line for line in mine) == 1,
    ]


@same_as_actor(native_only=True, expect=PATH_OF_A_REQUEST, extra=OFTEN, timeout=90)
def test_a_trace_of_an_http_request_leads_through_both_ends_of_every_call(cluster: Cluster) -> list[str]:
    import httpx

    cluster.app(layers, route=True)
    assert httpx.get(f"{cluster.http}/{app_name(layers)}", timeout=30).text == "over http"
    path: list[str] = []

    def whole() -> bool:
        by_id = {span["id"]: span for span in spans.ended(cluster.session)}
        for span in reversed(by_id.values()):
            if span["name"] == "replica_handle_request Inner echo" and span["parent"] in by_id:
                path[:] = []
                while span is not None:
                    ours = span["attributes"].get("rpc.service") == NATIVE
                    path.insert(0, f"{span['kind']} of ours" if ours else " ".join(span["name"].split()[:2]))
                    span = by_id.get(span["parent"])
                if len(path) == len(PATH_OF_A_REQUEST):
                    return True
        return False

    until(whole, timeout=40, poll=0.2)
    return path
