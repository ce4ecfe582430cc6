"""Child process: a driver with one local Ray cluster and the application on it.

Usage: python -m bench.serve.cluster FD VARIANT, in a session of its own, with the variant's environment. What the
parent asks for are methods of the application's caller.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench import children
from bench.clocks import session_members

#: 10 in flight at 100 MB, both ways, and as much again that is being released. Memory is taken when used.
OBJECT_STORE = 5 * 2**30


def main() -> None:
    descriptor, variant = int(sys.argv[1]), sys.argv[2]
    with children.connected(descriptor) as connection, local_cluster() as caller:
        roles = prepare(variant, caller)
        connection.send((True, roles))
        children.answer(connection, lambda name, arguments: getattr(caller, name).remote(*arguments).result())


@contextmanager
def local_cluster() -> Iterator[Any]:
    """The application's handle."""
    from ray import serve

    from bench.serve.app import application

    with (
        tempfile.TemporaryDirectory(prefix="rsb", ignore_cleanup_errors=True) as folder,
        connect_driver(folder),
    ):
        serve.start(proxy_location="Disabled")
        yield run_app(application())


def run_app(bound: Any) -> Any:
    """The application's handle, for this process, which has no event loop."""
    from ray import serve

    handle = serve.run(bound, name="bench", route_prefix=None)
    # Throughput-optimised handles use the loop that they are called on, unless told.
    handle._init(_run_router_in_separate_loop=True)
    return handle


@contextmanager
def connect_driver(folder: str, **options: Any) -> Iterator[None]:
    """A Ray cluster of one node, and this process as its driver."""
    import ray

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=folder,
        **options,
    )
    try:
        yield
    finally:
        ray.shutdown()


def prepare(variant: str, caller: Any) -> dict[str, list[int]]:
    """Sees that the variant is what it should be; tells the caller whose CPU time to count."""
    status = caller.status.remote().result()
    if (status["active"], status["by_reference"]) != (variant == "native", variant == "actor"):
        raise RuntimeError(f"what carries the calls does not fit the variant {variant}: {status}")
    replicas = caller.pids.remote().result()
    members = session_members(os.getpid())
    store = [pid for pid, name in members.items() if name == "raylet"]
    named = {*replicas.values(), *store}
    roles = {role: [pid] for role, pid in replicas.items()}
    roles |= {"store": store, "rest": [pid for pid in members if pid not in named]}
    caller.watch.remote(roles).result()
    return roles


if __name__ == "__main__":
    main()
