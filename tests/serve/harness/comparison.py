"""`same_as_actor`: a pytest test whose body runs once per transport, in that transport's cluster."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import pytest

from harness import transports

_NOTHING = object()


def same_as_actor(
    *,
    expect: Any = _NOTHING,
    stock: bool = True,
    native_only: bool = False,
    timeout: float = 60.0,
    extra: dict[str, str] | Callable[..., dict[str, str]] | None = None,
    agrees: Callable[[Any, Any], bool] = operator.eq,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a test of a scenario: `def test_behaviour(cluster, **parameters) -> outcome`.

    The scenario runs in the driver of each transport's cluster; its outcome is plain data. The test passes when our
    outcome equals the actor path's.

    Args:
        expect: what the outcome must be on every transport; a callable judges it instead.
        stock: run it on Ray's own grpc.aio too. False where that is known to behave otherwise (the test's comment
            says how).
        native_only: no actor path to compare with: `expect` decides.
        timeout: seconds for the slowest transport.
        extra: environment variables of clusters of their own; may be a function of the test's parameters.
        agrees: (actor path's outcome, another's) -> whether that other is right; equal, unless told.
    """

    def decorate(scenario: Callable[..., Any]) -> Callable[..., None]:
        def test(pool: Any, selected: tuple[str, ...], **parameters: Any) -> None:
            __tracebackhide__ = True
            names = [
                name
                for name in selected
                if name == transports.NATIVE
                or (name == transports.ACTOR and not native_only)
                or (name == transports.STOCK and stock and not native_only)
            ]
            if not names:
                pytest.skip(f"not a test of {', '.join(selected)}")
            variables = extra(**parameters) if callable(extra) else extra
            outcomes = pool.run(
                names, scenario.__module__, scenario.__qualname__, parameters, timeout=timeout, extra=variables
            )
            for name in names:
                if expect is _NOTHING:
                    continue
                if callable(expect):
                    assert expect(outcomes[name]), f"{name}: {outcomes[name]!r}"
                else:
                    assert {name: outcomes[name]} == {name: expect}
            reference = outcomes.get(transports.ACTOR, _NOTHING)
            if reference is not _NOTHING and not callable(expect):
                for name in names:
                    if not agrees(reference, outcomes[name]):
                        assert {name: outcomes[name]} == {name: reference}

        own = list(inspect.signature(scenario).parameters.values())[1:]
        fixtures = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("pool", "selected")]
        test.__signature__ = inspect.Signature(fixtures + own)  # type: ignore[attr-defined]
        test.__name__ = scenario.__name__
        test.__qualname__ = scenario.__qualname__
        test.__module__ = scenario.__module__
        test.__doc__ = scenario.__doc__
        test.scenario = scenario  # type: ignore[attr-defined]
        return test

    return decorate
