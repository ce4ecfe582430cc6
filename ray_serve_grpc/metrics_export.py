"""Brings the core's counters to `ray.util.metrics`, and so to Ray's Prometheus endpoint.

Nothing is done for each call: `Exporter.export` is called once per second (`background`), and tells Ray by how much
each counter grew.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

from ray_serve_grpc import _native
from ray_serve_grpc.metrics_table import COMMON_TAGS, TABLE, Metric, Number, Snapshot


def snapshot() -> Snapshot:
    # Ends before beginnings, so that a call that ends in between is not one too few under way.
    outcomes = _native.outcomes()
    return Snapshot(_native.statistics(), outcomes, _native.timings(), _native.TIMING_BOUNDS)


@dataclass(frozen=True)
class Origin:
    """The process that the values belong to, as tags. Outside of a replica its three are empty: Prometheus then
    shows the series without them."""

    application: str = ""
    deployment: str = ""
    replica: str = ""
    #: replica, proxy, actor (another one), driver (or a task)
    component: str = "driver"

    @classmethod
    def here(cls) -> Origin:
        import ray
        from ray import serve
        from ray.serve.exceptions import RayServeException

        try:
            context = serve.get_replica_context()
        except RayServeException:
            pass
        else:
            return cls(context.app_name, context.deployment, context.replica_tag, "replica")
        runtime = ray.get_runtime_context()
        if runtime.get_actor_id() is not None:
            name = runtime.get_actor_name() or ""
            return cls(component="proxy" if name.startswith("SERVE_PROXY_ACTOR") else "actor")
        return cls()

    def tags(self) -> dict[str, str]:
        values = (self.application, self.deployment, self.replica, self.component, str(os.getpid()))
        return dict(zip(COMMON_TAGS, values, strict=True))


class Exporter:
    """Knows what it has told Ray already."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._metrics = [(metric, self._made(metric)) for metric in TABLE]
        self._told: dict[tuple[str, tuple[str, ...]], Number] = {}

    def export(self) -> None:
        present = snapshot()
        for metric, made in self._metrics:
            for values, value in metric.samples(present):
                tags = dict(zip(metric.tags, values, strict=True))
                if metric.kind == "gauge":
                    # Also one that has not changed: Ray's agent forgets a gauge that is not told again.
                    made.set(value, tags)
                    continue
                key = (metric.name, values)
                growth = value - self._told.get(key, 0)
                if growth > 0:
                    self._told[key] = value
                    made.inc(growth, tags)

    def _made(self, metric: Metric) -> Any:
        library = importlib.import_module("ray.util.metrics")
        kind = library.Gauge if metric.kind == "gauge" else library.Counter
        made = kind(metric.name, metric.meaning, (*COMMON_TAGS, *metric.tags))
        return made.set_default_tags(self._origin.tags())
