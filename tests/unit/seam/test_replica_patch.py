"""The replica's server: ours in the place of Ray's, and Ray's own where ours cannot start."""

from __future__ import annotations

import asyncio
from types import ModuleType

import pytest

from ray_serve_grpc.seam import replica_patch
from ray_serve_grpc.seam.probe import Mismatch


class StockServer:
    """What Ray builds: grpc.aio's server."""

    def __init__(self):
        self.log = []

    def add_generic_rpc_handlers(self, handlers):
        self.log.append("handlers")

    def add_insecure_port(self, address):
        self.log.append(f"port {address}")
        return 7777

    def add_secure_port(self, address, credentials):
        self.log.append(f"secure port {address}")
        return 8888

    async def start(self):
        self.log.append("start")

    async def stop(self, grace):
        self.log.append(f"stop {grace}")


class OurServer:
    def __init__(self):
        self.log = []
        self.encrypted = None

    async def stop(self, grace):
        self.log.append(f"stop {grace}")


def ray_module():
    """A Replica that treats its server as Ray's does."""

    class Base:
        def __init__(self, name):
            self.name = name
            self._internal_grpc_port = None
            self._server = self.stock = StockServer()

        async def handle_request(self, request_metadata, *request_args, **request_kwargs): ...
        async def handle_request_streaming(self, request_metadata, *request_args, **request_kwargs): ...
        async def handle_request_with_rejection(self, request_metadata, *request_args, **request_kwargs): ...

    class Replica(Base):
        secure = False

        async def _on_initialized(self):
            self._server.add_generic_rpc_handlers(())
            if self.secure:
                self._internal_grpc_port = self._server.add_secure_port("[::]:0", "credentials")
            else:
                self._internal_grpc_port = self._server.add_insecure_port("[::]:0")
            await self._server.start()

    module = ModuleType("replica")
    module.Replica = Replica
    return module


@pytest.fixture
def replica_class():
    module = ray_module()
    replica_patch.apply(module)
    return module.Replica


@pytest.fixture
def ours(monkeypatch):
    server = OurServer()

    async def serving(replica, *, encrypted):
        server.encrypted = encrypted
        return server, 4242

    monkeypatch.setattr(replica_patch, "serving", serving)
    return server


def test_our_server_starts_where_rays_would_and_its_port_is_published(replica_class, ours):
    async def life():
        replica = replica_class("r")
        await replica._on_initialized()
        assert replica._internal_grpc_port == 4242
        await replica._server.stop(3.0)
        return replica

    replica = asyncio.run(life())
    assert replica.name == "r"
    assert (ours.log, ours.encrypted) == (["stop 3.0"], False)
    assert replica.stock.log == ["handlers"]


@pytest.mark.parametrize(("secure", "port"), [(False, 7777), (True, 8888)])
def test_a_server_that_cannot_start_leaves_rays_own_with_one_warning(
    replica_class, monkeypatch, warnings, secure, port
):
    """It is as encrypted as Ray wanted it: what fails with TLS must not end in plain text."""

    async def serving(replica, *, encrypted):
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(replica_patch, "serving", serving)

    async def life():
        replica = replica_class("r")
        replica.secure = secure
        await replica._on_initialized()
        assert replica._internal_grpc_port == port
        await replica._server.stop(1.0)
        return replica

    replica = asyncio.run(life())
    kind = "secure port" if secure else "port"
    assert replica.stock.log == ["handlers", f"{kind} [::]:0", "start", "stop 1.0"]
    [warning] = warnings()
    assert "Address already in use" in warning


def test_ours_is_encrypted_where_rays_would_be(replica_class, ours):
    async def life():
        replica = replica_class("r")
        replica.secure = True
        await replica._on_initialized()
        return replica

    replica = asyncio.run(life())
    assert replica._internal_grpc_port == 4242
    assert replica.stock.log == ["handlers"]
    assert ours.encrypted is True


def test_a_server_of_another_shape_stays_in_place(replica_class, monkeypatch, warnings):
    monkeypatch.delattr(StockServer, "add_secure_port")
    replica = replica_class("r")
    assert replica._server is replica.stock
    assert "add_secure_port" in warnings()[0]


def test_stopping_before_starting_is_harmless(replica_class, ours):
    async def life():
        replica = replica_class("r")
        await replica._server.stop(None)
        return replica

    assert asyncio.run(life()).stock.log == ["stop None"]


def test_patching_twice_wraps_once(replica_class):
    module = ModuleType("replica")
    module.Replica = replica_class
    before = replica_class.__init__
    replica_patch.apply(module)
    assert replica_class.__init__ is before


@pytest.mark.parametrize("member", ["_on_initialized", "handle_request", "handle_request_with_rejection"])
def test_a_renamed_member_changes_nothing(member):
    module = ray_module()
    owner = module.Replica if member in vars(module.Replica) else module.Replica.__mro__[1]
    delattr(owner, member)
    before = module.Replica.__init__
    with pytest.raises(Mismatch, match=member):
        replica_patch.apply(module)
    assert module.Replica.__init__ is before


def test_a_renamed_server_attribute_changes_nothing():
    module = ray_module()

    async def _on_initialized(self):
        await self._grpc_server.start()

    module.Replica._on_initialized = _on_initialized
    before = module.Replica.__init__
    with pytest.raises(Mismatch, match="_server"):
        replica_patch.apply(module)
    assert module.Replica.__init__ is before
