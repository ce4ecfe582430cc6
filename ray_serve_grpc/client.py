"""The caller's side of a call: sends a request to a replica, in the dialect that it speaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import ray

from ray_serve_grpc import _native, broadcast, channels, errors
from ray_serve_grpc.bridge import bridge_for, turn_of
from ray_serve_grpc.completion import Completion, FailedCall, Start
from ray_serve_grpc.result import gRPCReplicaResult
from ray_serve_grpc.seam import adapter
from ray_serve_grpc.seam.adapter import ReplicaWrapper
from ray_serve_grpc.serializers import RPCSerializer, encoded_size

if TYPE_CHECKING:
    from ray_serve_grpc._native import Call
    from ray_serve_grpc.tracing import ClientSpan

__all__ = ["gRPCReplicaResult", "gRPCReplicaWrapper"]


class gRPCReplicaWrapper(ReplicaWrapper):
    """Sends requests to one replica, over the channel that the process has to it."""

    def __init__(self, actor_id: ray.ActorID, endpoints: list[str], *, deployment: str) -> None:
        self._peer = channels.lease(actor_id.binary(), endpoints, deployment=deployment)
        self._closed = False

    def send_request_java(self, pr: Any) -> NoReturn:
        raise RuntimeError("A Java replica takes actor calls only: set `_by_reference=True` on its handle.")

    def send_request_python(self, pr: Any, *, with_rejection: bool) -> gRPCReplicaResult:
        """Sends the request, or has it sent as soon as the channel is settled.

        Raises:
            RayServeGrpcError: an argument or the handle's settings do not allow to send it; nothing was.
        """
        peer = self._peer
        metadata = pr.metadata
        serializer = RPCSerializer.named(
            getattr(metadata, "request_serialization", "cloudpickle"),
            getattr(metadata, "response_serialization", "cloudpickle"),
        )
        span = None
        if adapter.tracing_is_on():
            span = _span(peer, metadata, pr.kwargs if serializer.request.keywords else None, with_rejection)
            metadata = span.metadata
        loop = asyncio.get_running_loop()
        bridge = bridge_for(loop)
        dialect = peer.channel.dialect()
        once = broadcast.current()
        if dialect is not None:
            # Where calls come in numbers, those of this turn of the loop leave together.
            alone = peer.channel.quiet
            try:
                call = _send(peer, serializer, metadata, pr.args, pr.kwargs, with_rejection, once, span, dialect, alone)
            except Exception as error:
                if span is not None:
                    span.fail(error)
                raise
            if not alone:
                turn_of(loop).add(peer.channel)
            result = gRPCReplicaResult(peer, serializer, metadata, with_rejection)
            result.begin(call, dialect, bridge)
        else:
            result = gRPCReplicaResult(peer, serializer, metadata, with_rejection)
            send = partial(_send, peer, serializer, metadata, pr.args, pr.kwargs, with_rejection, once, span)
            start = Start(partial(_begin, result.completion, peer, send, bridge))
            result.begin_later(start)
            peer.channel.watch_ready(bridge, start)
        if span is not None:
            span.follow(result)
        return result

    def close(self) -> None:
        """Gives the channel back; what is under way goes on. Any thread, any number of times."""
        if not self._closed:
            self._closed = True
            channels.release(self._peer)

    def __repr__(self) -> str:
        return f"<gRPCReplicaWrapper {self._peer.where()}>"


def _span(peer: channels.Peer, metadata: Any, kwargs: dict[str, Any] | None, with_rejection: bool) -> ClientSpan:
    from ray_serve_grpc.tracing import ClientSpan

    return ClientSpan(peer, metadata, kwargs, _method(metadata, with_rejection))


def _method(metadata: Any, with_rejection: bool) -> int:
    first = _native.METHOD_UNARY_REJECTION if with_rejection else _native.METHOD_UNARY
    return first + bool(metadata.is_streaming)


def _send(
    peer: channels.Peer,
    serializer: RPCSerializer,
    metadata: Any,
    args: list[Any],
    kwargs: dict[str, Any],
    with_rejection: bool,
    once: broadcast.Once | None,
    span: ClientSpan | None,
    dialect: int,
    flush: bool = True,
) -> Call:
    method = _method(metadata, with_rejection)
    limit = adapter.max_message_size()
    if dialect == _native.DIALECT_NATIVE:
        encode = serializer.encode_request if once is None else partial(once.encode, serializer)
        body, buffers = encode(args, kwargs)
        if buffers or type(body) is not bytes or len(body) > limit:
            size = encoded_size(body, buffers)
            if size > limit:
                raise errors.request_too_large(size, limit, peer.where())
        strings, extra = adapter.metadata_to_wire(metadata)
        trace = None if span is None else span.traceparent
        return peer.channel.call(method, strings, extra, body, buffers, flush, trace)
    fields = serializer.stock_request(args, kwargs)
    size = sum(map(len, fields))
    if size > limit:
        raise errors.request_too_large(size, limit, peer.where())
    return peer.channel.call_stock(method, (adapter.metadata_to_stock(metadata), *fields))


def _begin(completion: Completion, peer: channels.Peer, send: Callable[[int], Call], bridge: _native.Bridge) -> None:
    """Sends a request that waited for its channel. A stream that was dropped meanwhile is not sent."""
    owner = completion.owner()
    if owner is None:
        completion()
        return
    assert isinstance(owner, gRPCReplicaResult)
    dialect = peer.channel.dialect()
    if dialect is None:
        status = peer.channel.failure() or (
            _native.STATUS_UNAVAILABLE,
            "the channel is closed: its replica was removed",
        )
        owner.fail_to_begin(FailedCall(*status))
        return
    try:
        call = send(dialect)
    except Exception as error:
        owner.fail_to_begin(FailedCall(_native.STATUS_UNKNOWN, str(error)), error)
        return
    owner.begin(call, dialect, bridge)
