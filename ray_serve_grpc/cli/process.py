"""What one process tells of itself: the one that runs the command, and each replica and proxy."""

from __future__ import annotations

import os
import platform
import socket
from importlib import import_module
from typing import Any

import ray_serve_grpc
from ray_serve_grpc import config, lanes
from ray_serve_grpc.cli import probes
from ray_serve_grpc.cli.probes import FAILED, OK, SKIPPED, Probe
from ray_serve_grpc.seam import adapter

#: Ray's variables that decide which calls are made by value, and how large they may be.
RAYS_VARIABLES = (
    "RAY_SERVE_USE_GRPC_BY_DEFAULT",
    "RAY_SERVE_PROXY_USE_GRPC",
    config.RAY_MESSAGE_LIMIT,
    "RAY_USE_TLS",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED",
)

Report = dict[str, Any]


def of_actor(_actor: object) -> Report:
    """`report` of the process of an actor, by its `__ray_call__`."""
    return report()


def report() -> Report:
    """Plain data; docs/cli.md describes it."""
    status = ray_serve_grpc.status()
    settings, invalid = _settings()
    tried = [_native_module(), _valid(invalid), *_lane_probes(settings), _tls(), _token()]
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "user": os.geteuid(),
        "platform": f"{platform.machine()}, Linux {platform.release()}, {'-'.join(platform.libc_ver())}",
        "python": platform.python_version(),
        **{key: status[key] for key in ("version", "ray_version", "adapter", "active", "reason", "parts")},
        "lanes": _usable(settings, {probe.name: probe for probe in tried}),
        "tls": adapter.channel_is_encrypted() if status["ray_version"] else False,
        "token": adapter.token_is_demanded(),
        "settings": _changed(settings),
        "probes": [vars(probe) for probe in tried],
    }


def _settings() -> tuple[config.Settings, config.InvalidSetting | None]:
    try:
        return config.Settings.from_environment(os.environ), None
    except config.InvalidSetting as error:
        return config.Settings(), error


def _native_module() -> Probe:
    try:
        native = import_module("ray_serve_grpc._native")
    except ImportError as error:
        hint = "install the wheel for this Python and this machine anew: pip install --force-reinstall ray_serve_grpc."
        return Probe("native module", FAILED, str(error), hint)
    return Probe("native module", OK, f"version {native.__version__}")


def _valid(invalid: config.InvalidSetting | None) -> Probe:
    if invalid is None:
        return Probe("settings", OK, "all valid")
    return Probe("settings", FAILED, str(invalid), f"put {invalid.variable} right, or unset it.")


def _lane_probes(settings: config.Settings) -> list[Probe]:
    """Of what the settings ask for."""
    tried = [probes.descriptors()]
    if "unix" in settings.lanes:
        tried.append(probes.socket_folder(adapter.socket_folder()))
        if "shm" in settings.lanes:
            tried += [probes.memfd(), probes.descriptor_passing()]
            limit = settings.shm_limit if settings.shm_limit >= 0 else lanes.memory() // lanes.SHARE
            tried.append(probes.shared_memory(limit, lanes.memory()))
    return tried


def _tls() -> Probe:
    try:
        encrypted = adapter.channel_is_encrypted()
        if not encrypted:
            return Probe("TLS", SKIPPED, "RAY_USE_TLS is off")
        adapter.tls_credentials()
    except (ImportError, OSError, RuntimeError) as error:
        hint = "RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT must name files that this user can read."
        return Probe("TLS", FAILED, str(error), hint)
    return Probe("TLS", OK, "on: the certificates can be read")


def _token() -> Probe:
    """Never shows it."""
    try:
        if not adapter.token_is_demanded():
            return Probe("token", SKIPPED, "RAY_AUTH_MODE is not token")
        if adapter.authorization() is not None:
            return Probe("token", OK, "on: every call carries it")
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return Probe("token", FAILED, str(error), "see `ray get-auth-token`.")
    hint = "give this process Ray's token: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token."
    return Probe("token", FAILED, "token authentication is on, and there is no token here", hint)


def _usable(settings: config.Settings, tried: dict[str, Probe]) -> dict[str, Report]:
    """Lane -> whether it can carry calls from and to this process, and why not."""
    needs = {
        "shm": ("socket folder", "memfd", "descriptor passing", "native module"),
        "unix": ("socket folder", "native module"),
        "tcp": ("native module",),
    }
    found = {}
    for lane, wanted in needs.items():
        failed = [name for name in wanted if name in tried and tried[name].outcome == FAILED]
        reason = "; ".join(f"{name}: {tried[name].detail}" for name in failed)
        if lane not in settings.lanes:
            reason = "RAY_SERVE_GRPC_LANES leaves it out"
        elif lane == "shm" and "unix" not in settings.lanes:
            reason = "it needs the lane unix, which RAY_SERVE_GRPC_LANES leaves out"
        elif lane == "shm" and settings.shm_limit == 0:
            reason = "RAY_SERVE_GRPC_SHM_LIMIT=0"
        found[lane] = {"usable": not reason, "reason": reason}
    return found


def _changed(settings: config.Settings) -> dict[str, Report]:
    """Variable -> its value and the default, of those that differ; and Ray's that are set."""
    changed: dict[str, Report] = {}
    for name, variable, kind, default, _meaning in config.table():
        value = getattr(settings, name)
        if value != default:
            changed[variable] = {"value": kind.show(value), "default": kind.show(default)}
    for variable in RAYS_VARIABLES:
        if os.environ.get(variable):
            changed[variable] = {"value": os.environ[variable], "default": None}
    return changed
