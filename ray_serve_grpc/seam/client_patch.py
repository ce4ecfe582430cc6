"""The caller's side: `RunningReplica` hands out the plugin's wrapper for by-value requests."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from ray_serve_grpc.seam import activation, probe

#: attribute of a RunningReplica: closes the wrapper it holds
CLOSER = "_ray_serve_grpc_closer"


def apply(module: ModuleType) -> str:
    """Patches ray.serve._private.request_router.replica_wrapper.

    Raises:
        Mismatch: it lacks something of what is used here; nothing has been changed.
    """
    running_replica = probe.member(module, "RunningReplica")
    probe.member(module, "ReplicaWrapper")
    select = probe.function(running_replica, "_get_replica_wrapper", "pr")
    send = probe.function(running_replica, "try_send_request", "pr", "with_rejection")
    probe.uses([running_replica.__init__], "_replica_info", "_actor_handle")
    probe.uses([running_replica.__init__, select], "_actor_replica_wrapper", "_grpc_replica_wrapper", "_by_reference")
    probe.uses([send], "send_request_python", "send_request_java")
    update = getattr(running_replica, "update_replica_info", None)
    if update is not None:
        probe.function(running_replica, "update_replica_info", "replica_info")
    if hasattr(select, "__wrapped__"):
        return form(module)

    running_replica._get_replica_wrapper = selecting(select)
    if update is not None:
        running_replica.update_replica_info = updating(update)
    return form(module)


def form(module: ModuleType) -> str:
    return "authenticated" if hasattr(module, "init_grpc_channel") else "plain"


def selecting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _get_replica_wrapper(self: Any, pr: Any) -> Any:
        if pr.metadata._by_reference:
            return self._actor_replica_wrapper
        wrapper = self._grpc_replica_wrapper
        if wrapper is None:
            try:
                wrapper = self._grpc_replica_wrapper = opened(self)
            except Exception as error:
                activation.stay("client", repr(error), f"calls to {replica_name(self)} take Ray's own transport")
        return original(self, pr) if wrapper is None else wrapper

    return _get_replica_wrapper


def updating(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def update_replica_info(self: Any, replica_info: Any) -> None:
        before = self._replica_info
        original(self, replica_info)
        if (before.node_ip, before.port) != (replica_info.node_ip, replica_info.port):
            close(self)

    return update_replica_info


def opened(replica: Any) -> Any:
    """The wrapper for by-value requests to `replica`, or None for Ray's own.

    It is closed when the router has let go of `replica` and the last request chose it.
    """
    from ray_serve_grpc.seam import adapter

    info = replica._replica_info
    if info.is_cross_language or adapter.in_ray_client():
        # Neither can be reached by gRPC from here; actor calls carry values as well.
        return replica._actor_replica_wrapper
    actor_id = replica._actor_handle._actor_id
    endpoints = adapter.replica_endpoints(info, actor_id)
    if not endpoints:
        activation.warn("a replica is out of reach of RAY_SERVE_GRPC_LANES: Ray's own transport", cause="lanes")
        return None

    from ray_serve_grpc.client import gRPCReplicaWrapper

    wrapper = gRPCReplicaWrapper(actor_id, endpoints, deployment=info.replica_id.deployment_id.name)
    closer = weakref.finalize(replica, wrapper.close)
    closer.atexit = False  # connections end with the process
    setattr(replica, CLOSER, closer)
    return wrapper


def close(replica: Any) -> None:
    """Closes what `opened` gave; the next by-value request opens it anew."""
    closer = replica.__dict__.pop(CLOSER, None)
    if closer is not None:
        replica._grpc_replica_wrapper = None
        closer()


def replica_name(replica: Any) -> str:
    return str(replica._replica_info.replica_id)
