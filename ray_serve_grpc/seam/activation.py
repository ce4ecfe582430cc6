"""Decides whether a patch goes on, applies it, and remembers what became of it.

A process that cannot use the plugin stays on Ray's own transport: that is a decision per
part, it is logged once per cause, and it never breaks an import.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module, metadata
from types import ModuleType

from ray_serve_grpc import config
from ray_serve_grpc.seam import hook
from ray_serve_grpc.seam.probe import Mismatch

logger = logging.getLogger(config.LOGGER_NAME)

ACTIVE = ""
SWITCHED_OFF = "switched off by RAY_SERVE_GRPC_NATIVE=0"

#: part -> what it means when its patch does not fit this Ray
CONSEQUENCES = {
    "client": "by-value calls from this process take Ray's own transport",
    "constants": "Ray's own message limits stay as they are",
    "handle": "by-value responses give no object references",
    "replica": "replicas in this process serve with Ray's own transport",
    "router": "a broadcast writes its payload once for each replica",
}

#: part -> why it stays Ray's own, or ACTIVE
outcomes: dict[str, str] = {}
#: part -> which form of the seam fitted
forms: dict[str, str] = {}

_reported: set[str] = set()


def install() -> None:
    """Arms the hook, and patches what of Ray has been imported already.

    Raises:
        InvalidSetting: a setting has a value that is not allowed.
    """
    config.settings()
    hook.arm()
    for name, part in hook.TARGETS.items():
        module = sys.modules.get(name)
        if module is not None and outcomes.get(part) != ACTIVE:
            apply(part, module)


def apply(part: str, module: ModuleType) -> None:
    """Puts one patch on a module of Ray; on any trouble the module stays as it is."""
    try:
        settings = config.settings()
        if settings.native:
            import_module("ray_serve_grpc._native")
    except config.InvalidSetting as error:
        stay(part, str(error))
        return
    except ImportError as error:
        stay(part, f"the native module cannot be loaded: {error}")
        return
    if not settings.native:
        outcomes[part] = SWITCHED_OFF
        return
    logger.setLevel(settings.log_level)
    try:
        forms[part] = import_module(f"{__package__}.{part}_patch").apply(module)
        outcomes[part] = ACTIVE
    except Mismatch as error:
        stay(part, str(error), CONSEQUENCES[part])
    except Exception as error:
        stay(part, repr(error), CONSEQUENCES[part])


def stay(part: str, reason: str, consequence: str = "this process stays on Ray's own transport") -> None:
    """Remembers that `part` is Ray's own from here on, and warns of it, once per cause."""
    outcomes[part] = reason
    warn(f"{consequence}: {reason}", cause=reason)


def warn(text: str, *, cause: str) -> None:
    if cause not in _reported:
        _reported.add(cause)
        logger.warning("ray_serve_grpc: %s", text)


def report() -> tuple[bool, str]:
    """(active, reason): whether by-value calls from this process take the plugin's transport, and why not."""
    client = outcomes.get("client")
    if client is None:
        try:
            # Not kept: what is set before ray.serve is imported still counts.
            native = config.Settings.from_environment(os.environ).native
        except config.InvalidSetting as error:
            return False, str(error)
        if not native:
            return False, SWITCHED_OFF
        if hook.armed():
            return False, "waits for ray.serve to be imported"
        return False, "not installed in this process: call ray_serve_grpc.install()"
    others = [f"{part}: {reason}" for part, reason in outcomes.items() if reason != ACTIVE and part != "client"]
    return client == ACTIVE, client or "; ".join(others)


def ray_version() -> str | None:
    ray = sys.modules.get("ray")
    version = getattr(ray, "__version__", None)
    if version is None:
        try:
            version = metadata.version("ray")
        except metadata.PackageNotFoundError:
            return None
    return str(version)


def try_on() -> None:
    """Imports every module of Ray that a patch goes on, so that `outcomes` tells of all of them.

    Raises:
        ImportError: this Ray lacks one.
    """
    import_module("ray.serve")
    for name in hook.TARGETS:
        import_module(name)
