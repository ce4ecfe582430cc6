"""Child process: one driver with one local Ray cluster, running scenarios one at a time.

Usage: python -m harness.worker TRANSPORT SOCKET. Over the socket come (module, qualified name, arguments); back go
(True, value) or (False, text). An end of file ends the process.
"""

from __future__ import annotations

import faulthandler
import importlib
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import ray
from ray import serve

from harness.board import NAMESPACE, Board
from harness.cluster import Cluster
from harness.transports import NATIVE

OBJECT_STORE = 512 * 2**20
GRPC_SERVICERS = ["ray.serve.generated.serve_pb2_grpc.add_UserDefinedServiceServicer_to_server"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def boot(transport: str, directory: Path) -> Cluster:
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE,
        log_to_driver=False,
        namespace=NAMESPACE,
        _temp_dir=str(directory),
    )
    http_port, grpc_port = free_port(), free_port()
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": "127.0.0.1", "port": http_port},
        grpc_options={"port": grpc_port, "grpc_servicer_functions": GRPC_SERVICERS},
    )
    if defect := fallback(transport):
        raise RuntimeError(defect)
    session = (directory / "session_latest").resolve()
    return Cluster(transport, Board.create(), session=session, http_port=http_port, grpc_port=grpc_port)


def run(cluster: Cluster, module: str, name: str, arguments: dict[str, Any]) -> tuple[bool, Any]:
    before = stock_calls(cluster.transport)
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
        value = target.scenario(cluster, **arguments)
    except BaseException:
        return False, f"{traceback.format_exc()}{fallback(cluster.transport) or ''}"
    if defect := fallback(cluster.transport):
        return False, defect
    if stock_calls(cluster.transport) != before and not getattr(sys.modules[module], "HAS_STOCK_REPLICAS", False):
        return False, "a replica speaks Ray's own protocol only: its side of the plugin fell back"
    return True, value


def fallback(transport: str) -> str | None:
    """Why the driver's calls take Ray's own transport, which would pass most tests just as well."""
    if transport != NATIVE:
        return None
    import ray_serve_grpc

    status = ray_serve_grpc.status()
    return None if status["active"] else f"the plugin fell back: {status['reason']}"


def stock_calls(transport: str) -> int:
    """Calls of ours that took Ray's protocol, since the replica knows no other."""
    if transport != NATIVE:
        return 0
    import ray_serve_grpc

    return sum(ray_serve_grpc.status()["calls"]["stock"].values())


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.simplefilter("ignore", FutureWarning)
    transport, address = sys.argv[1:]
    with Client(address) as connection, tempfile.TemporaryDirectory(prefix="rsg", ignore_cleanup_errors=True) as temp:
        cluster = boot(transport, Path(temp))
        connection.send((True, str(cluster.session)))
        present = ""
        while True:
            try:
                module, name, arguments = connection.recv()
            except EOFError:
                break
            if module != present:
                cluster.drop_apps()
                present = module
            result = run(cluster, module, name, arguments)
            try:
                connection.send(result)
            except Exception:
                connection.send((False, f"the outcome cannot be sent: {traceback.format_exc()}"))
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
