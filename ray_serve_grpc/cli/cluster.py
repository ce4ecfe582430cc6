"""What a running cluster tells: each replica and proxy of itself, and how long a ping to each replica takes."""

from __future__ import annotations

import contextlib
import logging
import socket
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray

from ray_serve_grpc import channels
from ray_serve_grpc.cli import process
from ray_serve_grpc.seam import replicas
from ray_serve_grpc.seam.replicas import Replica

Report = dict[str, Any]

#: Seconds for a process to tell of itself. One whose loop is blocked by user code does not.
PATIENCE_S = 30.0
#: Seconds for the head node to take a connection.
CONNECT_S = 5.0
#: Seconds for each ping.
PING_S = 5.0
#: Enough for a median that one slow ping does not move.
PINGS = 20


class NoCluster(Exception):
    """There is no cluster at the address, or it cannot be joined. The text says why."""

    def __init__(self, text: str, hint: str, *, absent: bool) -> None:
        super().__init__(text)
        self.hint = hint
        #: whether nothing answered at all
        self.absent = absent


@contextlib.contextmanager
def joined(address: str) -> Iterator[str]:
    """A driver in the cluster at `address`, which leaves it in the end.

    Raises:
        NoCluster
    """
    _require_listener(address)
    options: Any = {"include_dashboard": False} if address == "local" else {}
    try:
        context: Any = ray.init(
            address=address, namespace="ray_serve_grpc", log_to_driver=False, logging_level=logging.ERROR, **options
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise _no_cluster(error) from error
    try:
        yield str(context.address_info["address"])
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Ray itself tries for long, and then may end the process.

    Raises:
        NoCluster
    """
    if "://" in address:
        raise NoCluster(f"{address} is no address of a node", "run this on a node of the cluster.", absent=False)
    host, colon, port = address.rpartition(":")
    if not colon:
        return  # "auto" or "local"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S):
            pass
    except (OSError, ValueError) as error:
        hint = "give the address that `ray start --head` printed, host:port of its GCS, and see `ray status` there."
        raise NoCluster(f"nothing answers at {address}: {error}", hint, absent=True) from error


def _no_cluster(error: BaseException) -> NoCluster:
    cause: BaseException | None = error
    while cause is not None:
        if type(cause).__name__ == "AuthenticationError":  # not in every Ray
            hint = (
                "set RAY_AUTH_MODE=token, which Ray asks for with any address but auto, and give the cluster's token "
                "in RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token."
            )
            return NoCluster(f"the cluster refused this process's token: {_first_line(cause)}", hint, absent=False)
        cause = cause.__cause__
    hint = "see `ray status` there; this command needs the Ray and the Python of the cluster."
    return NoCluster(_first_line(error), hint, absent=isinstance(error, ConnectionError))


def report(address: str, progress: Callable[[str], None]) -> Report:
    """Of the cluster that this process has joined at `address`.

    Args:
        progress: is told what is being looked at.
    """
    progress("asking Serve's controller")
    try:
        running, proxies = replicas.running_replicas(), replicas.proxies()
    except replicas.ServeNotRunning:
        return _cluster(address, False, [], [])
    except ray.exceptions.RayError as error:
        return {**_cluster(address, True, [], []), "error": f"Serve's controller does not answer: {_first_line(error)}"}
    progress(f"asking {len(running)} replicas and {len(proxies)} proxies")
    actors = {replica.actor_id.hex(): replica.actor for replica in running if not replica.is_cross_language}
    told = _told({**actors, **{f"proxy {node}": actor for node, actor in proxies.items()}})
    found = []
    for number, replica in enumerate(running, 1):
        progress(f"pinging replica {number} of {len(running)}")
        found.append(
            {
                "application": replica.application,
                "deployment": replica.deployment,
                "replica": replica.name,
                "actor_id": replica.actor_id.hex(),
                "node_id": replica.node_id,
                "node_ip": replica.node_ip,
                "port": replica.port,
                "java": replica.is_cross_language,
                **told.get(replica.actor_id.hex(), {"process": None, "error": ""}),
                "pings": _pings(replica),
            }
        )
    told_by_proxies = [{"node_id": node, **told[f"proxy {node}"]} for node in proxies]
    return _cluster(address, True, found, told_by_proxies)


def _cluster(address: str, serve: bool, found: list[Report], proxies: list[Report]) -> Report:
    alive = [node for node in ray.nodes() if node["Alive"]]
    return {
        "address": address,
        "nodes": len(alive),
        "serve": serve,
        "error": "",
        "replicas": found,
        "proxies": proxies,
    }


def _told(actors: Mapping[str, Any]) -> dict[str, Report]:
    """What each actor's process reports, or why it does not. All are asked at once."""
    asked = {name: actor.__ray_call__.remote(process.of_actor) for name, actor in actors.items()}
    ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=PATIENCE_S) if asked else ([], [])
    told = {}
    for name, reference in asked.items():
        if reference not in ready:
            told[name] = {"process": None, "error": f"no answer within {PATIENCE_S:g} s"}
            continue
        try:
            told[name] = {"process": ray.get(reference), "error": ""}
        except Exception as error:  # whatever an environment without the plugin makes of the request
            told[name] = {"process": None, "error": _last_line(error)}
    return told


def _pings(replica: Replica) -> list[Report]:
    """One for each lane that reaches it from here."""
    if replica.is_cross_language:
        return []
    found = []
    for endpoint in replica.endpoints():
        answer: Report = {"lane": endpoint.partition(":")[0], "endpoint": endpoint, "error": ""}
        answer |= {"version": "", "shared_memory": False, "round_trip_us": None}
        try:
            answer |= _ping(replica, endpoint)
        except (OSError, RuntimeError, ValueError, ImportError) as error:  # no connection; certificates; the core
            answer["error"] = str(error)
        found.append(answer)
    return found


def _ping(replica: Replica, endpoint: str) -> Report:
    channel = channels.channel_to(replica.actor_id, [endpoint])
    try:
        _, lane, version, shared = channel.ping(PING_S)
        times = [1e6 * channel.ping(PING_S)[0] for _ in range(PINGS)]
    finally:
        channel.close()
    times_us = {"min": round(min(times), 1), "median": round(statistics.median(times), 1)}
    return {"lane": lane, "version": version, "shared_memory": shared, "round_trip_us": times_us}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]


def _last_line(error: Exception) -> str:
    """Where Ray's texts have the cause."""
    return (str(error).strip().splitlines() or [repr(error)])[-1].strip()
