"""A Prometheus that scrapes one endpoint, and that endpoint read directly."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

#: No proxy for what is on this machine.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
- job_name: ray
  static_configs: [{{targets: ["{endpoint}"]}}]
"""


def binary() -> str | None:
    return shutil.which("prometheus")


def exposed(endpoint: str) -> list[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of what the plugin exports at a node's endpoint."""
    with _open(f"http://{endpoint}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("ray_serve_grpc_")
        # Serve has metrics of its gRPC proxy under such names.
        and "component" in sample.labels
    ]


class Prometheus:
    """Runs from `with` to its end."""

    def __init__(self, endpoint: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._folder = Path(tempfile.mkdtemp(prefix="rsp"))
        (self._folder / "prometheus.yml").write_text(CONFIG.format(endpoint=endpoint))

    def __enter__(self) -> Prometheus:
        found = binary()
        assert found is not None
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    found,
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={self._address}",
                ],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                _open(f"http://{self._address}/-/ready", timeout=5).close()
                return self
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.__exit__()
                    raise
                time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)
        shutil.rmtree(self._folder, ignore_errors=True)

    def query(self, expression: str, **parameters: Any) -> list[Any]:
        """The result at this moment, or with start, end and step over a time.

        Raises:
            ValueError: Prometheus cannot evaluate it; the text says why.
        """
        path = "query_range" if parameters else "query"
        query = urllib.parse.urlencode({"query": expression, **parameters})
        try:
            with _open(f"http://{self._address}/api/v1/{path}?{query}", timeout=20) as answer:
                return json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise ValueError(error.read().decode()) from None
