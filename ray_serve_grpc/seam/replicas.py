"""Which replicas and proxies a cluster runs, as Serve's controller tells its routers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

#: Seconds for each answer of the controller.
PATIENCE_S = 20.0
#: Seconds for the replicas; the controller says nothing while there are none.
REPLICAS_S = 5.0


class ServeNotRunning(LookupError):
    """The cluster has no Serve controller."""


@dataclass(frozen=True)
class Replica:
    application: str
    deployment: str
    name: str
    node_id: str
    node_ip: str
    port: int | None
    #: written in Java
    is_cross_language: bool
    #: RunningReplicaInfo
    info: Any
    #: handle to its actor
    actor: Any

    @property
    def actor_id(self) -> bytes:
        identity: bytes = self.actor._actor_id.binary()
        return identity

    def endpoints(self) -> list[str]:
        """As a router in this process has them, one for each lane."""
        from ray_serve_grpc.seam import adapter

        return adapter.replica_endpoints(self.info, self.actor._actor_id)


def serve_is_running() -> bool:
    try:
        _controller()
    except ServeNotRunning:
        return False
    return True


def running_replicas() -> list[Replica]:
    """Every replica that takes requests, by application, deployment and name.

    Raises:
        ServeNotRunning
        ray.exceptions.RayError: the controller does not answer.
    """
    import ray

    controller = _controller()
    identities = ray.get(controller.list_deployment_ids.remote(), timeout=PATIENCE_S)
    if not identities:
        return []
    targets = import_module("ray.serve._private.long_poll").LongPollNamespace.DEPLOYMENT_TARGETS
    asked = {(targets, identity): -1 for identity in identities}
    # Answers at once, unless none of them has a replica yet.
    try:
        changes = ray.get(controller.listen_for_change.remote(asked), timeout=REPLICAS_S)
    except ray.exceptions.GetTimeoutError:
        return []
    if not isinstance(changes, dict):
        return []
    infos = [info for change in changes.values() for info in change.object_snapshot.running_replicas]
    replicas = [found for found in map(_replica, infos) if found is not None]
    return sorted(replicas, key=lambda replica: (replica.application, replica.deployment, replica.name))


def proxies() -> dict[str, Any]:
    """Node id -> handle to the actor of Serve's proxy there.

    Raises:
        ServeNotRunning
    """
    import ray

    found: dict[str, Any] = ray.get(_controller().get_proxies.remote(), timeout=PATIENCE_S)
    return found


def _controller() -> Any:
    import ray

    constants = import_module("ray.serve._private.constants")
    try:
        return ray.get_actor(constants.SERVE_CONTROLLER_NAME, namespace=constants.SERVE_NAMESPACE)
    except ValueError:
        raise ServeNotRunning("no Serve controller") from None


def _replica(info: Any) -> Replica | None:
    """None for one that has gone since the controller told of it."""
    try:
        actor = info.get_actor_handle()
    except ValueError:
        return None
    deployment = info.replica_id.deployment_id
    return Replica(
        application=deployment.app_name,
        deployment=deployment.name,
        name=info.replica_id.unique_id,
        node_id=info.node_id or "",
        node_ip=info.node_ip or "",
        port=info.port,
        is_cross_language=bool(info.is_cross_language),
        info=info,
        actor=actor,
    )
