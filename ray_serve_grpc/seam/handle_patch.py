"""`_to_object_ref` and its kin work on by-value responses: their results put the value into the object store."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from ray_serve_grpc.seam import probe

IN_EVENT_LOOP = (
    "Sync methods should not be called from within an `asyncio` event loop: they would block it. Await `{}()` instead."
)


def apply(module: ModuleType) -> str:
    """Patches ray.serve.handle.

    Raises:
        Mismatch: it lacks something of what is used here; nothing has been changed.
    """
    response = probe.member(module, "DeploymentResponse")
    generator = probe.member(module, "DeploymentResponseGenerator")
    sync = ("_timeout_s", "_allow_running_in_asyncio_loop")
    plan = [
        (response, "_to_object_ref", probe.function(response, "_to_object_ref", asynchronous=True)),
        (response, "_to_object_ref_sync", probe.function(response, "_to_object_ref_sync", *sync)),
        (generator, "_to_object_ref_gen", probe.function(generator, "_to_object_ref_gen", asynchronous=True)),
        (generator, "_to_object_ref_gen_sync", probe.function(generator, "_to_object_ref_gen_sync", *sync)),
    ]
    for owner in (response, generator):
        probe.function(owner, "_fetch_future_result_async", asynchronous=True)
        probe.function(owner, "_fetch_future_result_sync", "_timeout_s")
    probe.uses([original for _, _, original in plan], "_request_metadata", "_by_reference")
    in_event_loop = probe.member(module, "is_running_in_asyncio_loop")

    for owner, name, original in plan:
        if not getattr(original, "__ray_serve_grpc__", False):
            patched = refs_sync(original, in_event_loop) if name.endswith("_sync") else refs(original)
            patched.__ray_serve_grpc__ = True  # type: ignore[attr-defined]
            setattr(owner, name, patched)
    return "by value"


def refs(original: Callable[..., Any]) -> Callable[..., Any]:
    streaming = original.__name__ == "_to_object_ref_gen"

    @wraps(original)
    async def to_refs(self: Any) -> Any:
        if not self._request_metadata._by_reference:
            result = await self._fetch_future_result_async()
            if gives_refs(result):
                return result.to_object_ref_gen() if streaming else await result.to_object_ref_async()
        return await original(self)

    return to_refs


def refs_sync(original: Callable[..., Any], in_event_loop: Callable[[], bool]) -> Callable[..., Any]:
    streaming = original.__name__ == "_to_object_ref_gen_sync"
    instead = original.__name__.removesuffix("_sync")

    @wraps(original)
    def to_refs(
        self: Any, _timeout_s: float | None = None, _allow_running_in_asyncio_loop: bool = False, **more: Any
    ) -> Any:
        if not self._request_metadata._by_reference:
            if not _allow_running_in_asyncio_loop and in_event_loop():
                raise RuntimeError(IN_EVENT_LOOP.format(instead))
            deadline = None if _timeout_s is None else time.monotonic() + _timeout_s
            result = self._fetch_future_result_sync(_timeout_s)
            if gives_refs(result):
                return result.to_object_ref_gen() if streaming else waited_ref(result, deadline)
        return original(self, _timeout_s, _allow_running_in_asyncio_loop, **more)

    return to_refs


def waited_ref(result: Any, deadline: float | None) -> Any:
    """The reference to a unary result; ours has to wait for the value first, an actor call's does not."""
    if is_ours(result):
        return result.to_object_ref(None if deadline is None else max(0.0, deadline - time.monotonic()))
    return result.to_object_ref()


def gives_refs(result: Any) -> bool:
    """Ours does, and so does an actor call that was made in our stead; Ray's gRPC and local results refuse."""
    from ray.serve._private.replica_result import ActorReplicaResult

    return is_ours(result) or isinstance(result, ActorReplicaResult)


def is_ours(result: Any) -> bool:
    client = sys.modules.get("ray_serve_grpc.client")  # not loaded: it made no result
    return client is not None and isinstance(result, client.gRPCReplicaResult)
