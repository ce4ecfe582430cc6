"""`RunningReplica` hands out the plugin's wrapper for by-value requests, and lets go of it in time."""

from __future__ import annotations

import gc
import sys
from types import ModuleType, SimpleNamespace

import pytest

from ray_serve_grpc.seam import activation, adapter, client_patch
from ray_serve_grpc.seam.probe import Mismatch

BY_VALUE = SimpleNamespace(metadata=SimpleNamespace(_by_reference=False))
BY_REFERENCE = SimpleNamespace(metadata=SimpleNamespace(_by_reference=True))


def replica_module():
    """The parts of Ray's module that the patch relies on."""

    class RunningReplica:
        def __init__(self, replica_info):
            self._replica_info = replica_info
            self._actor_handle = SimpleNamespace(_actor_id="actor-1")
            self._actor_replica_wrapper = "actor wrapper"
            self._grpc_replica_wrapper = None

        def update_replica_info(self, replica_info):
            self._replica_info = replica_info

        def _get_replica_wrapper(self, pr):
            if self._grpc_replica_wrapper is None:
                self._grpc_replica_wrapper = "stock wrapper"
            return self._actor_replica_wrapper if pr.metadata._by_reference else self._grpc_replica_wrapper

        def try_send_request(self, pr, with_rejection):
            wrapper = self._get_replica_wrapper(pr)
            return wrapper.send_request_java(pr) or wrapper.send_request_python(pr)

    module = ModuleType("replica_wrapper")
    module.RunningReplica = RunningReplica
    module.ReplicaWrapper = object
    return module


def info(**changes):
    values = {"node_ip": "10.0.0.1", "port": 5000, "is_cross_language": False}
    deployment = SimpleNamespace(deployment_id=SimpleNamespace(name="Model"))
    return SimpleNamespace(replica_id=deployment, **values | changes)


class Wrapper:
    def __init__(self, actor_id, endpoints, *, deployment):
        self.actor_id, self.endpoints, self.deployment = actor_id, endpoints, deployment
        self.closed = []

    def close(self):
        self.closed.append(True)


@pytest.fixture
def running_replica(monkeypatch):
    client = ModuleType("ray_serve_grpc.client")
    client.gRPCReplicaWrapper = Wrapper
    monkeypatch.setitem(sys.modules, client.__name__, client)
    monkeypatch.setattr(adapter, "in_ray_client", lambda: False)
    monkeypatch.setattr(adapter, "replica_endpoints", lambda info, actor_id: [f"tcp:{info.node_ip}:{info.port}"])
    module = replica_module()
    client_patch.apply(module)
    return module.RunningReplica


def test_by_value_requests_get_one_wrapper_of_ours(running_replica):
    replica = running_replica(info())
    wrapper = replica._get_replica_wrapper(BY_VALUE)
    assert (wrapper.actor_id, wrapper.endpoints, wrapper.deployment) == ("actor-1", ["tcp:10.0.0.1:5000"], "Model")
    assert replica._get_replica_wrapper(BY_VALUE) is wrapper


def test_by_reference_requests_stay_rays_and_open_nothing(running_replica):
    replica = running_replica(info())
    assert replica._get_replica_wrapper(BY_REFERENCE) == "actor wrapper"
    assert replica._grpc_replica_wrapper is None


def test_a_java_replica_is_called_by_ray(running_replica):
    assert running_replica(info(is_cross_language=True))._get_replica_wrapper(BY_VALUE) == "actor wrapper"


def test_a_ray_client_driver_is_served_by_ray(running_replica, monkeypatch):
    monkeypatch.setattr(adapter, "in_ray_client", lambda: True)
    assert running_replica(info())._get_replica_wrapper(BY_VALUE) == "actor wrapper"


def test_a_replica_that_no_lane_reaches_is_called_over_rays_own_transport(running_replica, monkeypatch, warnings):
    monkeypatch.setattr(adapter, "replica_endpoints", lambda info, actor_id: [])
    assert running_replica(info())._get_replica_wrapper(BY_VALUE) == "stock wrapper"
    assert "RAY_SERVE_GRPC_LANES" in warnings()[0]


def test_a_wrapper_that_cannot_be_made_falls_back_with_one_warning(running_replica, monkeypatch, warnings):
    def fail(info, actor_id):
        raise RuntimeError("broken")

    monkeypatch.setattr(adapter, "replica_endpoints", fail)
    for _ in range(2):
        assert running_replica(info())._get_replica_wrapper(BY_VALUE) == "stock wrapper"
    [warning] = warnings()
    assert "broken" in warning
    assert "broken" in activation.outcomes["client"]


def test_the_wrapper_is_closed_when_the_router_lets_go_of_the_replica(running_replica):
    replica = running_replica(info())
    wrapper = replica._get_replica_wrapper(BY_VALUE)
    gc.disable()
    try:
        del replica  # by its reference count: no cycle holds a replica
        assert wrapper.closed == [True]
    finally:
        gc.enable()


def test_an_update_that_moves_the_port_opens_a_new_wrapper(running_replica):
    replica = running_replica(info())
    first = replica._get_replica_wrapper(BY_VALUE)
    replica.update_replica_info(info())
    assert replica._get_replica_wrapper(BY_VALUE) is first
    replica.update_replica_info(info(port=6000))
    second = replica._get_replica_wrapper(BY_VALUE)
    assert first.closed == [True]
    assert second.endpoints == ["tcp:10.0.0.1:6000"]
    del replica
    assert (first.closed, second.closed) == ([True], [True])


def test_patching_twice_changes_nothing_more(running_replica):
    module = ModuleType("replica_wrapper")
    module.RunningReplica, module.ReplicaWrapper = running_replica, object
    before = running_replica._get_replica_wrapper
    client_patch.apply(module)
    assert running_replica._get_replica_wrapper is before


def test_a_ray_without_update_replica_info_fits():
    module = replica_module()
    del module.RunningReplica.update_replica_info
    client_patch.apply(module)


@pytest.mark.parametrize("member", ["_get_replica_wrapper", "try_send_request"])
def test_a_renamed_member_changes_nothing(member):
    module = replica_module()
    delattr(module.RunningReplica, member)
    before = dict(vars(module.RunningReplica))
    with pytest.raises(Mismatch, match=member):
        client_patch.apply(module)
    assert dict(vars(module.RunningReplica)) == before
