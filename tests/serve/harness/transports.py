"""The transports a scenario can run on, as environment variables."""

from __future__ import annotations

ACTOR = "actor"
STOCK = "stock"
NATIVE = "native"
ALL = (ACTOR, STOCK, NATIVE)

_VARIABLES = {
    ACTOR: {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "0", "RAY_SERVE_GRPC_NATIVE": "0"},
    STOCK: {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "1", "RAY_SERVE_GRPC_NATIVE": "0"},
    NATIVE: {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "1", "RAY_SERVE_GRPC_NATIVE": "1"},
}

#: The same for every transport: quiet, without usage reports, and without the caller's proxies.
_COMMON = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "PYTHONFAULTHANDLER": "1",
    # A warning that our own modules raise is an error in driver, proxy and replica.
    "PYTHONWARNINGS": ",".join(
        f"error:::ray_serve_grpc{module}"
        for module in ("", ".bridge", ".client", ".config", ".errors", ".security", ".serializers", ".server")
    ),
}

_DROPPED = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "grpc_proxy")


def environment(transport: str, base: dict[str, str], extra: dict[str, str]) -> dict[str, str]:
    """Environment of a worker: `base` without Ray's and the plugin's settings, the transport's on top, then `extra`."""
    kept = {name: value for name, value in base.items() if not name.startswith("RAY_") and name not in _DROPPED}
    return {**kept, **_COMMON, **_VARIABLES[transport], **extra}
