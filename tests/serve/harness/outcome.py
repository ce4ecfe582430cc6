"""Errors and results as plain data that crosses process borders and compares with `==`."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

#: What a caller may catch. An error is described by which of these it is, so the order of bases does not matter.
_CATCHABLE = (
    "builtins.ValueError",
    "builtins.TypeError",
    "builtins.KeyError",
    "builtins.RuntimeError",
    "builtins.TimeoutError",
    "builtins.StopIteration",
    "builtins.StopAsyncIteration",
    "builtins.SystemExit",
    "builtins.KeyboardInterrupt",
    "asyncio.exceptions.CancelledError",
    "concurrent.futures._base.CancelledError",
    "ray.exceptions.RayTaskError",
    "ray.exceptions.RayActorError",
    "ray.exceptions.ActorDiedError",
    "ray.exceptions.ActorUnavailableError",
    "ray.exceptions.TaskCancelledError",
    "ray.exceptions.RayError",
    "ray.serve.exceptions.BackPressureError",
    "ray.serve.exceptions.RayServeException",
    "ray.serve.exceptions.RequestCancelledError",
    "ray.serve.exceptions.DeploymentUnavailableError",
)


def describe(error: BaseException, *, contains: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a caller can tell of an error: its class, what catches it, its cause, and which texts it shows.

    The texts are looked for in `str(error)` and in the printed traceback, since that is what a person reads.
    """
    lineage = {f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__}
    shown = text(error)
    return {
        "type": type(error).__name__,
        "caught by": sorted(name.rsplit(".", 1)[1] for name in lineage.intersection(_CATCHABLE)),
        "cause": type(error.__cause__).__name__ if error.__cause__ is not None else None,
        "shows": [needle for needle in contains if needle in shown],
    }


def text(error: BaseException) -> str:
    try:
        message = str(error)
    except Exception as broken:
        message = f"<str() raised {type(broken).__name__}>"
    return message + "\n" + "".join(traceback.format_exception(error))


def outcome(call: Callable[[], Any], *, contains: tuple[str, ...] = ()) -> Any:
    """The call's value, or the description of the error it raised."""
    try:
        return call()
    except BaseException as error:
        return describe(error, contains=contains)


def collect(items: Iterable[Any], *, contains: tuple[str, ...] = ()) -> tuple[list[Any], Any]:
    """What an iterable gave until it ended, and the description of the error that ended it, or None."""
    given: list[Any] = []
    try:
        given.extend(items)
    except BaseException as error:
        return given, describe(error, contains=contains)
    return given, None


async def outcome_async(awaitable: Awaitable[Any], *, contains: tuple[str, ...] = ()) -> Any:
    try:
        return await awaitable
    except BaseException as error:
        return describe(error, contains=contains)
