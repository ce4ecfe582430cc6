"""Ray Serve's by-value calls over gRPC with a Rust core.

Installing the package is enough: its `.pth` arms an import hook in every Python process of
the environment, and calls of handles with `_by_reference=False` take the native transport.
Where `.pth` files do not run, importing this package arms the hook.
"""

import os

from ray_serve_grpc.seam import hook as _hook

TYPE_CHECKING = False  # every interpreter of the environment imports this file; typing is heavy
if TYPE_CHECKING:
    from typing import Any

__all__ = ["__version__", "install", "status"]

__version__: str

_hook.arm()


def install() -> None:
    """Switches this process over explicitly, also when parts of Ray Serve were imported before.

    Idempotent. Where Ray or the native module does not fit, the process stays on Ray's own
    transport, with a warning; `status()` tells.

    Raises:
        ray_serve_grpc.config.InvalidSetting: names the setting, its value and what is allowed.
    """
    from ray_serve_grpc.seam import activation

    activation.install()


def status() -> "dict[str, Any]":
    """What the plugin does in this process.

    Keys:
        active: whether by-value calls from here take the native transport.
        reason: why not, or what else stayed Ray's own; "" when there is nothing to say.
        version, ray_version, pid
        adapter: the form of Ray's seam that fitted, None before a patch went on.
        parts: patched part of Ray -> "active" or why it is Ray's own.
        lanes: lanes that calls may take, in the order they are tried.
        calls: lane -> kind of call -> calls made since the process started; lane "stock" is Ray's own
            protocol, to a replica without the plugin.
        served: the same for calls that came in.
        shared_memory: what of them went through the shm lane: messages_sent, bytes_sent, bytes_forwarded, …
    """
    from ray_serve_grpc import lanes, metrics
    from ray_serve_grpc.seam import activation

    active, reason = activation.report()
    return {
        "active": active,
        "reason": reason,
        "version": _version(),
        "ray_version": activation.ray_version(),
        "adapter": activation.forms.get("replica") or activation.forms.get("client"),
        "parts": {part: outcome or "active" for part, outcome in activation.outcomes.items()},
        "lanes": lanes.allowed() if active else [],
        "calls": metrics.calls(),
        "served": metrics.served(),
        "shared_memory": metrics.shared_memory(),
        "pid": os.getpid(),
    }


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("ray_serve_grpc")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


def __getattr__(name: str) -> str:
    if name == "__version__":
        return _version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
