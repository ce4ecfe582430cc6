"""Checks that a module of Ray has what a patch relies on, whatever version it calls itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any


class Mismatch(Exception):
    """Ray lacks something the seam needs. The text names it."""


def member(owner: Any, name: str) -> Any:
    """The attribute `name` of a module or class."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise Mismatch(f"{label(owner)} has no {name}") from None


def function(owner: Any, name: str, *parameters: str, asynchronous: bool = False) -> Callable[..., Any]:
    """The function `name` of a class, which must take all of `parameters`."""
    found = member(owner, name)
    if not inspect.isfunction(found):
        raise Mismatch(f"{label(owner)}.{name} is not a function")
    if asynchronous and not inspect.iscoroutinefunction(found):
        raise Mismatch(f"{label(owner)}.{name} is not a coroutine function")
    known = inspect.signature(found).parameters
    missing = [parameter for parameter in parameters if parameter not in known]
    if missing:
        raise Mismatch(f"{label(owner)}.{name} does not take {', '.join(missing)}")
    return found


def uses(functions: list[Callable[..., Any]], *names: str) -> None:
    """The attributes `names` occur in the code of at least one of `functions`.

    This is how instance attributes are probed while there is no instance.
    """
    known: set[str] = set()
    for entry in functions:
        known |= names_in(inspect.unwrap(entry).__code__)
    missing = [name for name in names if name not in known]
    if missing:
        where = ", ".join(entry.__qualname__ for entry in functions)
        raise Mismatch(f"{where}: no use of {', '.join(missing)}")


def names_in(code: CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= names_in(constant)
    return found


def label(owner: Any) -> str:
    return getattr(owner, "__qualname__", None) or getattr(owner, "__name__", None) or repr(owner)
