"""Draws the panels of the Grafana dashboard from a real Prometheus, for docs/grafana/dashboard.png.

Usage: python tests/draw_dashboard.py [SECONDS]. Needs `prometheus` on the PATH and matplotlib. It starts a local Ray
with a small application, puts load on it for SECONDS (60), and asks for every expression over that time.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "serve")]
os.environ |= {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_metrics_report_interval_ms": "1000",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}

import matplotlib  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import ray  # noqa: E402
from harness.prometheus import Prometheus  # noqa: E402
from ray import serve  # noqa: E402

WINDOW = "15s"


@serve.deployment(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=4)
class Model:
    def predict(self, value: Any) -> Any:
        time.sleep(0.002)
        return value

    async def tokens(self, count: int) -> Any:
        for number in range(count):
            yield number

    def fail(self) -> None:
        raise ValueError("for the picture")


def load(handle: Any, until: float) -> None:
    large = np.ones(1 << 18)
    number = 0
    while time.monotonic() < until:
        number += 1
        responses = [handle.predict.remote(large if number % 4 == 0 and n < 2 else n) for n in range(8)]
        if number % 10 == 0:
            responses.pop().cancel()
        for response in responses:
            response.result(timeout_s=60)
        list(handle.options(stream=True).tokens.remote(20))
        if number % 5 == 0:
            try:
                handle.fail.remote().result(timeout_s=60)
            except ValueError:
                pass


def draw(dashboard: dict[str, Any], prometheus: Prometheus, start: float, end: float, path: Path) -> None:
    panels = dashboard["panels"]
    figure, axes = plt.subplots((len(panels) + 2) // 3, 3, figsize=(16, 16), layout="constrained")
    for panel, axis in zip(panels, axes.flat, strict=False):
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", WINDOW)
            expression = expression.replace("$application", ".*").replace("$deployment", ".*")
            for series in prometheus.query(expression, start=start, end=end, step=1):
                tags = series["metric"]
                label = re.sub(r"{{(\w+)}}", lambda found, tags=tags: tags.get(found[1], ""), target["legendFormat"])
                times, values = zip(*((t - start, float(v)) for t, v in series["values"]), strict=True)
                axis.plot(times, values, label=label, linewidth=1)
        axis.set_title(f"{panel['title']} [{panel['fieldConfig']['defaults']['unit']}]", fontsize=10)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=7)
        if axis.lines:
            axis.legend(fontsize=6, loc="best")
        else:
            axis.text(0.5, 0.5, "no data", ha="center", transform=axis.transAxes, color="grey")
    figure.suptitle(
        "The panels of ray_serve_grpc.json, drawn by matplotlib from a Prometheus (no screenshot of Grafana); "
        "x: seconds",
        fontsize=11,
    )
    figure.savefig(path, dpi=80)


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    dashboard = json.loads((ROOT / "docs" / "grafana" / "ray_serve_grpc.json").read_text())
    with tempfile.TemporaryDirectory(prefix="rsd", ignore_cleanup_errors=True) as folder:
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        handle = serve.run(Model.options(num_replicas=2).bind(), name="shop", route_prefix=None)
        with Prometheus(f"127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}") as prometheus:
            start = time.time()
            threads = [
                threading.Thread(target=load, args=(handle, time.monotonic() + seconds), daemon=True) for _ in range(2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            draw(dashboard, prometheus, start, time.time(), ROOT / "docs" / "grafana" / "dashboard.png")
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
