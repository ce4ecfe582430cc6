"""An error of user code arrives as an actor call would bring it, or at least as a true text."""

from __future__ import annotations

import asyncio
import builtins
import pickle
import sys
import threading
import types
import urllib.error
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    RayError,
    RaySystemError,
    RayTaskError,
    UnserializableException,
)
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    RequestCancelledError,
    gRPCStatusError,
)

from ray_serve_grpc import _native, errors

ACTOR = "ab" * 16
MIB = 1 << 20


def thrown(make: Any) -> BaseException:
    """An exception with a traceback that runs through user code."""

    def deep_user_frame() -> None:
        raise make() if callable(make) else make

    try:
        deep_user_frame()
    except BaseException as error:
        return error
    raise AssertionError


def arrived(error: BaseException, limit: int = 1 << 30) -> BaseException:
    """What the caller raises when user code raised `error`."""
    kind, body = errors.encode(error, method="predict", actor_id=ACTOR, limit=limit)
    assert len(body) <= limit
    return errors.raisable(errors.decode(kind, body))


class NeedsArguments(Exception):
    def __init__(self, code: int, *, message: str) -> None:
        super().__init__(f"{code}: {message}")


class NoArguments(Exception):
    def __init__(self) -> None:
        super().__init__("fixed text")


class HoldsLock(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class BrokenText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class BreaksPickling(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("not today")


class LoadsAsSomethingElse(Exception):
    def __reduce__(self) -> Any:
        return str, ("not an exception",)


class Final(Exception):
    def __init_subclass__(cls) -> None:
        raise TypeError("cannot be subclassed")


class Own(BaseException):
    pass


@pytest.mark.parametrize(
    "error", [ValueError("plain"), KeyError("k"), OSError(2, "gone"), TimeoutError("t"), Own("own")]
)
def test_the_error_is_of_its_own_class_and_a_ray_task_error(error):
    raised = arrived(thrown(error))
    assert isinstance(raised, type(error))
    assert isinstance(raised, RayTaskError)
    assert raised.cause.args == error.args


def test_the_text_is_the_remote_traceback_without_our_frames():
    text = str(arrived(thrown(ValueError("plain"))))
    assert "deep_user_frame" in text
    assert "ValueError: plain" in text
    assert ".predict()" in text
    assert ACTOR in text
    assert "ray_serve_grpc/server.py" not in text


def test_causes_are_in_the_text():
    def chained() -> Exception:
        try:
            raise ZeroDivisionError("the root")
        except ZeroDivisionError as root:
            outer = KeyError("outer")
            outer.__cause__ = root
            return outer

    raised = arrived(thrown(chained))
    assert isinstance(raised, KeyError)
    assert "the root" in str(raised)


def test_causes_are_in_the_text_although_rays_replica_hides_them():
    def chained() -> None:
        try:
            raise ZeroDivisionError("the root")
        except ZeroDivisionError as root:
            raise KeyError("outer") from root

    def as_rays_replica_raises_it() -> None:
        try:
            chained()
        except KeyError as error:
            user_exception = error
        raise user_exception from None

    with pytest.raises(KeyError) as caught:
        as_rays_replica_raises_it()
    raised = arrived(caught.value)
    assert caught.value.__suppress_context__
    assert "the root" in str(raised)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: NeedsArguments(7, message="seven"), "seven"),
        (NoArguments, "fixed text"),
        (lambda: urllib.error.HTTPError("u", 404, "nope", {}, None), "404"),
        (lambda: LoadsAsSomethingElse("odd"), "odd"),
    ],
)
def test_a_class_that_cannot_be_made_again_leaves_its_text(make, text):
    raised = arrived(thrown(make))
    assert isinstance(raised, UnserializableException)
    assert isinstance(raised, RayTaskError)
    assert text in str(raised)
    assert "deep_user_frame" in str(raised)


@pytest.mark.parametrize("make", [lambda: HoldsLock("locked"), lambda: BreaksPickling("locked")])
def test_an_unpicklable_error_leaves_its_text(make):
    raised = arrived(thrown(make))
    assert isinstance(raised, RayTaskError)
    assert "locked" in str(raised)
    assert "deep_user_frame" in str(raised)


def test_a_class_of_a_module_that_the_caller_does_not_have(monkeypatch):
    module = types.ModuleType("only_at_the_replica")
    exec("class Unknown(Exception): pass", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    kind, body = errors.encode(thrown(module.Unknown("far away")), method="m", actor_id=ACTOR, limit=MIB)
    monkeypatch.delitem(sys.modules, module.__name__)
    raised = errors.raisable(errors.decode(kind, body))
    assert isinstance(raised, UnserializableException)
    assert "far away" in str(raised)


def test_a_class_without_a_text():
    raised = arrived(thrown(lambda: BrokenText("x")))
    assert isinstance(raised, BrokenText)
    assert "BrokenText" in str(raised)


def test_a_class_that_cannot_be_subclassed():
    raised = arrived(thrown(lambda: Final("final")))
    assert type(raised) is RayTaskError
    assert isinstance(raised.cause, Final)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with 3.11")
def test_exception_groups():
    group = builtins.ExceptionGroup
    raised = arrived(thrown(lambda: group("several", [ValueError("a"), KeyError("b")])))
    assert isinstance(raised, group)
    assert [type(inner) for inner in raised.exceptions] == [ValueError, KeyError]


@pytest.mark.parametrize(
    "error",
    [
        StopIteration("v"),
        StopAsyncIteration("v"),
        GeneratorExit("v"),
        asyncio.CancelledError("v"),
        SystemExit(3),
        KeyboardInterrupt("v"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_control_flow_of_user_code_does_not_act_on_the_caller(error):
    raised = arrived(thrown(error))
    assert type(raised) is RayTaskError
    assert isinstance(raised.cause, type(error))
    assert type(error).__name__ in str(raised)


@pytest.mark.parametrize(
    "error",
    [
        BackPressureError(4, 3),
        DeploymentUnavailableError("D"),
        RequestCancelledError("r"),
        gRPCStatusError(ValueError("inner")),
        RayServeException("text"),
        ActorDiedError(),
        ActorUnavailableError("away", None),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_serve_keep_their_class_over_two_hops(error):
    once = arrived(thrown(error))
    twice = arrived(thrown(once))
    for raised in (once, twice):
        assert isinstance(raised, type(error))
    assert type(twice.cause) is type(error)
    assert str(twice).count("deep_user_frame") >= 2


def test_an_error_over_two_hops_is_not_wrapped_twice():
    twice = arrived(thrown(arrived(thrown(ValueError("root")))))
    assert type(twice.cause) is ValueError
    assert type(twice).__name__ == "RayTaskError(ValueError)"


def test_the_raised_error_can_be_pickled_like_any_of_rays():
    raised = arrived(thrown(ValueError("plain")))
    again = pickle.loads(cloudpickle.dumps(raised))
    assert isinstance(again, ValueError)


def test_a_long_message_arrives_whole_below_the_limit():
    raised = arrived(thrown(ValueError("m" * (6 * MIB))))
    assert isinstance(raised, ValueError)
    assert len(raised.cause.args[0]) == 6 * MIB


def test_a_message_over_the_limit_is_cut_and_says_so():
    kind, body = errors.encode(thrown(ValueError("m" * MIB)), method="m", actor_id=ACTOR, limit=20_000)
    assert kind == _native.KIND_ERROR_TEXT
    assert len(body) <= 20_000
    raised = errors.raisable(errors.decode(kind, body))
    assert isinstance(raised, RayError)
    assert "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE=20000" in str(raised)
    assert "deep_user_frame" in str(raised)


def test_a_message_that_is_not_unicode():
    raised = arrived(thrown(ValueError("\udc80 surrogate")), limit=2000)
    assert isinstance(raised, RayTaskError)


def test_an_error_in_an_unknown_form_still_is_an_error():
    raised = errors.raisable(errors.decode(_native.KIND_ERROR, pickle.dumps(("of", "another", "version"))))
    assert isinstance(raised, RayTaskError)
    assert "cannot be read here" in str(raised)


def test_each_raise_is_a_fresh_exception():
    kind, body = errors.encode(thrown(ValueError("x")), method="m", actor_id=ACTOR, limit=MIB)
    for decoded in (errors.decode(kind, body), errors.decode(_native.KIND_ERROR_TEXT, b"text")):
        first, second = errors.raisable(decoded), errors.raisable(decoded)
        assert first is not second
        assert str(first) == str(second)


# For a caller without the plugin.


@pytest.mark.parametrize("error", [ValueError("plain"), BackPressureError(1, 2)])
def test_a_stock_caller_gets_a_ray_task_error(error):
    data = errors.encode_stock(thrown(error), method="m", actor_id=ACTOR)
    raised = cloudpickle.loads(data).as_instanceof_cause()
    assert isinstance(raised, type(error))


@pytest.mark.parametrize(
    "make",
    [lambda: NeedsArguments(1, message="text"), lambda: HoldsLock("text"), lambda: asyncio.CancelledError("text")],
)
def test_a_stock_caller_gets_the_text_of_what_it_cannot_raise(make):
    raised = cloudpickle.loads(errors.encode_stock(thrown(make), method="m", actor_id=ACTOR)).as_instanceof_cause()
    assert isinstance(raised, RayTaskError)
    assert not isinstance(raised, asyncio.CancelledError)
    assert "text" in str(raised)


# Our own.


def test_the_texts_about_sizes_name_the_setting_and_both_sizes():
    for error in (errors.request_too_large(500, 100, "replica x"), errors.response_too_large(500, 100)):
        assert "500 bytes" in str(error)
        assert "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE=100" in str(error)
        assert isinstance(error, ValueError)
    assert "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE" in str(errors.message_refused("replica x", "9 > 8"))


@pytest.mark.parametrize(
    "cls", [errors.UnknownSerialization, errors.MissingLibrary, errors.NotSerializable, errors.MessageTooLarge]
)
def test_our_errors_travel(cls):
    raised = arrived(thrown(cls("because")))
    assert isinstance(raised, cls)
    assert str(raised.cause) == "because"


def test_a_failed_call_keeps_its_code():
    again = pickle.loads(pickle.dumps(errors.CallFailed("text", 13)))
    assert (str(again), again.code) == ("text", 13)


def test_unavailable_names_the_actor():
    actor_id = ray.ActorID(b"\x01" * 16)
    error = errors.unavailable(actor_id.binary(), "replica x", "connection refused", "See whether it is alive")
    assert isinstance(error, ActorUnavailableError)
    assert error.actor_id == actor_id.hex()
    assert "connection refused" in str(error)


def test_an_unreadable_answer_is_a_system_error_with_the_reason():
    error = errors.unreadable(thrown(ModuleNotFoundError("No module named 'x'")))
    assert isinstance(error, RaySystemError)
    assert "No module named 'x'" in str(error)
    assert error.client_exc.__traceback__ is None
