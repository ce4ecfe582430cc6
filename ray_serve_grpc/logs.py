"""The plugin's log: through Serve's logger, in its format, also what the Rust core has to tell."""

from __future__ import annotations

import logging
from time import monotonic
from typing import TYPE_CHECKING

from ray_serve_grpc import _native, config, lanes

if TYPE_CHECKING:
    from ray_serve_grpc._native import Server

logger = logging.getLogger(config.LOGGER_NAME)

#: Stands where the name of a Python file would.
CORE = "native core"


def hand_on() -> None:
    """Gives the core's records to the logger, with the time at which they were made."""
    for level, seconds, text in _native.take_log_records():
        if logger.isEnabledFor(level):
            record = logger.makeRecord(logger.name, level, CORE, 0, text, (), None)
            record.created = seconds
            record.msecs = seconds % 1 * 1000
            logger.handle(record)


def serving(server: Server, host: str, *, tls: bool, token: bool) -> None:
    """The line that a replica logs when it starts."""
    address = f"[{host}]:{server.port}" if ":" in host else f"{host}:{server.port}"
    socket = f" and unix:{server.unix_path}" if server.unix_path else ""
    logger.info(
        "Serving calls by value with ray_serve_grpc %s at tcp:%s%s; lanes %s; TLS %s; token %s.",
        _native.__version__,
        address,
        socket,
        ", ".join(lanes.allowed()),
        "on" if tls else "off",
        "on" if token else "off",
    )


def draining(server: Server, grace_s: float) -> None:
    ongoing = server.statistics()["ongoing_calls"]
    logger.info("Takes no more calls; %d under way have %.1f s to end.", ongoing, grace_s)


def stopped(began: float) -> None:
    """Args:
    began: when it began to drain, by `time.monotonic`.
    """
    logger.info("Stopped serving, %.1f s after it began to drain.", monotonic() - began)
