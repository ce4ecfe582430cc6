"""Child process, on the first host: a driver and Ray's head node here, a second node on the other host.

Usage: python -m bench.two_hosts.cluster FD VARIANT NAMESPACE, in the first namespace; NAMESPACE is the second. What the
parent asks for are methods of the application's caller.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import children
from bench.serve.cluster import connect_driver, prepare, run_app
from bench.two_hosts.network import ADDRESSES

_JOIN_S = 150.0


def main() -> None:
    descriptor, variant, namespace = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    with children.connected(descriptor) as connection, two_nodes(namespace) as caller:
        connection.send((True, prepare(variant, caller)))
        children.answer(connection, lambda name, arguments: getattr(caller, name).remote(*arguments).result())


@contextmanager
def two_nodes(namespace: str) -> Iterator[Any]:
    """The application, its caller on the first host, all else on the second."""
    import ray
    from ray import serve

    from bench.serve.app import application

    with (
        tempfile.TemporaryDirectory(prefix="rsb", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryDirectory(prefix="rsb", ignore_cleanup_errors=True) as other,
        connect_driver(folder, _node_ip_address=ADDRESSES[0], resources={"first": 1}),
    ):
        address = ray.get_runtime_context().gcs_address
        with second_node(namespace, address, folder, other):
            until_joined(ray)
            serve.start(proxy_location="Disabled")
            yield run_app(application("first", "second"))


@contextmanager
def second_node(namespace: str, address: str, folder: str, other: str) -> Iterator[None]:
    ray = str(Path(sys.executable).with_name("ray"))
    start = [ray, "start", "--block", f"--address={address}", f"--node-ip-address={ADDRESSES[1]}"]
    start += ["--num-cpus=2", '--resources={"second": 1}', "--disable-usage-stats"]
    # Both nodes name their sockets by the session: on the second, a folder of its own stands in that place.
    script = 'mount --bind "$0" "$1" && shift && exec "$@"'
    command = ["ip", "netns", "exec", namespace, "unshare", "-m", "sh", "-c", script, other, folder, *start]
    with tempfile.TemporaryFile() as log:
        node = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield
        except TimeoutError as error:
            log.seek(0)
            raise RuntimeError(f"{error}: {log.read().decode(errors='replace')}") from None
        finally:
            node.terminate()
            node.wait(30)


def until_joined(ray: Any) -> None:
    deadline = time.monotonic() + _JOIN_S
    while "second" not in ray.cluster_resources():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the second node did not join within {_JOIN_S:.0f} s")
        time.sleep(0.2)


if __name__ == "__main__":
    main()
