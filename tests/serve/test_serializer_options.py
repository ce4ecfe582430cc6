"""`request_serialization` and `response_serialization` of a handle."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from harness import Cluster, collect, deployment, outcome, same_as_actor

METHODS = ("cloudpickle", "pickle", "msgpack", "orjson", "noop")
#: For every method, a value that it can carry.
VALUES: dict[str, Any] = {
    "cloudpickle": {"set": {1, 2}, "nested": [(1, "a")]},
    "pickle": {"set": {1, 2}, "nested": [(1, "a")]},
    "msgpack": {"list": [1, "a", 2.5, None], "bytes": b"\x00\x01"},
    "orjson": {"list": [1, "a", 2.5, None]},
    "noop": b"\x00raw\xff",
}


@deployment
class Echo:
    def echo(self, value: Any) -> Any:
        return value

    def reply(self, _value: Any, wanted: str) -> Any:
        return VALUES[wanted]

    def default_reply(self, _value: Any) -> Any:
        return VALUES["noop"]

    def keyword(self, *, value: Any) -> Any:
        return value

    def bad(self, _value: Any = None) -> None:
        raise ValueError("words of the user's error")

    def stream(self, value: Any) -> Any:
        for _ in range(3):
            yield value

    def bad_stream(self, value: Any) -> Any:
        yield value
        raise ValueError("words of the user's error")

    def wrong_type(self, _value: Any = None) -> Any:
        return object()


def echoes() -> Any:
    return Echo.bind()


@pytest.mark.parametrize(("request_method", "response_method"), list(itertools.product(METHODS, METHODS)))
@same_as_actor(native_only=True, expect=lambda outcome: outcome["failed"] == [])
def test_each_pair_of_methods_round_trips(cluster: Cluster, request_method: str, response_method: str) -> Any:
    handle = cluster.app(echoes).options(request_serialization=request_method, response_serialization=response_method)
    failed = []
    value, wanted = VALUES[request_method], VALUES[response_method]
    if request_method == "noop":
        # Only positional bytes can be sent, so the callee cannot be told what to return.
        if response_method in ("noop", "cloudpickle", "pickle", "msgpack"):
            got = outcome(lambda: handle.default_reply.remote(value).result(timeout_s=20))
            failed += [] if bytes(got) == VALUES["noop"] else [got]
    else:
        got = outcome(lambda: handle.reply.remote(value, response_method).result(timeout_s=20))
        got = bytes(got) if response_method == "noop" and not isinstance(got, dict) else got
        failed += [] if got == wanted else [got]
    error = outcome(lambda: handle.bad.remote(value).result(timeout_s=20), contains=("words of the user's error",))
    if error["caught by"] != ["RayError", "RayTaskError", "ValueError"] or not error["shows"]:
        failed.append(error)
    return {"failed": failed}


@pytest.mark.parametrize("method", ["cloudpickle", "pickle", "msgpack", "orjson"])
@same_as_actor(expect=[[1, "a"], [1, "a"], [[1, "a"]] * 3])
def test_a_method_carries_arguments_keywords_and_items(cluster: Cluster, method: str) -> Any:
    handle = cluster.app(echoes).options(request_serialization=method, response_serialization=method)
    return [
        handle.echo.remote([1, "a"]).result(timeout_s=20),
        handle.keyword.remote(value=[1, "a"]).result(timeout_s=20),
        list(handle.options(stream=True).stream.remote([1, "a"])),
    ]


@pytest.mark.parametrize("method", METHODS)
@same_as_actor(native_only=True, expect=[1, ["RayError", "RayTaskError", "ValueError"], 1])
def test_an_error_in_a_stream_keeps_its_class_with_every_response_method(cluster: Cluster, method: str) -> Any:
    stream = cluster.app(echoes).options(stream=True, response_serialization=method).bad_stream.remote(VALUES[method])
    items, error = collect(stream, contains=("words of the user's error",))
    return [len(items), error["caught by"], len(error["shows"])]


@same_as_actor(native_only=True, expect=[b"abc", b"", 5 << 20, [b"abc"] * 3])
def test_noop_carries_bytes_both_ways(cluster: Cluster) -> Any:
    handle = cluster.app(echoes).options(request_serialization="noop", response_serialization="noop")
    return [
        bytes(handle.echo.remote(b"abc").result(timeout_s=20)),
        bytes(handle.echo.remote(b"").result(timeout_s=20)),
        len(handle.echo.remote(b"x" * (5 << 20)).result(timeout_s=20)),
        [bytes(item) for item in handle.options(stream=True).stream.remote(b"abc")],
    ]


@same_as_actor(native_only=True, expect=[["TypeError", "bytes"], ["TypeError", "bytes"]])
def test_noop_refuses_what_is_not_bytes_at_the_caller(cluster: Cluster) -> Any:
    handle = cluster.app(echoes).options(request_serialization="noop")

    def refusal(call: Any) -> Any:
        error = outcome(lambda: call().result(timeout_s=20), contains=("bytes",))
        return [*[name for name in error["caught by"] if name == "TypeError"], *error["shows"]]

    return [refusal(lambda: handle.echo.remote([1])), refusal(lambda: handle.keyword.remote(value=b"x"))]


@same_as_actor(native_only=True, expect=[True, True, "still fine"])
def test_a_value_that_the_method_cannot_carry_is_a_clear_error_in_either_direction(cluster: Cluster) -> Any:
    handle = cluster.app(echoes)
    out = outcome(
        lambda: handle.options(request_serialization="orjson").echo.remote({1, 2}).result(timeout_s=20),
        contains=("orjson", "set"),
    )
    back = outcome(
        lambda: handle.options(response_serialization="orjson").wrong_type.remote().result(timeout_s=20),
        contains=("orjson", "object"),
    )
    after = handle.options(response_serialization="orjson").echo.remote("still fine").result(timeout_s=20)
    return ["TypeError" in out["caught by"] and bool(out["shows"]), bool(back["shows"]), after]


@pytest.mark.parametrize("option", ["request_serialization", "response_serialization"])
@same_as_actor(native_only=True, expect=["morse", "cloudpickle"])
def test_an_unknown_method_is_refused_with_the_known_ones(cluster: Cluster, option: str) -> Any:
    handle = cluster.app(echoes)
    error = outcome(
        lambda: handle.options(**{option: "morse"}).echo.remote(1).result(timeout_s=20),
        contains=("morse", "cloudpickle"),
    )
    return error["shows"] if "ValueError" in error["caught by"] else error


@same_as_actor(expect=[1, 1])
def test_method_names_ignore_case(cluster: Cluster) -> Any:
    handle = cluster.app(echoes)
    return [
        handle.options(request_serialization="Pickle").echo.remote(1).result(timeout_s=20),
        handle.options(response_serialization="MSGPACK").echo.remote(1).result(timeout_s=20),
    ]
