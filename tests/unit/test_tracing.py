"""Spans of calls between two ends in one process, as OpenTelemetry's SDK exports them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from fakes import FakeReplica, metadata, pending
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from ray_serve_grpc import tracing
from ray_serve_grpc.client import gRPCReplicaWrapper
from ray_serve_grpc.seam import adapter
from ray_serve_grpc.server import ReplicaServer


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Tracing is on, as Serve switches it on."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_tracer", lambda: provider.get_tracer("test"))
    monkeypatch.setattr(adapter, "tracing_is_on", lambda: True)
    yield exporter
    provider.shutdown()


class Seen:
    """User code that tells which span it runs in."""

    def __init__(self) -> None:
        self.context: trace.SpanContext | None = None
        self.started = asyncio.Event()

    async def __call__(self, what: str) -> Any:
        self.context = trace.get_current_span().get_span_context()
        self.started.set()
        if what == "fail":
            raise ValueError("words of user code")
        if what == "hold":
            await asyncio.sleep(60)
        return what


@asynccontextmanager
async def both_ends(
    user_code: Any, folder: Any, *, accepts: bool = True, lane: str = "unix"
) -> AsyncIterator[gRPCReplicaWrapper]:
    actor_id = ray.ActorID(os.urandom(16))
    path = str(folder / "r.sock")
    server = ReplicaServer(
        FakeReplica(user_code, accepts=accepts),
        host="127.0.0.1",
        unix_path=path,
        identity=actor_id.hex(),
        authorization=None,
    )
    port = await server.start()
    endpoint = f"unix:{path}" if lane == "unix" else f"tcp:127.0.0.1:{port}"
    wrapper = gRPCReplicaWrapper(actor_id, [endpoint], deployment="Model")
    try:
        yield wrapper
    finally:
        wrapper.close()
        await server.stop(1.0)


async def spans(exporter: InMemorySpanExporter, count: int) -> tuple[Any, Any]:
    """(the caller's span, the replica's) once `count` spans have ended."""
    for _ in range(2000):
        if len(exporter.get_finished_spans()) >= count:
            break
        await asyncio.sleep(0.01)
    ended = exporter.get_finished_spans()
    assert len(ended) == count
    by_kind = {span.kind: span for span in ended}
    return by_kind[SpanKind.CLIENT], by_kind.get(SpanKind.SERVER)


async def test_a_call_has_a_span_at_each_end_and_user_code_runs_within_them(exporter, tmp_path):
    user_code = Seen()
    with trace.use_span(trace.NonRecordingSpan(CALLER)):
        async with both_ends(user_code, tmp_path) as wrapper:
            result = wrapper.send_request_python(pending("fine"), with_rejection=True)
            assert await result.get_async() == "fine"
            client, server = await spans(exporter, 2)
    assert client.parent.span_id == CALLER.span_id
    assert server.parent.span_id == client.context.span_id
    assert user_code.context.span_id == server.context.span_id
    assert {client.context.trace_id, server.context.trace_id} == {CALLER.trace_id}


@pytest.mark.parametrize("lane", ["unix", "tcp"])
async def test_spans_carry_the_attributes_of_the_conventions_for_rpc(exporter, tmp_path, lane):
    async with both_ends(Seen(), tmp_path, lane=lane) as wrapper:
        await wrapper.send_request_python(pending("fine"), with_rejection=True).get_async()
        client, server = await spans(exporter, 2)
    expected = {
        "rpc.system": "grpc",
        "rpc.service": "ray_serve_grpc.v1.InterDeploymentService",
        "rpc.method": "HandleRequestWithRejection",
        "rpc.grpc.status_code": 0,
        "network.transport": lane,
        "ray.serve.request_id": "request-1",
        "ray.serve.call_method": "method",
    }
    assert expected.items() <= dict(client.attributes).items()
    assert expected.items() <= dict(server.attributes).items()
    assert client.name == server.name == "ray_serve_grpc.v1.InterDeploymentService/HandleRequestWithRejection"
    assert client.attributes["ray.serve.deployment"] == "Model"
    assert client.attributes["ray.serve.accepted"] is True
    if lane == "unix":
        assert client.attributes["network.peer.address"] == str(tmp_path / "r.sock")
    else:
        assert client.attributes["network.peer.address"] == server.attributes["network.peer.address"] == "127.0.0.1"
        assert client.attributes["server.port"] == client.attributes["network.peer.port"]


async def test_an_error_of_user_code_is_recorded_by_the_replica(exporter, tmp_path):
    async with both_ends(Seen(), tmp_path) as wrapper:
        with pytest.raises(ValueError, match="words of user code"):
            await wrapper.send_request_python(pending("fail"), with_rejection=True).get_async()
        client, server = await spans(exporter, 2)
    assert server.status.status_code is StatusCode.ERROR
    assert "words of user code" in server.events[0].attributes["exception.message"]
    assert client.attributes["rpc.grpc.status_code"] == 0


async def test_a_cancelled_call_ends_both_spans_with_its_status(exporter, tmp_path):
    user_code = Seen()
    async with both_ends(user_code, tmp_path) as wrapper:
        result = wrapper.send_request_python(pending("hold"), with_rejection=True)
        await asyncio.wait_for(user_code.started.wait(), 20)
        result.cancel()
        client, server = await spans(exporter, 2)
    assert client.attributes["rpc.grpc.status_code"] == server.attributes["rpc.grpc.status_code"] == 1


async def test_a_rejected_attempt_says_so(exporter, tmp_path):
    async with both_ends(Seen(), tmp_path, accepts=False) as wrapper:
        result = wrapper.send_request_python(pending("fine"), with_rejection=True)
        assert not (await result.get_rejection_response()).accepted
        client, _ = await spans(exporter, 2)
    assert client.attributes["ray.serve.accepted"] is False


async def test_each_attempt_is_a_child_of_the_caller_and_not_of_the_attempt_before(exporter, tmp_path):
    request = pending("fine", about=metadata(tracing_context={"traceparent": TRACEPARENT}))
    async with both_ends(Seen(), tmp_path) as wrapper:
        for _ in range(2):
            await wrapper.send_request_python(request, with_rejection=True).get_async()
        await spans(exporter, 4)
    parents = [span.parent.span_id for span in exporter.get_finished_spans() if span.kind is SpanKind.CLIENT]
    assert parents == [CALLER.span_id] * 2
    assert request.metadata.tracing_context == {"traceparent": TRACEPARENT}


async def test_a_request_that_cannot_be_serialised_ends_its_span_with_the_error(exporter, tmp_path):
    async with both_ends(Seen(), tmp_path) as wrapper:
        await wrapper.send_request_python(pending("fine"), with_rejection=True).get_async()
        await spans(exporter, 2)
        exporter.clear()
        with pytest.raises(Exception, match="serial"):
            wrapper.send_request_python(pending(asyncio.get_running_loop()), with_rejection=True)
        client, _ = await spans(exporter, 1)
    assert client.status.status_code is StatusCode.ERROR


async def test_a_replica_takes_the_context_of_the_grpc_metadata_where_the_request_has_none(exporter):
    call = SimpleNamespace(
        traceparent=TRACEPARENT, peer="tcp:127.0.0.1:4", lane="tcp", method=2, dialect=0, cancelled=False
    )
    about = metadata()

    async def serve() -> None:
        tracing.begin(about)

    await tracing.serving(call, serve())
    (span,) = exporter.get_finished_spans()
    assert (span.parent.trace_id, span.parent.span_id) == (CALLER.trace_id, CALLER.span_id)
    assert span.attributes["network.peer.port"] == 4
    assert about.tracing_context["traceparent"].split("-")[2] == f"{span.context.span_id:016x}"


async def test_nothing_is_made_for_a_call_while_tracing_is_off(tmp_path, monkeypatch):
    monkeypatch.setattr(tracing, "ClientSpan", None)
    monkeypatch.setattr(tracing, "serving", None)
    monkeypatch.setattr(tracing, "begin", None)
    request = pending("fine")
    async with both_ends(Seen(), tmp_path) as wrapper:
        assert await wrapper.send_request_python(request, with_rejection=True).get_async() == "fine"
    assert (request.kwargs, request.metadata.tracing_context) == ({}, None)


CALLER = trace.SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=trace.TraceFlags(1))
TRACEPARENT = f"00-{CALLER.trace_id:032x}-{CALLER.span_id:016x}-01"
