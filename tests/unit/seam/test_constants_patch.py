"""A limit above grpcio's is kept from Ray's own gRPC servers."""

from __future__ import annotations

from types import ModuleType

import pytest

from ray_serve_grpc.seam import constants_patch
from ray_serve_grpc.seam.probe import Mismatch


def constants(limit):
    module = ModuleType("constants")
    module.RAY_SERVE_GRPC_MAX_MESSAGE_SIZE = limit
    module.DEFAULT_GRPC_SERVER_OPTIONS = [("grpc.max_receive_message_length", limit), ("other", 1)]
    return module


def test_a_limit_above_2_gib_is_lowered_for_grpcio():
    module = constants(3 << 30)
    options = module.DEFAULT_GRPC_SERVER_OPTIONS
    constants_patch.apply(module)
    assert options == [("grpc.max_receive_message_length", 2**31 - 1), ("other", 1)]
    assert module.RAY_SERVE_GRPC_MAX_MESSAGE_SIZE == 2**31 - 1


def test_any_other_limit_stays():
    module = constants(1000)
    constants_patch.apply(module)
    assert module.DEFAULT_GRPC_SERVER_OPTIONS == constants(1000).DEFAULT_GRPC_SERVER_OPTIONS


def test_renamed_constants_are_a_mismatch():
    with pytest.raises(Mismatch, match="DEFAULT_GRPC_SERVER_OPTIONS"):
        constants_patch.apply(ModuleType("constants"))
