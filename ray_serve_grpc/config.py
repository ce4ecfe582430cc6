"""Every setting of the plugin, and the only place that reads them from the environment.

The fields of `Settings` are the table: name, default, allowed values and meaning stand
together, and docs/configuration.md is printed from them (`python -m ray_serve_grpc.config`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Protocol, TypeVar

#: Messages of the plugin appear below Ray Serve's own logger and go where its messages go.
LOGGER_NAME = "ray.serve.ray_serve_grpc"

LANES = ("tcp", "unix", "shm")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

#: Ray's own limit on its replica port. It binds the plugin only where somebody set it.
RAY_MESSAGE_LIMIT = "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"

Number = TypeVar("Number", int, float)

KIB = 1024
GIB = 1024**3

#: A gRPC message carries its length in 32 bits.
LARGEST_MESSAGE = 4 * GIB - 1


class InvalidSetting(ValueError):
    """A setting has a value outside its allowed range. The text names all three."""

    def __init__(self, variable: str, value: str, allowed: str) -> None:
        super().__init__(f"{variable}={value!r} is not allowed; allowed: {allowed}")
        self.variable = variable
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[type[InvalidSetting], tuple[str, str, str]]:
        return type(self), (self.variable, self.value, self.allowed)


class Kind(Protocol):
    """How a setting is written in the environment."""

    @property
    def allowed(self) -> str: ...

    def parse(self, text: str) -> Any:
        """The value that `text` stands for; ValueError when it is none of the allowed ones."""

    def show(self, value: Any) -> str: ...


@dataclass(frozen=True)
class Flag:
    allowed: str = "1 or 0"

    def parse(self, text: str) -> bool:
        return {"1": True, "0": False}[text]

    def show(self, value: bool) -> str:
        return "1" if value else "0"


@dataclass(frozen=True)
class Bytes:
    minimum: int
    maximum: int

    @property
    def allowed(self) -> str:
        return f"{self.minimum} to {self.maximum} bytes"

    def parse(self, text: str) -> int:
        return within(int(text), self.minimum, self.maximum)

    def show(self, value: int) -> str:
        return f"{value} bytes"


@dataclass(frozen=True)
class Seconds:
    minimum: float
    maximum: float

    @property
    def allowed(self) -> str:
        return f"{self.minimum:g} to {self.maximum:g} s"

    def parse(self, text: str) -> float:
        return within(float(text), self.minimum, self.maximum)

    def show(self, value: float) -> str:
        return f"{value:g} s"


@dataclass(frozen=True)
class Lanes:
    allowed: str = f"a comma-separated choice of {', '.join(LANES)}, with tcp or unix among them"

    def parse(self, text: str) -> tuple[str, ...]:
        chosen = {name.strip().lower() for name in text.split(",")}
        if chosen - set(LANES) or not chosen & {"tcp", "unix"}:
            raise ValueError(text)
        return tuple(name for name in LANES if name in chosen)

    def show(self, value: tuple[str, ...]) -> str:
        return ",".join(value)


@dataclass(frozen=True)
class Choice:
    names: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return ", ".join(self.names)

    def parse(self, text: str) -> str:
        return self.names[self.names.index(text.upper())]

    def show(self, value: str) -> str:
        return value


def within(value: Number, minimum: Number, maximum: Number) -> Number:
    if not minimum <= value <= maximum:
        raise ValueError(value)
    return value


def setting(variable: str, default: Any, kind: Kind, meaning: str) -> Any:
    return field(default=default, metadata={"variable": variable, "kind": kind, "meaning": meaning})


@dataclass(frozen=True)
class Settings:
    """The settings of one process. Unset or empty variables leave the default."""

    native: bool = setting(
        "RAY_SERVE_GRPC_NATIVE",
        True,
        Flag(),
        "0 leaves the process on Ray's own transport. Works in the environment and in a `runtime_env`.",
    )
    max_message_size: int = setting(
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE",
        2 * GIB - 1,
        Bytes(KIB, LARGEST_MESSAGE),
        "Largest message in either direction, request, response or item of a stream. Ray reads the same variable for "
        f"its own gRPC servers. Where only Ray's `{RAY_MESSAGE_LIMIT}` is set, that one holds (-1: no limit).",
    )
    lanes: tuple[str, ...] = setting(
        "RAY_SERVE_GRPC_LANES",
        LANES,
        Lanes(),
        "What may carry a call: TCP, a Unix-domain socket between processes of one node, shared memory for the bytes "
        "of large messages on one node. A replica's TCP port stays open without tcp, since Ray publishes it.",
    )
    shm_limit: int = setting(
        "RAY_SERVE_GRPC_SHM_LIMIT",
        -1,
        Bytes(-1, 1024 * GIB),
        "Most shared memory that one process keeps for the shm lane; over it, bytes take the socket. "
        "-1: a tenth of the memory of the machine or of the container.",
    )
    connect_timeout: float = setting(
        "RAY_SERVE_GRPC_CONNECT_TIMEOUT_S",
        5.0,
        Seconds(0.1, 300),
        "How long to try to connect to a replica before the router is told to choose another one.",
    )
    keepalive_interval: float = setting(
        "RAY_SERVE_GRPC_KEEPALIVE_INTERVAL_S",
        5.0,
        Seconds(0.5, 3600),
        "Silence on a connection with calls in flight after which the peer is pinged.",
    )
    keepalive_timeout: float = setting(
        "RAY_SERVE_GRPC_KEEPALIVE_TIMEOUT_S",
        10.0,
        Seconds(0.5, 3600),
        "How long a ping may stay unanswered before the peer counts as dead and its calls fail.",
    )
    reflection: bool = setting(
        "RAY_SERVE_GRPC_REFLECTION",
        False,
        Flag(),
        "1 lets a replica's port tell generic gRPC clients what it serves (server reflection), to those who have the "
        "token where one is asked for.",
    )
    log_level: str = setting(
        "RAY_SERVE_GRPC_LOG_LEVEL",
        "INFO",
        Choice(LOG_LEVELS),
        f"Least severe message that the logger `{LOGGER_NAME}` lets through, those of the Rust core included. INFO: "
        "one line when a replica starts to serve, and one for each change of state.",
    )
    metrics: bool = setting(
        "RAY_SERVE_GRPC_METRICS",
        True,
        Flag(),
        "0 exports no metrics to Ray, and does not time calls.",
    )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Parses every setting.

        Raises:
            InvalidSetting: a variable is set to something that is not allowed.
        """
        values: dict[str, Any] = {}
        for name, variable, kind, _default, _meaning in table():
            text = environment.get(variable, "").strip()
            if text:
                values[name] = parsed(variable, kind, text)
        if "max_message_size" not in values:
            text = environment.get(RAY_MESSAGE_LIMIT, "").strip()
            if text == "-1":
                values["max_message_size"] = LARGEST_MESSAGE
            elif text:
                values["max_message_size"] = parsed(RAY_MESSAGE_LIMIT, Bytes(1, LARGEST_MESSAGE), text)
        return cls(**values)


@cache
def settings() -> Settings:
    """The settings of this process, read at the first call and kept.

    Raises:
        InvalidSetting: at every call, until the environment is put right.
    """
    return Settings.from_environment(os.environ)


def table() -> Iterator[tuple[str, str, Kind, Any, str]]:
    """(attribute, variable, kind, default, meaning) of every setting."""
    for entry in fields(Settings):
        yield entry.name, entry.metadata["variable"], entry.metadata["kind"], entry.default, entry.metadata["meaning"]


def parsed(variable: str, kind: Kind, text: str) -> Any:
    try:
        return kind.parse(text)
    except (ValueError, KeyError):
        raise InvalidSetting(variable, text, kind.allowed) from None


def markdown() -> str:
    """docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "<!-- Generated by `python -m ray_serve_grpc.config`; edit ray_serve_grpc/config.py instead. -->",
        "",
        "All settings are environment variables, read once in each process: set them where the Ray node starts, or in",
        "a `runtime_env`. An empty variable counts as unset. A value that is not allowed is reported with the setting,",
        "the value and what is allowed, and the process stays on Ray's own transport; an explicit",
        "`ray_serve_grpc.install()` raises `InvalidSetting` instead.",
        "",
        "| setting | default | allowed | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for _name, variable, kind, default, meaning in table():
        lines.append(f"| `{variable}` | {kind.show(default)} | {kind.allowed} | {meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
