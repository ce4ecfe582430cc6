"""`handle.broadcast` encodes its payload once for all replicas."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from ray_serve_grpc.seam import probe


def apply(module: ModuleType) -> str:
    """Patches ray.serve._private.router.

    Raises:
        Mismatch: it lacks something of what is used here; nothing has been changed.
    """
    router = probe.member(module, "AsyncioRouter")
    if not hasattr(router, "broadcast"):
        return "without broadcast"
    original = probe.function(router, "broadcast", asynchronous=True)
    probe.uses([original], "try_send_request")
    if not getattr(original, "__ray_serve_grpc__", False):
        patched = broadcasting(original)
        patched.__ray_serve_grpc__ = True  # type: ignore[attr-defined]
        router.broadcast = patched
    return "broadcast"


def broadcasting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    async def broadcast(self: Any, *args: Any, **kwargs: Any) -> Any:
        from ray_serve_grpc.broadcast import going_on

        with going_on():
            return await original(self, *args, **kwargs)

    return broadcast
