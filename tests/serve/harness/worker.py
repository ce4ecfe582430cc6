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
    if transport == "native":
        import ray_serve_grpc

        status = ray_serve_grpc.status()
        if not status["active"]:
            raise RuntimeError(f"the plugin is not active in the driver: {status}")
    session = (directory / "session_latest").resolve()
    return Cluster(transport, Board.create(), session=session, http_port=http_port, grpc_port=grpc_port)


def run(cluster: Cluster, module: str, name: str, arguments: dict[str, Any]) -> tuple[bool, Any]:
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
        return True, target.scenario(cluster, **arguments)
    except BaseException:
        return False, traceback.format_exc()


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
