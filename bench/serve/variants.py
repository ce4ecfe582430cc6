"""Transports and modes of threading, as environment variables."""

from __future__ import annotations

from collections.abc import Mapping

ACTOR = "actor"
STOCK = "stock"
NATIVE = "native"
VARIANTS = (ACTOR, STOCK, NATIVE)
NAMES = {ACTOR: "actor calls, Plasma", STOCK: "Ray's grpc.aio", NATIVE: "ray_serve_grpc"}

DEFAULT = "default"
THROUGHPUT = "throughput"
MODES = (DEFAULT, THROUGHPUT)

_VARIANT_VARIABLES = {
    ACTOR: {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "0", "RAY_SERVE_GRPC_NATIVE": "0"},
    # Ray's limit is 4 MiB unless raised.
    STOCK: {
        "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
        "RAY_SERVE_GRPC_NATIVE": "0",
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),
    },
    NATIVE: {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "1", "RAY_SERVE_GRPC_NATIVE": "1"},
}
_MODE_VARIABLES = {DEFAULT: {}, THROUGHPUT: {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}}
_COMMON = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
_DROPPED = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "grpc_proxy")


def environment(variant: str, mode: str, base: Mapping[str, str]) -> dict[str, str]:
    """`base` without settings of Serve and the plugin that a variant is made of, and the variant's own on top.

    Others of the plugin stay: `RAY_SERVE_GRPC_LANES=tcp python -m bench serve` measures just that.
    """
    own = {name for names in (*_VARIANT_VARIABLES.values(), *_MODE_VARIABLES.values()) for name in names}
    kept = {name: value for name, value in base.items() if name not in own and name not in _DROPPED}
    return {**kept, **_COMMON, **_VARIANT_VARIABLES[variant], **_MODE_VARIABLES[mode]}
