"""An app is redeployed with the plugin off, and then on again, while calls go on: each runs once and is answered."""

from __future__ import annotations

import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Cluster, deployment, same_as_actor
from ray import serve

#: Tells the harness that calls over Ray's own protocol are meant.
HAS_STOCK_REPLICAS = True

OFF = {"num_cpus": 0, "runtime_env": {"env_vars": {"RAY_SERVE_GRPC_NATIVE": "0"}}}
ON = {"num_cpus": 0}


@deployment(num_replicas=2, max_ongoing_requests=20, health_check_period_s=1)
class Worker:
    def __init__(self, ledger: str, _version: str) -> None:
        import sys

        self._ledger = os.open(ledger, os.O_WRONLY | os.O_APPEND)
        plugin = sys.modules.get("ray_serve_grpc")
        self._kind = "on" if plugin is not None and plugin.status()["active"] else "off"

    async def run(self, request: str) -> list[str]:
        os.write(self._ledger, f"{request} {self._kind}\n".encode())
        return [request, self._kind]

    async def items(self, request: str) -> Any:
        os.write(self._ledger, f"{request} {self._kind}\n".encode())
        for _ in range(3):
            yield [request, self._kind]


@deployment(max_ongoing_requests=50, ray_actor_options=OFF)
class StockCaller:
    def __init__(self, worker: Any) -> None:
        self._worker = worker

    async def run(self, request: str) -> Any:
        return await self._worker.run.remote(request)


class Load:
    """Threads that call, one call after the other, until told to stop."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        #: request -> the kinds of replicas that answered it
        self.answers: dict[str, list[str]] = {}
        self.errors: list[str] = []
        self._answered = threading.Condition()

    def start(self, name: str, call: Callable[[str], list[str]]) -> None:
        def run() -> None:
            number = 0
            while not self._stop.is_set():
                request, number = f"{name}-{number}", number + 1
                try:
                    answer = call(request)
                except Exception as error:
                    self.errors.append(f"{request}: {error!r}")
                    self.answers[request] = []
                    continue
                with self._answered:
                    self.answers[request] = answer
                    self._answered.notify_all()

        thread = threading.Thread(target=run, name=name)
        thread.start()
        self._threads.append(thread)

    def goes_on_until(self, kinds: set[str], patience: float = 120.0) -> bool:
        """Whether from here on a hundred answers in a row come from replicas of these kinds alone."""
        seen, run = len(self.answers), 0
        with self._answered:

            def settled() -> bool:
                nonlocal seen, run
                for answer in list(self.answers.values())[seen:]:
                    run = run + 1 if set(answer) <= kinds else 0
                seen = len(self.answers)
                return run >= 100

            return self._answered.wait_for(settled, patience)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


@same_as_actor(native_only=True, expect=True, timeout=400)
def test_nothing_is_lost_and_nothing_runs_twice_while_the_plugin_comes_and_goes(cluster: Cluster) -> Any:
    with tempfile.NamedTemporaryFile(prefix="ledger") as ledger:

        def version(number: int, options: dict[str, Any]) -> Any:
            worker = Worker.options(ray_actor_options=options).bind(ledger.name, str(number))
            return StockCaller.bind(worker)

        def deploy(number: int, options: dict[str, Any]) -> Any:
            return serve.run(version(number, options), name="rolling", route_prefix=None)

        through_stock = deploy(1, ON)
        try:
            worker = serve.get_deployment_handle("Worker", "rolling")
            stream = worker.options(stream=True)
            load = Load()
            for n in range(3):
                load.start(f"unary{n}", lambda request: worker.run.remote(request).result(timeout_s=60)[1:])
                load.start(f"stream{n}", lambda request: [kind for _, kind in stream.items.remote(request)])
                load.start(f"stock{n}", lambda request: through_stock.run.remote(request).result(timeout_s=60)[1:])
            settled = []
            try:
                settled.append(load.goes_on_until({"on"}))
                deploy(2, OFF)
                settled.append(load.goes_on_until({"off"}))
                deploy(3, ON)
                settled.append(load.goes_on_until({"on"}))
            finally:
                load.stop()
            runs = Counter(line.split()[0] for line in Path(ledger.name).read_text().splitlines())
        finally:
            serve.delete("rolling")
    assert load.errors == [], load.errors[:5]
    assert settled == [True, True, True]
    twice = [request for request, count in runs.items() if count > 1]
    assert twice == [], twice[:5]
    assert set(runs) == set(load.answers)
    assert all(len(answer) == (3 if request.startswith("stream") else 1) for request, answer in load.answers.items())
    return True
