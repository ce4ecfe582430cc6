"""One cluster with the image pipeline on it, in a process of its own, measured when the parent says so.

`compare_transports.py` starts it, with the transport set in the environment and a socket as its standard input. Over
the socket go lines of JSON: one when the application is up, then the parent's commands and an answer to each. When the
socket closes, the cluster is taken down and the process ends.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

WARM_UP = 15  # requests of each kind


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle: it closes the socket
    with take_standard_input() as link, link.makefile("rw") as lines, cluster() as port:
        measurement = Measurement(port)

        def answer(**content: object) -> None:
            lines.write(json.dumps(content) + "\n")
            lines.flush()

        answer(lanes=measurement.warm_up())
        for line in lines:
            command = json.loads(line)
            if command["do"] == "measure":
                measurement.connect()
                measurement.classify(command["photographs"])
                measurement.stream(command["texts"], command["words"])
                answer()
            else:
                measurement.connect()
                answer(**measurement.report())
    return 0


def take_standard_input() -> socket.socket:
    """The parent's socket. Ray's processes get an empty standard input: a copy of it would keep the socket open."""
    link = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return link


@contextlib.contextmanager
def cluster() -> Iterator[int]:
    """A local Ray cluster with the application behind Serve's HTTP proxy; the port of that. Takes all down again."""
    import ray
    from ray import serve

    import image_pipeline

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    folder = tempfile.mkdtemp(prefix="rsgd")
    try:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=256 * 2**20,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
        )
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(image_pipeline.app, name="images", route_prefix="/")
        yield port
    finally:
        ray.shutdown()
        remove(folder)


def remove(folder: str) -> None:
    """Ray's processes may still write into the folder while they end, so that one attempt is not always enough."""
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Measurement:
    """Sends requests, one at a time, and keeps the answers and the milliseconds they took."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._photographs = list(make_photographs())
        self._milliseconds: list[float] = []
        self._answers: list[tuple[str, str, float]] = []
        self._texts: list[str] = []

    def connect(self) -> None:
        """Anew: the server has closed the connection if it was idle for long while others were measured."""
        self._connection.close()
        self._connection.connect()

    def warm_up(self) -> dict[str, str]:
        """Tells what carries each hop."""
        self.classify(WARM_UP)
        self.stream(WARM_UP, words=20)
        self._fetch("POST", "/trace", self._photographs[0][1])
        lanes = json.loads(self._fetch("POST", "/trace", self._photographs[0][1]))
        self.report()
        return lanes

    def classify(self, count: int) -> None:
        for _ in range(count):
            name, jpeg = self._photographs[len(self._answers) % len(self._photographs)]
            started = time.perf_counter()
            answer = json.loads(self._fetch("POST", "/classify", jpeg))
            self._milliseconds.append((time.perf_counter() - started) * 1e3)
            self._answers.append((name, answer["label"], round(answer["share"], 3)))

    def stream(self, count: int, words: int) -> None:
        for _ in range(count):
            self._texts.append(self._fetch("GET", f"/tell?words={words}&seed={len(self._texts)}").decode())

    def report(self) -> dict[str, Any]:
        """Everything since the last report; starts anew."""
        from image_pipeline import transport_status

        report = json.loads(self._fetch("GET", "/report"))
        hops = report["hops"]
        hops["whole"] = self._milliseconds
        hops["http"] = [whole - inner for whole, inner in zip(hops["whole"], hops["pipeline"], strict=True)]
        report |= {"answers": self._answers, "texts": self._texts, "driver": transport_status()}
        self._milliseconds, self._answers, self._texts = [], [], []
        return report

    def _fetch(self, method: str, path: str, body: bytes | None = None) -> bytes:
        self._connection.request(method, path, body=body)
        response = self._connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise RuntimeError(f"{method} {path}: HTTP {response.status}: {content[:500].decode(errors='replace')}")
        return content


def make_photographs() -> Iterator[tuple[str, bytes]]:
    """The two photographs as JPEG files, as they are, mirrored, and in four brightnesses."""
    from PIL import Image, ImageEnhance, ImageOps
    from sklearn.datasets import load_sample_image

    from image_pipeline import PHOTOGRAPHS

    for brightness in (1.0, 0.9, 1.1, 0.8):
        for mirrored in (False, True):
            for name in PHOTOGRAPHS:
                picture = ImageEnhance.Brightness(Image.fromarray(load_sample_image(name))).enhance(brightness)
                file = io.BytesIO()
                (ImageOps.mirror(picture) if mirrored else picture).save(file, "JPEG", quality=90)
                yield name, file.getvalue()


if __name__ == "__main__":
    raise SystemExit(main())
