"""A cluster whose GCS is killed under load. Usage: python gcs.py HOW FOLDER

HOW is "gone": it stays away, and a replica dies meanwhile; or "restart": it comes back, with storage that outlived it.
Prints what was broken, or "kept" when every promise was.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from harness.cluster import until
from load import LIGHT, Account, Load
from ray import serve
from ray.cluster_utils import Cluster
from replicas import Relay, Target, alive, ledger_folder

#: Seconds without a GCS. Ray's own processes end after 60 (`gcs_rpc_server_reconnect_timeout_s`).
OUT_S = {"gone": 20.0, "restart": 8.0}
BEFORE_S, AFTER_S = 3.0, 12.0

#: What a replica may hold when it dies.
HELD = 60

_STARTER = ThreadPoolExecutor(1)


async def run(cluster: Cluster, how: str, folder: str, loads: list[Load]) -> None:
    length = BEFORE_S + OUT_S[how] + AFTER_S
    running = [asyncio.ensure_future(load.run(length)) for load in loads]
    await asyncio.sleep(BEFORE_S)
    await asyncio.to_thread(cluster.head_node.kill_gcs_server)
    await asyncio.sleep(OUT_S[how] / 2)
    if how == "gone":
        os.kill(random.choice(list(alive(folder, "Target").values())), signal.SIGKILL)
    await asyncio.sleep(OUT_S[how] / 2)
    if how == "restart":
        # Ray has its daemons end with the thread that started them.
        await asyncio.get_running_loop().run_in_executor(_STARTER, cluster.head_node.start_gcs_server)
    await asyncio.gather(*running)


def deploy(folder: str, replicas: int) -> Any:
    target = Target.options(num_replicas=replicas).bind(folder)
    return serve.run(Relay.bind(target), name="app", route_prefix=None)


def main() -> None:
    how, temporary = sys.argv[1:]
    # Routers ask a dead replica for its queue many times a second, and say so each time.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    head = {"num_cpus": 2, "include_dashboard": False, "temp_dir": temporary, "object_store_memory": 256 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    folder = ledger_folder()
    relay = deploy(folder, 3)
    direct = serve.get_deployment_handle("Target", "app")
    loads = [Load(direct, "direct", 100.0, LIGHT), Load(relay, "relayed", 30.0, LIGHT)]
    asyncio.run(run(cluster, how, folder, loads))
    broken = []
    for load, hops in zip(loads, (1, 2), strict=True):
        account = Account(load, folder, hops=hops)
        print(load.key, account.summary(), account.errors(), flush=True)
        broken += account.broken(may_fail=HELD if how == "gone" else 0)
    if how == "restart":
        deploy(folder, 4)
        if not until(lambda: len(alive(folder, "Target")) == 4, timeout=60):
            broken.append("nothing is deployed any more after the restart")
    elif len(alive(folder, "Target")) != 2:
        broken.append("a replica that nothing was done to has ended")
    print("\n".join(broken) or "kept", flush=True)
    # Without a GCS, Ray has nobody to say goodbye to.
    os._exit(0)


if __name__ == "__main__":
    main()
