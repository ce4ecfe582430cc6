"""The replica's side: the plugin's server stands where Ray keeps its grpc.aio server.

Ray builds that server in `Replica.__init__`, binds and starts it in `_on_initialized`, and
stops it (from 2.57) in its graceful shutdown. None of these bodies is replaced: right after
`__init__` the server is wrapped in a `ReplicaPort`, which answers to the same calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

from ray_serve_grpc.seam import activation, probe

#: what Ray calls on its server
SERVER_METHODS = ("add_generic_rpc_handlers", "add_insecure_port", "add_secure_port", "start", "stop")

#: What a port is before it is bound: ours is known only once the server runs.
UNBOUND = 0


def apply(module: ModuleType) -> str:
    """Patches ray.serve._private.replica.

    Raises:
        Mismatch: it lacks something of what is used here; nothing has been changed.
    """
    replica = probe.member(module, "Replica")
    for name in ("handle_request", "handle_request_streaming", "handle_request_with_rejection"):
        probe.function(replica, name, "request_metadata", "request_args", "request_kwargs")
    start = probe.function(replica, "_on_initialized", asynchronous=True)
    constructors = [entry.__init__ for entry in replica.__mro__ if "__init__" in vars(entry) and entry is not object]
    probe.uses(constructors, "_server", "_internal_grpc_port")
    probe.uses([start], "_server", "_internal_grpc_port", "start")
    if not hasattr(replica.__init__, "__wrapped__"):
        replica.__init__ = constructing(replica.__init__)
    return "authenticated" if hasattr(module, "create_grpc_server_with_interceptors") else "plain"


def constructing(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        stock = self._server
        missing = [name for name in SERVER_METHODS if not hasattr(stock, name)]
        if missing:
            activation.warn(f"Ray's server has no {', '.join(missing)}: it stays in place", cause="server methods")
        else:
            self._server = ReplicaPort(self, stock)

    return __init__


class ReplicaPort:
    """The plugin's server, in the shape of the grpc.aio server that Ray would have used.

    Ray's own, built but never started, is kept for as long as it may still be needed.
    """

    def __init__(self, replica: Any, stock: Any) -> None:
        self._replica = replica
        self._stock = stock
        #: binds the port of Ray's own server, should ours not start; as encrypted as Ray asked for
        self._bind_stock: Callable[[], int] | None = None
        self._encrypted = False
        self._server: Any = None

    def add_insecure_port(self, address: str) -> int:
        self._bind_stock = partial(self._stock.add_insecure_port, address)
        return UNBOUND

    def add_secure_port(self, address: str, credentials: Any) -> int:
        """Ray does so with `RAY_USE_TLS`, from 2.58 on; ours reads the same certificates."""
        self._bind_stock = partial(self._stock.add_secure_port, address, credentials)
        self._encrypted = True
        return UNBOUND

    async def start(self) -> None:
        if self._bind_stock is not None:
            try:
                self._server, port = await serving(self._replica, encrypted=self._encrypted)
                self._stock = None
            except Exception as error:
                activation.stay("replica", repr(error), "this replica serves with Ray's own transport")
                port = self._bind_stock()
            # Ray publishes what it finds here once the replica is initialized.
            self._replica._internal_grpc_port = port
            self._bind_stock = None
        if self._stock is not None:
            await self._stock.start()

    async def stop(self, grace: float | None) -> None:
        if self._server is not None:
            await self._server.stop(grace or 0.0)
        elif self._stock is not None:
            await self._stock.stop(grace)

    def __getattr__(self, name: str) -> Any:
        # Registering handlers and whatever else is asked of a server is for Ray's own, should it come to that.
        return getattr(self._stock, name)

    def __repr__(self) -> str:
        return f"<ReplicaPort {self._server or self._stock!r}>"


async def serving(replica: Any, *, encrypted: bool) -> tuple[Any, int]:
    """The started server of `replica` and its TCP port.

    Raises:
        OSError: nothing could be bound, or a certificate cannot be read.
        ValueError: a certificate or its key cannot be used.
    """
    import ray

    from ray_serve_grpc.seam import adapter
    from ray_serve_grpc.server import ReplicaServer

    identity = str(ray.get_runtime_context().get_actor_id())
    host, unix_path = adapter.server_binding(identity)
    server = ReplicaServer(
        replica,
        host=host,
        unix_path=unix_path,
        identity=identity,
        authorization=adapter.server_authorization(),
        tls=adapter.tls_credentials() if encrypted else None,
    )
    return server, await server.start()
