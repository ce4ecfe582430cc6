"""By-value responses give object references; everything else stays as Ray has it."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace

import pytest

from ray_serve_grpc.seam import handle_patch
from ray_serve_grpc.seam.probe import Mismatch


class OurResult:
    timeout = "never asked"

    async def to_object_ref_async(self):
        return "ref"

    def to_object_ref(self, timeout_s=None):
        self.timeout = timeout_s
        return "ref"

    def to_object_ref_gen(self):
        return "refs"


class ActorResult:
    def to_object_ref(self):
        return "ref"


class LocalResult:
    """Of the local testing mode."""


def running_in_loop():
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def handle_module():
    class Base:
        def __init__(self, result, by_reference=False):
            self.result = result
            self._request_metadata = SimpleNamespace(_by_reference=by_reference)

        async def _fetch_future_result_async(self):
            return self.result

        def _fetch_future_result_sync(self, _timeout_s=None):
            return self.result

        def original(self):
            if not self._request_metadata._by_reference:
                raise RuntimeError("not supported by value")
            return "Ray's own ref"

    class DeploymentResponse(Base):
        async def _to_object_ref(self):
            return self.original()

        def _to_object_ref_sync(self, _timeout_s=None, _allow_running_in_asyncio_loop=False):
            return (self._request_metadata._by_reference or True) and self.original()

    class DeploymentResponseGenerator(Base):
        async def _to_object_ref_gen(self):
            return self.original()

        def _to_object_ref_gen_sync(self, _timeout_s=None, _allow_running_in_asyncio_loop=False):
            return self.original()

    module = ModuleType("handle")
    module.DeploymentResponse = DeploymentResponse
    module.DeploymentResponseGenerator = DeploymentResponseGenerator
    module.is_running_in_asyncio_loop = running_in_loop
    return module


@pytest.fixture
def handle(monkeypatch):
    client = ModuleType("ray_serve_grpc.client")
    client.gRPCReplicaResult = OurResult
    results = ModuleType("ray.serve._private.replica_result")
    results.ActorReplicaResult = ActorResult
    for name in ("ray", "ray.serve", "ray.serve._private"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (client, results):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module = handle_module()
    handle_patch.apply(module)
    return module


def test_a_by_value_response_gives_a_reference(handle):
    assert asyncio.run(handle.DeploymentResponse(OurResult())._to_object_ref()) == "ref"
    assert handle.DeploymentResponse(OurResult())._to_object_ref_sync() == "ref"


def test_a_by_value_stream_gives_references(handle):
    assert asyncio.run(handle.DeploymentResponseGenerator(OurResult())._to_object_ref_gen()) == "refs"
    assert handle.DeploymentResponseGenerator(OurResult())._to_object_ref_gen_sync() == "refs"


def test_the_timeout_covers_the_wait_for_the_value(handle):
    result = OurResult()
    handle.DeploymentResponse(result)._to_object_ref_sync(_timeout_s=5)
    assert 4 < result.timeout <= 5
    handle.DeploymentResponse(result)._to_object_ref_sync()
    assert result.timeout is None


def test_a_by_value_request_that_an_actor_call_served_gives_a_reference(handle):
    assert handle.DeploymentResponse(ActorResult())._to_object_ref_sync() == "ref"


def test_by_reference_is_rays_own(handle):
    assert asyncio.run(handle.DeploymentResponse(OurResult(), by_reference=True)._to_object_ref()) == "Ray's own ref"
    assert handle.DeploymentResponse(OurResult(), by_reference=True)._to_object_ref_sync() == "Ray's own ref"


def test_local_testing_mode_is_rays_own(handle):
    response = handle.DeploymentResponse(LocalResult())
    with pytest.raises(RuntimeError, match="not supported by value"):
        response._to_object_ref_sync()
    with pytest.raises(RuntimeError, match="not supported by value"):
        asyncio.run(response._to_object_ref())


def test_rays_own_refusal_stands_where_our_client_was_never_loaded(handle, monkeypatch):
    monkeypatch.delitem(sys.modules, "ray_serve_grpc.client")
    with pytest.raises(RuntimeError, match="not supported by value"):
        handle.DeploymentResponse(LocalResult())._to_object_ref_sync()


def test_the_sync_form_is_refused_in_an_event_loop(handle):
    async def inside():
        for response, name in (
            (handle.DeploymentResponse(OurResult()), "_to_object_ref_sync"),
            (handle.DeploymentResponseGenerator(OurResult()), "_to_object_ref_gen_sync"),
        ):
            with pytest.raises(RuntimeError, match="should not be called from within an `asyncio` event loop"):
                getattr(response, name)()
            assert getattr(response, name)(_allow_running_in_asyncio_loop=True)

    asyncio.run(inside())


def test_patching_twice_wraps_once(handle):
    before = handle.DeploymentResponse._to_object_ref
    handle_patch.apply(handle)
    assert handle.DeploymentResponse._to_object_ref is before


def test_a_renamed_member_changes_nothing():
    module = handle_module()
    del module.DeploymentResponseGenerator._to_object_ref_gen_sync
    before = dict(vars(module.DeploymentResponse))
    with pytest.raises(Mismatch, match="_to_object_ref_gen_sync"):
        handle_patch.apply(module)
    assert dict(vars(module.DeploymentResponse)) == before
