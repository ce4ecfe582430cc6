"""Child process: a driver with one local Ray cluster and the application on it.

Usage: python -m bench.serve.cluster VARIANT FD, in a session of its own, with the variant's environment. Over the
connection FD come (name of the caller's method, arguments); back go (True, value) or (False, text). Its end ends the
process and the cluster.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from bench.clocks import session_members

#: 10 in flight at 100 MB, both ways, and as much again that is being released. Memory is taken when used.
OBJECT_STORE = 5 * 2**30


def main() -> None:
    variant, descriptor = sys.argv[1], int(sys.argv[2])
    os.set_inheritable(descriptor, False)
    with Connection(descriptor) as connection:
        try:
            with cluster(variant) as (caller, report):
                connection.send((True, report))
                serve_commands(connection, caller)
        except EOFError:
            pass
        except Exception:
            connection.send((False, traceback.format_exc()))


def serve_commands(connection: Connection, caller: Any) -> None:
    while True:
        name, arguments = connection.recv()
        try:
            answer = True, getattr(caller, name).remote(*arguments).result()
        except Exception:
            answer = False, traceback.format_exc()
        connection.send(answer)


@contextmanager
def cluster(variant: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    import ray
    from ray import serve

    from bench.serve.app import app

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="rsb", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
        )
        try:
            serve.start(proxy_location="Disabled")
            caller = serve.run(app, name="bench", route_prefix=None)
            yield caller, prepare(variant, caller)
        finally:
            ray.shutdown()


def prepare(variant: str, caller: Any) -> dict[str, Any]:
    """Sees that the variant is what it should be; tells the caller whose CPU time to count."""
    status = caller.status.remote().result()
    if status["active"] != (variant == "native"):
        raise RuntimeError(f"the plugin's state does not fit the variant {variant}: {status}")
    replicas = caller.pids.remote().result()
    members = session_members(os.getpid())
    store = [pid for pid, name in members.items() if name == "raylet"]
    named = {*replicas.values(), *store}
    roles = {role: [pid] for role, pid in replicas.items()}
    roles |= {"store": store, "rest": [pid for pid in members if pid not in named]}
    caller.watch.remote(roles).result()
    return {"roles": roles}


if __name__ == "__main__":
    main()
