"""A cluster of two nodes, of which one vanishes under load. Usage: python nodes.py FOLDER

Prints what was broken, or "kept" when every promise was.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import ray
from load import LIGHT, Account, Load
from ray import serve
from ray.cluster_utils import Cluster
from replicas import Server, alive, ledger_folder, target

SECONDS = 6.0


@target(num_replicas=2, ray_actor_options={"num_cpus": 0, "resources": {"first": 0.1}})
class Staying(Server):
    pass


@target(num_replicas=2, ray_actor_options={"num_cpus": 0, "resources": {"second": 0.1}})
class Vanishing(Server):
    pass


async def run(cluster: Cluster, node: Any, loads: list[Load]) -> None:
    running = [asyncio.ensure_future(load.run(SECONDS)) for load in loads]
    await asyncio.sleep(SECONDS / 3)
    await asyncio.to_thread(cluster.remove_node, node, False)
    # What has no replica left would wait for one for ever.
    loads[1].stop()
    await asyncio.gather(*running)


def main() -> None:
    head = {"num_cpus": 2, "resources": {"first": 1}, "include_dashboard": False, "temp_dir": sys.argv[1]}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "object_store_memory": 256 * 2**20})
    node = cluster.add_node(num_cpus=2, resources={"second": 1}, object_store_memory=256 * 2**20)
    ray.init(address=cluster.address, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    folder = ledger_folder()
    staying = serve.run(Staying.bind(folder), name="staying", route_prefix=None)
    vanishing = serve.run(Vanishing.bind(folder), name="vanishing", route_prefix=None)
    loads = [Load(staying, "staying", 100.0, LIGHT), Load(vanishing, "vanishing", 60.0, LIGHT, patience=15.0)]
    asyncio.run(run(cluster, node, loads))
    accounts = [Account(load, folder) for load in loads]
    broken = accounts[0].broken()
    # Of the node that is gone: nothing ran twice, and what failed says so.
    broken += [line for line in accounts[1].broken(may_fail=200) if " is stuck; ran on []" not in line]
    if len(alive(folder, "Staying")) != 2:
        broken.append("a replica on the node that stayed has ended")
    for account in accounts:
        print(account.summary(), account.errors(), flush=True)
    print("\n".join(broken) or "kept", flush=True)
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
