"""The facade: where replicas are reached, and who may."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from ray_serve_grpc.seam import adapter
from ray_serve_grpc.seam.probe import Mismatch

ACTOR = "0123456789abcdef0123456789abcdef"


class ActorID(SimpleNamespace):
    def hex(self):
        return ACTOR


def info(**changes):
    return SimpleNamespace(**{"node_id": "here", "node_ip": "127.0.0.1", "port": 5000} | changes)


@pytest.fixture
def session(tmp_path_factory, monkeypatch):
    """A Ray session on node "here", in a folder with a short path."""
    folder = tmp_path_factory.mktemp("s")
    monkeypatch.setattr(adapter, "_session_folder", lambda: str(folder))
    monkeypatch.setattr(adapter, "_own_node_id", lambda: "here")
    util = ModuleType("ray.util")
    util.get_node_ip_address = lambda: "127.0.0.1"
    monkeypatch.setitem(sys.modules, "ray.util", util)
    return folder


def bound_socket():
    """Where a replica's server has its socket."""
    _, path = adapter.server_binding(ACTOR)
    Path(path).touch()
    return path


def test_on_one_node_the_socket_is_tried_first(session):
    path = bound_socket()
    assert path == str(session / "rsg" / "0123456789abcdef.sock")
    assert adapter.replica_endpoints(info(), ActorID()) == [f"unix:{path}", "tcp:127.0.0.1:5000"]


def test_a_replica_without_a_socket_is_reached_by_tcp_alone(session, settings):
    """Retrying a socket that a replica without the plugin never binds would go on for ever."""
    assert adapter.replica_endpoints(info(), ActorID()) == ["tcp:127.0.0.1:5000"]
    settings(lanes=("unix",))
    assert adapter.replica_endpoints(info(), ActorID()) == []


@pytest.mark.parametrize("node_id", ["there", None, ""])
@pytest.mark.usefixtures("session")
def test_other_nodes_are_reached_by_tcp(node_id):
    assert adapter.replica_endpoints(info(node_id=node_id), ActorID()) == ["tcp:127.0.0.1:5000"]


@pytest.mark.usefixtures("session")
def test_an_ipv6_host_stands_in_brackets():
    assert adapter.replica_endpoints(info(node_id=None, node_ip="fd00::1"), ActorID()) == ["tcp:[fd00::1]:5000"]


def test_the_lanes_of_the_settings_are_kept_to(session, settings):
    bound_socket()
    settings(lanes=("tcp",))
    assert adapter.replica_endpoints(info(), ActorID()) == ["tcp:127.0.0.1:5000"]
    assert adapter.server_binding(ACTOR) == ("127.0.0.1", None)
    settings(lanes=("unix",))
    assert [e.partition(":")[0] for e in adapter.replica_endpoints(info(), ActorID())] == ["unix"]
    assert adapter.replica_endpoints(info(node_id="there"), ActorID()) == []


@pytest.mark.parametrize(("node_ip", "host"), [("192.0.2.1", "0.0.0.0"), ("2001:db8::1", "::"), ("127.0.0.1",) * 2])
def test_an_address_that_is_not_this_machines_is_bound_by_all_addresses(session, node_ip, host):
    sys.modules["ray.util"].get_node_ip_address = lambda: node_ip
    assert adapter.server_binding(ACTOR)[0] == host


def test_a_path_too_long_for_a_socket_is_no_lane_and_one_warning(session, monkeypatch, caplog):
    monkeypatch.setattr(adapter, "_session_folder", lambda: "/" + "x" * 90)
    assert adapter.replica_endpoints(info(), ActorID()) == ["tcp:127.0.0.1:5000"]
    assert adapter.server_binding(ACTOR) == ("127.0.0.1", None)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "x" * 90 in warning
    assert str(adapter.LONGEST_SOCKET_PATH) in warning
    monkeypatch.setattr(adapter, "_session_folder", lambda: "/" + "x" * 80)
    monkeypatch.setattr(os.path, "exists", lambda path: True)
    [unix, _] = adapter.replica_endpoints(info(), ActorID())
    assert len(unix.removeprefix("unix:")) == adapter.LONGEST_SOCKET_PATH


def test_the_folder_of_the_sockets_is_the_users_alone(session):
    adapter.server_binding(ACTOR)
    assert stat.S_IMODE((session / "rsg").stat().st_mode) == 0o700


def test_a_folder_that_others_can_enter_is_not_used(session):
    (session / "rsg").mkdir()
    os.chmod(session / "rsg", 0o755)
    assert adapter.server_binding(ACTOR)[1] is None


def test_a_link_in_the_folders_place_is_not_used(session, tmp_path):
    (session / "rsg").symlink_to(tmp_path)
    assert adapter.server_binding(ACTOR)[1] is None


@pytest.fixture
def ray_auth(monkeypatch):
    """Ray's token authentication: `.enabled`, `.token`, and whether its replicas demand the token."""
    state = SimpleNamespace(enabled=True, token="s3cret")
    loader = SimpleNamespace(
        has_token=lambda: state.token is not None,
        get_token_for_http_header=lambda: {"Authorization": f"Bearer {state.token}"},
    )
    names = ("ray", "ray._private", "ray._private.authentication", "ray._raylet", "ray.serve._private.replica")
    modules = {name: ModuleType(name) for name in names}
    utils = SimpleNamespace(is_token_auth_enabled=lambda: state.enabled)
    modules["ray._private.authentication"].authentication_utils = utils
    modules["ray._raylet"].AuthenticationTokenLoader = SimpleNamespace(instance=lambda: loader)
    modules["ray.serve._private.replica"].create_grpc_server_with_interceptors = None
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    state.replica = modules["ray.serve._private.replica"]
    return state


def test_both_ends_use_rays_token(ray_auth):
    assert adapter.authorization() == "Bearer s3cret"
    assert adapter.server_authorization() == "Bearer s3cret"


def test_without_token_auth_nothing_is_sent_or_demanded(ray_auth):
    ray_auth.enabled = False
    assert adapter.authorization() is None
    assert adapter.server_authorization() is None


def test_a_replica_never_serves_openly_where_ray_would_demand_a_token(ray_auth):
    ray_auth.token = None
    assert adapter.authorization() is None
    with pytest.raises(Mismatch, match="token"):
        adapter.server_authorization()


def test_a_ray_that_leaves_the_port_open_demands_nothing_from_stock_callers(ray_auth):
    del ray_auth.replica.create_grpc_server_with_interceptors
    assert adapter.server_authorization() is None


@pytest.mark.parametrize(("value", "on"), [("1", True), ("True", True), ("0", False), ("", False), (None, False)])
def test_tls_is_read_as_ray_reads_it(value, on, monkeypatch):
    if value is not None:
        monkeypatch.setenv("RAY_USE_TLS", value)
    wrapper = ModuleType("replica_wrapper")
    monkeypatch.setitem(sys.modules, "ray.serve._private.request_router.replica_wrapper", wrapper)
    assert adapter.channel_is_encrypted() is False  # Ray before 2.58
    wrapper.init_grpc_channel = None
    assert adapter.channel_is_encrypted() is on


def test_children_in_flight_are_told_apart_by_a_counter(monkeypatch):
    children = {}
    context = SimpleNamespace(
        _get_serve_request_context=lambda: SimpleNamespace(_internal_request_id="parent", is_http_request=True),
        _add_in_flight_request=lambda parent, key, result: children.setdefault(parent, {}).update({key: result}),
        _remove_in_flight_request=lambda parent, key: children[parent].pop(key, None),
    )
    monkeypatch.setattr(adapter, "_serve_context", lambda: context)
    forget_first, forget_second = adapter.track_in_flight("first"), adapter.track_in_flight("second")
    assert list(children["parent"].values()) == ["first", "second"]
    forget_first()
    forget_first()
    assert list(children["parent"].values()) == ["second"]
    forget_second()
    assert children == {"parent": {}}
    assert adapter.caller_is_http_proxy()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_trace_context_goes_along_only_where_tracing_is_on(enabled, monkeypatch):
    tracing = SimpleNamespace(
        _is_tracing_enabled=lambda: enabled,
        _DictPropagator=SimpleNamespace(inject_current_context=lambda: {"traceparent": "00"}),
    )
    monkeypatch.setattr(adapter, "_tracing", lambda: tracing)
    kwargs = {"a": 1}
    adapter.inject_trace_context(kwargs)
    assert kwargs == {"a": 1} | ({"_ray_trace_ctx": {"traceparent": "00"}} if enabled else {})


def test_unknown_names_of_the_facade_are_attribute_errors():
    with pytest.raises(AttributeError, match="NoSuchThing"):
        adapter.NoSuchThing  # noqa: B018
