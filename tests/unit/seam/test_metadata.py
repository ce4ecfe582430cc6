"""Request metadata arrives as it was sent, whatever of it was set."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from typing import Any

import pytest

from ray_serve_grpc.seam.metadata import STRINGS, MetadataCodec
from ray_serve_grpc.seam.probe import Mismatch


class Protocol(str, Enum):
    UNDEFINED = "UNDEFINED"
    HTTP = "HTTP"


@dataclass
class Metadata:
    request_id: str
    internal_request_id: str
    call_method: str = "__call__"
    route: str = ""
    app_name: str = ""
    multiplexed_model_id: str = ""
    session_id: str = ""
    is_streaming: bool = False
    _client: str = ""
    _protocol: Protocol = Protocol.UNDEFINED
    tracing_context: dict[str, str] | None = None
    _by_reference: bool = True
    _on_separate_loop: bool = True
    request_serialization: str = "cloudpickle"
    response_serialization: str = "cloudpickle"
    _token: str | None = field(default=None)


def round_trip(sent: Any, receiver: type = Metadata) -> Any:
    strings, extra = MetadataCodec(type(sent)).to_wire(sent)
    assert all(type(text) is str for text in strings)
    assert len(strings) == len(STRINGS)
    return MetadataCodec(receiver).from_wire(strings, extra, is_streaming=sent.is_streaming)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"call_method": "predict", "route": "/r", "app_name": "app", "multiplexed_model_id": "m", "session_id": "s"},
        {"request_serialization": "noop", "response_serialization": "msgpack"},
        {"is_streaming": True},
        {"_client": "10.0.0.1:4711", "_protocol": Protocol.HTTP},
        {"tracing_context": {"traceparent": "00-1"}, "_token": "reserved"},
    ],
)
def test_it_arrives_as_it_was_sent(values):
    sent = Metadata("ünïque", "internal", _by_reference=False, **values)
    assert round_trip(sent) == sent


def test_a_plain_request_sends_only_its_strings():
    strings, extra = MetadataCodec(Metadata).to_wire(Metadata("a", "b", _by_reference=False))
    assert strings == ("a", "b", "", "", "", "", "", "", "")
    assert extra == b""


def test_how_the_callers_router_runs_is_not_sent():
    sent = Metadata("a", "b", _by_reference=False, _on_separate_loop=False)
    assert MetadataCodec(Metadata).to_wire(sent)[1] == b""
    assert round_trip(sent)._on_separate_loop


def test_fields_the_receiver_does_not_know_are_dropped():
    older = make_dataclass(
        "Older",
        [
            *(("request_id", str), ("internal_request_id", str)),
            *(("call_method", str, "__call__"), ("route", str, ""), ("app_name", str, "")),
            *(("is_streaming", bool, False), ("_by_reference", bool, True)),
        ],
    )
    got = round_trip(Metadata("a", "b", route="/r", session_id="s", _token="t", _by_reference=False), older)
    assert got.__dict__ == older("a", "b", route="/r", _by_reference=False).__dict__


def test_an_older_sender_leaves_the_receivers_defaults():
    older = make_dataclass(
        "Older",
        [
            *(("request_id", str), ("internal_request_id", str), ("call_method", str, "__call__")),
            *(("is_streaming", bool, False), ("_by_reference", bool, True)),
        ],
    )
    assert round_trip(older("a", "b", _by_reference=False)) == Metadata("a", "b", _by_reference=False)


def test_mutable_values_are_not_shared_between_requests():
    codec = MetadataCodec(Metadata)
    strings, extra = codec.to_wire(Metadata("a", "b", tracing_context={"k": "v"}, _by_reference=False))
    first, second = (codec.from_wire(strings, extra, is_streaming=False) for _ in range(2))
    assert first.tracing_context is not second.tracing_context


def test_the_extra_may_come_as_received_memory():
    strings, extra = MetadataCodec(Metadata).to_wire(Metadata("a", "b", _client="c", _by_reference=False))
    assert MetadataCodec(Metadata).from_wire(strings, memoryview(extra), is_streaming=False)._client == "c"
    assert pickle.loads(extra) == {"_client": "c"}


@dataclass
class Slotted:
    __slots__ = ("internal_request_id", "request_id")
    request_id: str
    internal_request_id: str


@pytest.mark.parametrize(
    "other", [Slotted, make_dataclass("Few", [("request_id", str), ("internal_request_id", str)]), int]
)
def test_a_class_of_another_shape_is_a_mismatch(other):
    with pytest.raises(Mismatch):
        MetadataCodec(other)
