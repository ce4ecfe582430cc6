"""Errors of user code, whatever their class does to pickle, as the actor path brings them to the caller."""

from __future__ import annotations

import asyncio
import builtins
import sys
import threading
import types
import urllib.error
from typing import Any, NoReturn

import pytest
import ray
from harness import Cluster, collect, deployment, outcome, outcome_async, same_as_actor


class NeedsArguments(Exception):
    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code


class TakesNoArguments(Exception):
    def __init__(self) -> None:
        super().__init__("fixed text")


class HoldsLock(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class BrokenText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("this class cannot be printed")

    __repr__ = __str__


class CarriesState(ValueError):
    def __init__(self, message: str, rows: list[int]) -> None:
        super().__init__(message, rows)
        self.rows = rows


class BrokenReduce(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("this class refuses to be pickled")


class BrokenLoad(Exception):
    def __reduce__(self) -> Any:
        return _refuse_to_load, ("loads nowhere",)


def _refuse_to_load(_text: str) -> Any:
    raise ImportError("this class cannot be loaded")


def of_unknown_module() -> Exception:
    """An error of a module that exists in this process only."""
    module = types.ModuleType("module_of_the_replica_alone")
    exec("class Private(Exception): pass", module.__dict__)
    sys.modules[module.__name__] = module
    return module.Private("private words")  # type: ignore[no-any-return]


def with_cause() -> NoReturn:
    try:
        raise ZeroDivisionError("the root")
    except ZeroDivisionError as root:
        raise KeyError("the leaf") from root


def group() -> Exception:
    """An error of errors, where Python has them."""
    kind = getattr(builtins, "ExceptionGroup", None)
    return kind("several", [ValueError("one"), KeyError("two")]) if kind else ValueError("several")


#: name -> (how to make the error, texts that have to reach the caller)
ZOO: dict[str, tuple[Any, tuple[str, ...]]] = {
    "value": (lambda: ValueError("plain words"), ("plain words", "marked_frame")),
    "key": (lambda: KeyError("missing key"), ("missing key",)),
    "needs arguments": (lambda: NeedsArguments(7, reason="seven"), ("7: seven",)),
    "takes no arguments": (TakesNoArguments, ("fixed text",)),
    "holds a lock": (lambda: HoldsLock("locked words"), ("locked words", "HoldsLock")),
    "broken text": (lambda: BrokenText("x"), ("BrokenText",)),
    "carries state": (lambda: CarriesState("bad rows", [1, 2]), ("bad rows",)),
    "broken reduce": (lambda: BrokenReduce("reduced words"), ("reduced words",)),
    "broken load": (lambda: BrokenLoad("loading words"), ("loading words",)),
    "unknown module": (of_unknown_module, ("private words",)),
    "http": (lambda: urllib.error.HTTPError("u", 404, "nope", {}, None), ("404",)),  # type: ignore[arg-type]
    "unicode": (lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "odd byte"), ("odd byte",)),
    "cause": (with_cause, ("the leaf", "ZeroDivisionError", "the root")),
    "group": (lambda: group(), ("several",)),
    "big": (lambda: ValueError("m" * (6 << 20)), ("m" * 1000,)),
    "stop iteration": (lambda: StopIteration("stopped"), ()),
    "stop async iteration": (lambda: StopAsyncIteration("stopped"), ()),
    "timeout": (lambda: TimeoutError("user timeout"), ("user timeout",)),
    "assertion": (lambda: AssertionError("claim"), ("claim",)),
    "keyboard": (lambda: OSError(5, "disk words", "file"), ("disk words",)),
}


@deployment
class Raiser:
    def sync(self, name: str) -> None:
        def marked_frame() -> None:
            raise ZOO[name][0]()

        marked_frame()

    async def asynchronous(self, name: str) -> None:
        self.sync(name)

    def stream(self, name: str) -> Any:
        yield 1
        self.sync(name)

    async def stream_async(self, name: str) -> Any:
        yield 1
        self.sync(name)

    async def cancelled(self) -> None:
        raise asyncio.CancelledError("the user's own")

    def task_error(self) -> None:
        @ray.remote(num_cpus=0)
        def fails() -> None:
            raise ValueError("in a task")

        ray.get(fails.remote())

    def unpicklable_result(self) -> Any:
        return threading.Lock()

    def unpicklable_item(self) -> Any:
        yield 1
        yield threading.Lock()
        yield 2

    def unpicklable_argument_default(self, value: Any) -> Any:
        return value

    def fine(self) -> str:
        return "fine"


@deployment
class Relay:
    """One hop more: errors have to keep their class from the innermost replica."""

    def __init__(self, raiser: Any) -> None:
        self._raiser = raiser

    async def relay(self, name: str) -> None:
        await self._raiser.sync.remote(name)

    async def caught(self, name: str) -> Any:
        return await outcome_async(self._raiser.asynchronous.remote(name), contains=ZOO[name][1])

    async def relay_stream(self, name: str) -> Any:
        async for item in self._raiser.options(stream=True).stream_async.remote(name):
            yield item


def raisers() -> Any:
    return Relay.bind(Raiser.bind())


def unary(cluster: Cluster, method: str, name: str) -> Any:
    handle = cluster.handle("Raiser", raisers)
    return outcome(lambda: getattr(handle, method).remote(name).result(timeout_s=30), contains=ZOO[name][1])


def streamed(handle: Any, method: str, name: str) -> Any:
    return list(collect(handle.options(stream=True, method_name=method).remote(name), contains=ZOO[name][1]))


def tells_as_much(actor: Any, ours: Any) -> bool:
    """Whether ours is caught by all that catches the actor path's error and shows all that it shows.

    Where the actor path gives up (`UnserializableException`, causes that are not shown) ours may tell more.
    """
    if isinstance(actor, list):
        return len(actor) == len(ours) and all(map(tells_as_much, actor, ours))
    if not isinstance(actor, dict):
        return bool(actor == ours)
    same_class = actor["type"] == ours["type"] or actor["type"] == "UnserializableException"
    return same_class and all(set(actor[part]) <= set(ours[part]) for part in ("caught by", "shows"))


# Ray's own gRPC path is left out here: it loses classes, frames and whole errors. What is wrong with it is not ours.
@pytest.mark.parametrize("name", ZOO)
@same_as_actor(stock=False, agrees=tells_as_much)
def test_an_error_arrives_as_on_the_actor_path(cluster: Cluster, name: str) -> Any:
    return [unary(cluster, "sync", name), unary(cluster, "asynchronous", name)]


@pytest.mark.parametrize("name", ["value", "needs arguments", "holds a lock", "cause", "stop iteration", "broken load"])
@same_as_actor(stock=False, agrees=tells_as_much)
def test_an_error_in_a_stream_arrives_after_the_items_before_it(cluster: Cluster, name: str) -> Any:
    handle = cluster.handle("Raiser", raisers)
    return [streamed(handle, "stream", name), streamed(handle, "stream_async", name)]


@pytest.mark.parametrize("name", ["value", "needs arguments", "holds a lock", "carries state"])
@same_as_actor(stock=False, agrees=tells_as_much)
def test_an_error_keeps_its_class_through_two_hops(cluster: Cluster, name: str) -> Any:
    relay = cluster.app(raisers)
    return [
        outcome(lambda: relay.relay.remote(name).result(timeout_s=30), contains=ZOO[name][1]),
        relay.caught.remote(name).result(timeout_s=30),
        streamed(relay, "relay_stream", name),
    ]


@same_as_actor(native_only=True, expect=["the leaf", "ZeroDivisionError", "the root"])
def test_the_cause_of_an_error_is_shown(cluster: Cluster) -> Any:
    return unary(cluster, "sync", "cause")["shows"]


@same_as_actor(expect=["bad rows", [1, 2]], stock=False)
def test_attributes_of_an_error_are_readable_at_its_cause(cluster: Cluster) -> Any:
    handle = cluster.handle("Raiser", raisers)
    try:
        handle.sync.remote("carries state").result(timeout_s=20)
    except CarriesState as error:
        cause = error.cause  # type: ignore[attr-defined]
        return [cause.args[0], cause.rows]


@same_as_actor(stock=False, expect=lambda outcome: "CancelledError" not in outcome["caught by"] and outcome["shows"])
def test_a_cancellederror_that_user_code_raised_is_not_the_callers_cancel(cluster: Cluster) -> Any:
    handle = cluster.handle("Raiser", raisers)
    return outcome(lambda: handle.cancelled.remote().result(timeout_s=20), contains=("CancelledError", "ancelled"))


@same_as_actor(stock=False)
def test_an_error_of_a_ray_task_comes_through_whole(cluster: Cluster) -> Any:
    handle = cluster.handle("Raiser", raisers)
    return outcome(lambda: handle.task_error.remote().result(timeout_s=30), contains=("in a task",))


@same_as_actor(expect=[True, True, "fine"])
def test_a_result_that_cannot_be_pickled_is_a_clear_error(cluster: Cluster) -> Any:
    handle = cluster.handle("Raiser", raisers)
    described = outcome(lambda: handle.unpicklable_result.remote().result(timeout_s=20), contains=("lock",))
    return ["TypeError" in described["caught by"], bool(described["shows"]), handle.fine.remote().result(timeout_s=20)]


@same_as_actor(expect=[[1], True, "fine"], stock=False)
def test_an_item_that_cannot_be_pickled_ends_its_stream_with_a_clear_error(cluster: Cluster) -> Any:
    handle = cluster.handle("Raiser", raisers)
    items, error = collect(handle.options(stream=True).unpicklable_item.remote(), contains=("lock",))
    return [items, error is not None and bool(error["shows"]), handle.fine.remote().result(timeout_s=20)]


@same_as_actor(expect=[True, "fine"])
def test_an_argument_that_cannot_be_pickled_is_refused_at_the_caller(cluster: Cluster) -> Any:
    handle = cluster.handle("Raiser", raisers)
    response = handle.unpicklable_argument_default.remote(threading.Lock())
    described = outcome(lambda: response.result(timeout_s=20), contains=("lock",))
    return ["TypeError" in described["caught by"], handle.fine.remote().result(timeout_s=20)]


@same_as_actor(expect="fine")
def test_the_replica_survived_all_of_it(cluster: Cluster) -> Any:
    return cluster.handle("Raiser", raisers).fine.remote().result(timeout_s=20)
