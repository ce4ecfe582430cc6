"""Spans of calls, by OpenTelemetry, while Ray's or Serve's tracing is on.

Imported only then. The caller's span is the parent of the replica's, and that one of whatever Serve and user code
begin there. The context travels in the request's metadata, where Serve looks for it, and as the header
`traceparent`, where other gRPC libraries do.
"""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Coroutine, MutableMapping
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ray_serve_grpc import _native
from ray_serve_grpc.seam import adapter

if TYPE_CHECKING:
    from ray_serve_grpc._native import ServerCall
    from ray_serve_grpc.channels import Peer
    from ray_serve_grpc.result import gRPCReplicaResult

METHODS = (
    "HandleRequest",
    "HandleRequestStreaming",
    "HandleRequestWithRejection",
    "HandleRequestWithRejectionStreaming",
)
SERVICES = ("ray_serve_grpc.v1.InterDeploymentService", "ray.serve.ASGIService")

_propagator = TraceContextTextMapPropagator()


def context_of(carrier: dict[str, str] | None) -> Context | None:
    """The context that a carrier names; None for the present one."""
    return _propagator.extract(carrier) if carrier else None


class ClientSpan:
    """The caller's side of one attempt to have a request served."""

    def __init__(self, peer: Peer, metadata: Any, kwargs: MutableMapping[str, Any] | None, method: int) -> None:
        """Args:
        kwargs: of the request, which get Ray's own trace context; None where the serialization takes none.
        """
        self._peer = peer
        self._method = method
        self._owner: Any = None
        self._kept: gRPCReplicaResult | None = None
        self._span = _tracer().start_span(
            f"{SERVICES[0]}/{METHODS[method]}",
            context_of(getattr(metadata, "tracing_context", None)),
            SpanKind.CLIENT,
            attributes=attributes(method, _native.DIALECT_NATIVE) | request_attributes(metadata, peer.deployment),
        )
        context = trace.set_span_in_context(self._span)
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, context)
        self.traceparent = carrier.get("traceparent")
        # A router that tries again hands in the same metadata: what is sent along is this attempt's own.
        self.metadata = copy.copy(metadata)
        self.metadata.tracing_context = carrier
        if kwargs is not None:
            token = attach(context)
            try:
                adapter.inject_trace_context(kwargs)
            finally:
                detach(token)

    def follow(self, result: gRPCReplicaResult) -> None:
        """Ends with the call of `result`. A stream is not kept alive: whoever lets go of it wants no more of it."""
        self._owner = result.completion.owner
        self._kept = None if result._streaming else result
        result.completion.add(self._end)

    def fail(self, error: BaseException) -> None:
        """Nothing was sent."""
        failed(self._span, error)
        self._span.end()

    def _end(self, outcome: Any) -> None:
        span = self._span
        result = self._owner()
        self._kept = None
        call = None if result is None else result._call
        if call is None:
            # A stream that was let go of: nobody can tell whether it had come to its end.
            for name, value in reached(self._peer.endpoints, self._peer.channel.lane).items():
                span.set_attribute(name, value)
        else:
            code = (call.status() or (_native.STATUS_CANCELLED, ""))[0]
            span.set_attribute("rpc.grpc.status_code", code)
            for name, value in reached(self._peer.endpoints, call.lane).items():
                span.set_attribute(name, value)
            admitted = call.admission()
            if admitted is not None:
                span.set_attribute("ray.serve.accepted", admitted[0])
            if result._dialect == _native.DIALECT_STOCK:
                span.update_name(f"{SERVICES[_native.DIALECT_STOCK]}/{METHODS[self._method]}")
                span.set_attribute("rpc.service", SERVICES[_native.DIALECT_STOCK])
        if isinstance(outcome, BaseException):
            span.set_status(Status(StatusCode.ERROR, str(outcome)))
        span.end()


class _ServerSpan:
    """The replica's side of a call; begins when the request's metadata is known."""

    def __init__(self, call: ServerCall) -> None:
        self.call = call
        self.span: trace.Span | None = None


_serving: contextvars.ContextVar[_ServerSpan | None] = contextvars.ContextVar("ray_serve_grpc_span", default=None)


async def serving(call: ServerCall, task: Coroutine[Any, Any, None]) -> None:
    """Runs `task`, which serves `call`, within a span."""
    state = _ServerSpan(call)
    _serving.set(state)
    try:
        await task
    finally:
        if state.span is not None:
            code = _native.STATUS_CANCELLED if call.cancelled else _native.STATUS_OK
            state.span.set_attribute("rpc.grpc.status_code", code)
            state.span.end()


def begin(metadata: Any) -> None:
    """The request that is being served here is known: its span begins, as the parent of all that follows."""
    state = _serving.get()
    if state is None:
        return
    call = state.call
    carrier = getattr(metadata, "tracing_context", None) or (
        {"traceparent": call.traceparent} if call.traceparent else None
    )
    peer_address, _, peer_port = call.peer.partition(":")[2].rpartition(":") if call.lane == "tcp" else ("", "", "")
    known = attributes(call.method, call.dialect) | request_attributes(metadata, None)
    known["network.transport"] = call.lane
    if peer_address:
        known |= {"network.peer.address": peer_address.strip("[]"), "network.peer.port": int(peer_port)}
    state.span = _tracer().start_span(
        f"{SERVICES[call.dialect]}/{METHODS[call.method]}", context_of(carrier), SpanKind.SERVER, attributes=known
    )
    # The task has a context of its own, which ends with it.
    context = trace.set_span_in_context(state.span)
    attach(context)
    metadata.tracing_context = {}
    _propagator.inject(metadata.tracing_context, context)


def fail(error: BaseException) -> None:
    """The call that is being served here has failed with `error`."""
    state = _serving.get()
    if state is not None and state.span is not None:
        failed(state.span, error)


def failed(span: trace.Span, error: BaseException) -> None:
    span.record_exception(error)
    span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))


def attributes(method: int, dialect: int) -> dict[str, Any]:
    """Of the semantic conventions for RPC."""
    return {"rpc.system": "grpc", "rpc.service": SERVICES[dialect], "rpc.method": METHODS[method]}


def request_attributes(metadata: Any, deployment: str | None) -> dict[str, Any]:
    known = {"ray.serve.request_id": metadata.request_id, "ray.serve.call_method": metadata.call_method}
    return known | ({"ray.serve.deployment": deployment} if deployment else {})


def reached(endpoints: tuple[str, ...], lane: str) -> dict[str, Any]:
    """Where a call went."""
    endpoint = next((entry for entry in endpoints if entry.startswith(f"{lane}:")), None)
    if not lane or endpoint is None:
        return {}
    address = endpoint.partition(":")[2]
    if lane == "unix":
        return {"network.transport": "unix", "network.peer.address": address, "server.address": address}
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    return {
        "network.transport": "tcp",
        "network.peer.address": host,
        "network.peer.port": int(port),
        "server.address": host,
        "server.port": int(port),
    }


def _tracer() -> trace.Tracer:
    return trace.get_tracer("ray_serve_grpc", _native.__version__)
