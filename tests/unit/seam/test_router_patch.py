"""A broadcast's requests know of each other."""

from __future__ import annotations

import asyncio
from types import ModuleType

import pytest

from ray_serve_grpc import broadcast
from ray_serve_grpc.seam import router_patch
from ray_serve_grpc.seam.probe import Mismatch


def router_module():
    class AsyncioRouter:
        async def broadcast(self, replicas):
            return [self.try_send_request(replica) for replica in replicas]

        def try_send_request(self, _replica):
            return broadcast.current()

    module = ModuleType("router")
    module.AsyncioRouter = AsyncioRouter
    return module


def test_the_requests_of_one_broadcast_share_an_encoding_and_no_others():
    module = router_module()
    assert router_patch.apply(module) == "broadcast"

    async def run():
        router = module.AsyncioRouter()
        return await router.broadcast("ab"), await router.broadcast("c"), router.try_send_request("d")

    (first, second), (other,), single = asyncio.run(run())
    assert first is second
    assert isinstance(first, broadcast.Once)
    assert other is not first
    assert single is None


def test_it_goes_on_once():
    module = router_module()
    router_patch.apply(module)
    patched = module.AsyncioRouter.broadcast
    router_patch.apply(module)
    assert module.AsyncioRouter.broadcast is patched


def test_a_ray_without_broadcast_is_left_alone():
    module = router_module()
    del module.AsyncioRouter.broadcast
    assert router_patch.apply(module) == "without broadcast"


def test_a_broadcast_that_sends_in_another_way_is_left_alone():
    module = router_module()

    async def otherwise(self):
        pass

    module.AsyncioRouter.broadcast = otherwise
    with pytest.raises(Mismatch, match="try_send_request"):
        router_patch.apply(module)
    assert module.AsyncioRouter.broadcast is otherwise
