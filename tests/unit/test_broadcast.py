"""What the requests of one broadcast have in common is encoded once."""

from __future__ import annotations

import numpy as np

from ray_serve_grpc.broadcast import Once
from ray_serve_grpc.serializers import RPCSerializer

PICKLE = RPCSerializer()


def decoded(encoded):
    body, buffers = encoded
    return PICKLE.decode_request(b"".join([body] if type(body) is bytes else body), buffers)


def test_the_same_arguments_are_encoded_once():
    once = Once()
    array, options = np.arange(100_000), {"k": "v"}
    first = once.encode(PICKLE, [array], options)
    assert once.encode(PICKLE, [array], dict(options)) is first
    (received,), named = decoded(first)
    assert np.array_equal(received, array)
    assert named == options


def test_equal_arguments_are_not_the_same():
    once = Once()
    first = once.encode(PICKLE, [[1]], {})
    assert once.encode(PICKLE, [[1]], {}) is not first
    changed = [2]
    assert decoded(once.encode(PICKLE, [changed], {})) == ([changed], {})
    assert decoded(once.encode(PICKLE, [changed], {"k": 1})) == ([changed], {"k": 1})
    assert decoded(once.encode(PICKLE, [changed, changed], {})) == ([changed, changed], {})


def test_what_is_encoded_does_not_change_with_its_arguments():
    once = Once()
    array, raw = np.zeros(100_000), bytearray(200_000)
    encoded = once.encode(PICKLE, [array, raw], {})
    array[:] = 1
    raw[:] = b"x" * len(raw)
    (received, received_raw), _ = decoded(encoded)
    assert not received.any()
    assert not any(received_raw)
