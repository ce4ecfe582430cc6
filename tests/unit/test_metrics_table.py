"""The table of metrics: what it makes of the core's counters, and what the docs and the dashboard make of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ray_serve_grpc import _native, metrics_export, metrics_table
from ray_serve_grpc.metrics_table import TABLE, Snapshot

DOCS = Path(__file__).resolve().parents[2] / "docs"
NAME = re.compile(r"\bray_serve_grpc_\w+")


def snapshot(**more: object) -> Snapshot:
    counters = dict.fromkeys(_native.statistics(), 0)
    parts = {"counters": counters, "outcomes": [], "timings": [], "bounds": _native.TIMING_BOUNDS} | more
    return Snapshot(**parts)  # type: ignore[arg-type]


def samples(name: str, taken: Snapshot) -> dict[tuple[str, ...], float]:
    return dict(next(metric for metric in TABLE if metric.name == name).samples(taken))


def test_every_metric_can_be_read_from_the_native_core():
    present = metrics_export.snapshot()
    for metric in TABLE:
        for values, value in metric.samples(present):
            assert len(values) == len(metric.tags), metric.name
            assert value >= 0, metric.name


def test_the_page_of_the_docs_holds_the_table():
    page = (DOCS / "metrics.md").read_text()
    assert metrics_table.markdown() in page, "put in the output of: python -m ray_serve_grpc.metrics_table"


def test_the_page_of_the_docs_explains_every_stage():
    rows = re.findall(r"^\| (`[^|]*) \| (?:caller|replica|both) \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    explained = {stage for row in rows for stage in re.findall(r"`(\w+)`", row)}
    assert explained == {stage for stage, _, _ in _native.timings()}


def test_the_dashboard_names_metrics_that_exist_and_shows_all_of_them():
    dashboard = json.loads((DOCS / "grafana" / "ray_serve_grpc.json").read_text())
    named = {
        name for panel in dashboard["panels"] for target in panel["targets"] for name in NAME.findall(target["expr"])
    }
    assert named == {metric.exposed for metric in TABLE}


def test_the_dashboard_groups_and_filters_by_tags_that_its_metrics_have():
    dashboard = json.loads((DOCS / "grafana" / "ray_serve_grpc.json").read_text())
    tags = {metric.exposed: {*metric.tags, *metrics_table.COMMON_TAGS} for metric in TABLE}
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            wanted = {tag.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for tag in group.split(",")}
            wanted |= set(re.findall(r"(\w+)=~?\"", expression)) | set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            for name in NAME.findall(expression):
                assert wanted <= tags[name], (panel["title"], name)


def test_buckets_are_cumulative_and_end_with_all_observations():
    counts = [0] * (len(_native.TIMING_BOUNDS) + 1)
    counts[0], counts[2], counts[-1] = 3, 4, 5
    buckets = samples("serve_grpc_stage_seconds_bucket", snapshot(timings=[("wire", counts, 7_000_000)]))
    assert (buckets["wire", "3.2e-05"], buckets["wire", "0.000128"], buckets["wire", "+Inf"]) == (3, 7, 12)
    assert list(buckets.values()) == sorted(buckets.values())
    assert samples("serve_grpc_stage_seconds_sum", snapshot(timings=[("wire", counts, 7_000_000)])) == {("wire",): 7.0}


def test_calls_under_way_are_those_that_began_and_have_not_ended():
    counters = dict.fromkeys(_native.statistics(), 0) | {"client_calls_begun": 5, "server_calls_begun": 1}
    outcomes = [("caller", "unix", "unary", "ok", 2), ("replica", "unix", "unary", "ok", 2)]
    flying = samples("serve_grpc_in_flight", snapshot(counters=counters, outcomes=outcomes))
    assert flying == {("caller",): 3, ("replica",): 0}


class Recorder:
    """Stands where Ray's metrics would."""

    def __init__(self) -> None:
        self.counted: dict[str, float] = {}

    def set_default_tags(self, tags: dict[str, str]) -> Recorder:
        return self

    def inc(self, value: float, tags: dict[str, str]) -> None:
        self.counted[str(sorted(tags.items()))] = self.counted.get(str(sorted(tags.items())), 0) + value

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.counted[str(sorted(tags.items()))] = value


def test_ray_is_told_by_how_much_a_counter_grew_and_nothing_when_it_did_not(monkeypatch):
    made: dict[str, Recorder] = {}
    monkeypatch.setattr(metrics_export.Exporter, "_made", lambda self, metric: made.setdefault(metric.name, Recorder()))
    counters = dict.fromkeys(_native.statistics(), 0)
    monkeypatch.setattr(metrics_export, "snapshot", lambda: snapshot(counters=dict(counters)))
    exporter = metrics_export.Exporter(metrics_export.Origin())
    exporter.export()
    counted = {metric.name for metric in TABLE if metric.kind == "counter"}
    assert not any(made[name].counted for name in counted)
    for total in (3, 3, 10):
        counters["client_retries"] = total
        exporter.export()
        assert made["serve_grpc_retries"].counted == {"[]": total}
