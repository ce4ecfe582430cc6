"""Messages of any content at the Python side: each call is answered once, and nothing else happens.

Pickles are left out: whoever may send one may run code (docs/security.md). A longer run: HYPOTHESIS_EXAMPLES=100000.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

from fakes import FakeReplica, FakeServerCall
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray.exceptions import RayTaskError
from test_server import answered, echo

from ray_serve_grpc import _native, errors
from ray_serve_grpc.serializers import RPCSerializer

many = settings(
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "200")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

names = st.sampled_from(["msgpack", "orjson", "noop"])
buffers = st.lists(st.binary(max_size=40), max_size=4).map(tuple)
text = st.text(max_size=20)


@given(request=names, response=names, body=st.binary(max_size=200), buffers=buffers, strings=st.tuples(*[text] * 7))
@many
def test_any_request_is_answered_once(request, response, body, buffers, strings):
    async def serve() -> FakeServerCall:
        call = FakeServerCall(
            _native.METHOD_UNARY, metadata=(*strings, request, response), extra=b"", body=body, buffers=buffers
        )
        return await answered(call, FakeReplica(echo))

    call = asyncio.run(serve())
    assert call.finished is not None
    assert len(call.sent) == 1 or call.finished[0] != _native.STATUS_OK


@given(serialization=text, body=st.binary(max_size=50))
@many
def test_any_name_of_a_serialization_is_answered(serialization, body):
    if serialization in ("", "cloudpickle", "pickle"):
        return

    async def serve() -> FakeServerCall:
        strings = ("",) * 7 + (serialization, serialization)
        return await answered(
            FakeServerCall(_native.METHOD_UNARY, metadata=strings, extra=b"", body=body, buffers=()), FakeReplica(echo)
        )

    call = asyncio.run(serve())
    assert call.finished is not None


@given(name=names, body=st.binary(max_size=200), buffers=buffers)
@many
def test_any_response_is_a_value_or_an_error(name, body, buffers):
    serializer = RPCSerializer(name, name)
    # A caller sees an error of its own call, whatever it is. Nothing that ends a thread or a loop.
    with contextlib.suppress(Exception):
        serializer.decode_response(body, buffers)


@given(kind=st.integers(min_value=3, max_value=1 << 31), body=st.binary(max_size=200))
@many
def test_any_text_of_an_error_is_an_error(kind, body):
    decoded: Any = errors.decode(kind, body)
    assert isinstance(decoded, RayTaskError)
    assert isinstance(errors.raisable(decoded), BaseException)
