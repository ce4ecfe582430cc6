"""Keeps Ray's own gRPC servers alive under a message limit that only the plugin can serve.

Ray hands RAY_SERVE_GRPC_MAX_MESSAGE_SIZE to grpcio, which takes a C int: above 2 GiB - 1 the
proxies' gRPC servers would not start.
"""

from __future__ import annotations

from types import ModuleType

from ray_serve_grpc.seam import probe

LARGEST_OF_GRPCIO = 2**31 - 1


def apply(module: ModuleType) -> str:
    """Patches ray.serve._private.constants.

    Raises:
        Mismatch: it lacks something of what is used here; nothing has been changed.
    """
    options: list[tuple[str, object]] = probe.member(module, "DEFAULT_GRPC_SERVER_OPTIONS")
    limit: int = probe.member(module, "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE")
    if limit > LARGEST_OF_GRPCIO:
        options[:] = [
            (name, LARGEST_OF_GRPCIO if isinstance(value, int) and value == limit else value) for name, value in options
        ]
        module.RAY_SERVE_GRPC_MAX_MESSAGE_SIZE = LARGEST_OF_GRPCIO  # type: ignore[attr-defined]
    return "limited"
