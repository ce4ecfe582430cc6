"""The facade through which the rest of the package sees Ray.

Ray is imported when something of it is asked for, never with this module: patches run while
parts of ray.serve are still being imported, and `ray.serve.context` at that moment would
bring the controller down.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import os
import pickle
import socket
import stat
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ray_serve_grpc import config
from ray_serve_grpc.seam.metadata import MetadataCodec
from ray_serve_grpc.seam.probe import Mismatch

if TYPE_CHECKING:
    import ray
    from ray.serve._private.common import ReplicaQueueLengthInfo, RequestMetadata, RunningReplicaInfo
    from ray.serve._private.replica_result import ReplicaResult
    from ray.serve._private.request_router.replica_wrapper import ReplicaWrapper
    from ray.serve.exceptions import RequestCancelledError

__all__ = [
    "ReplicaQueueLengthInfo",
    "ReplicaResult",
    "ReplicaWrapper",
    "RequestCancelledError",
    "authorization",
    "caller_is_http_proxy",
    "channel_is_encrypted",
    "in_ray_client",
    "inject_trace_context",
    "max_message_size",
    "metadata_from_stock",
    "metadata_from_wire",
    "metadata_to_stock",
    "metadata_to_wire",
    "replica_endpoints",
    "server_authorization",
    "server_binding",
    "socket_folder",
    "tls_credentials",
    "token_is_demanded",
    "tracing_is_on",
    "track_in_flight",
    "user_code_has_its_own_thread",
]

logger = logging.getLogger(config.LOGGER_NAME)

#: Ray's classes that the package builds on, found when they are first asked for
CLASSES = {
    "ReplicaQueueLengthInfo": "ray.serve._private.common",
    "ReplicaResult": "ray.serve._private.replica_result",
    "ReplicaWrapper": "ray.serve._private.request_router.replica_wrapper",
    "RequestCancelledError": "ray.serve.exceptions",
}

#: Linux's sun_path holds 108 bytes, the closing zero among them.
LONGEST_SOCKET_PATH = 107
SOCKET_FOLDER = "rsg"

_in_flight_numbers = itertools.count()


def __getattr__(name: str) -> Any:
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(CLASSES[name]), name)
    globals()[name] = found
    return found


# Request metadata.


def metadata_to_wire(metadata: RequestMetadata) -> tuple[tuple[str, ...], bytes]:
    """(strings, extra) of the wire's RequestMetadata: "" for a default, b"" where nothing else is set."""
    return _codec().to_wire(metadata)


def metadata_from_wire(strings: Sequence[str], extra: bytes | memoryview, *, is_streaming: bool) -> RequestMetadata:
    """Metadata as `Replica.handle_request*` takes it; always by value."""
    metadata: RequestMetadata = _codec().from_wire(strings, extra, is_streaming=is_streaming)
    return metadata


def metadata_to_stock(metadata: RequestMetadata) -> bytes:
    """As Ray's own ASGIService has it."""
    return pickle.dumps(metadata)


def metadata_from_stock(pickled: bytes | memoryview) -> RequestMetadata:
    metadata: RequestMetadata = pickle.loads(pickled)
    return metadata


@functools.cache
def _codec() -> MetadataCodec:
    from ray.serve._private.common import RequestMetadata

    return MetadataCodec(RequestMetadata)


# The context of a request.


def track_in_flight(result: ReplicaResult) -> Callable[[], None]:
    """Makes `result` a child of the request being served here, so that it is cancelled along with it.

    Returns what takes it out again. Both must run on the thread of the caller's loop, as Ray's
    own bookkeeping demands.
    """
    context = _serve_context()
    parent = context._get_serve_request_context()._internal_request_id
    number = next(_in_flight_numbers)
    context._add_in_flight_request(parent, number, result)
    return partial(context._remove_in_flight_request, parent, number)


def caller_is_http_proxy() -> bool:
    """Whether the request being made here is the HTTP proxy's, which wants its bytes as they are."""
    return bool(_serve_context()._get_serve_request_context().is_http_request)


def inject_trace_context(kwargs: MutableMapping[str, Any]) -> None:
    """Adds the caller's trace context to a call's keyword arguments where Ray's tracing is on.

    Actor calls carry it by themselves; the replica takes it out again before user code sees it.
    """
    tracing = _tracing()
    if tracing._is_tracing_enabled():
        kwargs["_ray_trace_ctx"] = tracing._DictPropagator.inject_current_context()


def tracing_is_on() -> bool:
    """Whether Ray's tracing or Serve's is on in this process."""
    return bool(_tracing()._is_tracing_enabled() or _serve_tracing_is_on()())


@functools.cache
def _serve_tracing_is_on() -> Callable[[], bool]:
    try:
        module = importlib.import_module("ray.serve._private.tracing_utils")
    except ImportError:
        return bool
    return getattr(module, "is_tracing_enabled", bool)


@functools.cache
def _serve_context() -> Any:
    return importlib.import_module("ray.serve.context")


@functools.cache
def _tracing() -> Any:
    return importlib.import_module("ray.util.tracing.tracing_helper")


def in_ray_client() -> bool:
    """Whether this process is the driver of a Ray Client, which cannot reach replicas directly."""
    client: Any = importlib.import_module("ray.util.client").ray
    return bool(client.is_connected())


def user_code_has_its_own_thread(replica: Any) -> bool:
    """Whether results come to the loop of `Replica` from the loop of another thread."""
    wrapper = getattr(replica, "_user_callable_wrapper", None)
    return bool(getattr(wrapper, "_run_user_code_in_separate_thread", True))


# Where replicas are, and who may talk to them.


def max_message_size() -> int:
    """In bytes, for either direction."""
    return config.settings().max_message_size


def replica_endpoints(replica_info: RunningReplicaInfo, actor_id: ray.ActorID) -> list[str]:
    """Endpoints of a replica in the order they are to be tried, "unix:/path" or "tcp:host:port".

    Empty when none of the allowed lanes reaches it.
    """
    lanes = config.settings().lanes
    endpoints = []
    if "unix" in lanes and replica_info.node_id and replica_info.node_id == _own_node_id():
        path = _socket_path(actor_id.hex())
        # Bound before the replica is published: without one, it is a replica without the plugin.
        if path is not None and os.path.exists(path):
            endpoints.append(f"unix:{path}")
    if "tcp" in lanes and replica_info.port is not None:
        host = f"[{replica_info.node_ip}]" if ":" in (replica_info.node_ip or "") else replica_info.node_ip
        endpoints.append(f"tcp:{host}:{replica_info.port}")
    return endpoints


def server_binding(actor_id: str) -> tuple[str, str | None]:
    """(address of this node, path of the Unix-domain socket or None) for the replica that runs here."""
    host = _host_to_bind(importlib.import_module("ray.util").get_node_ip_address())
    if "unix" not in config.settings().lanes:
        return host, None
    path = _socket_path(actor_id)
    if path is not None and not _private_folder(os.path.dirname(path)):
        path = None
    if path is None and (folder := _session_folder()) is not None:
        logger.warning(
            "No socket below %s, whose path is too long (%d bytes at most) or which is not this user's alone: callers "
            "on this node reach replica %s by TCP, without shared memory.",
            folder,
            LONGEST_SOCKET_PATH,
            actor_id,
        )
    return host, path


def socket_folder() -> str | None:
    """Where the replicas of this node have their sockets; None in a process outside of any Ray session."""
    folder = _session_folder()
    return None if folder is None else os.path.join(folder, SOCKET_FOLDER)


def authorization() -> str | None:
    """Value of the `authorization` header that Ray would send to a replica, or None without token auth."""
    try:
        from ray._private.authentication import authentication_utils
        from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
    except ImportError:
        return None
    if not authentication_utils.is_token_auth_enabled():
        return None
    loader = AuthenticationTokenLoader.instance()
    if not loader.has_token():
        return None
    headers: dict[str, str] = loader.get_token_for_http_header()
    return next((value for name, value in headers.items() if name.lower() == "authorization"), None)


def token_is_demanded() -> bool:
    """Whether Ray's token authentication is on in this process."""
    try:
        from ray._private.authentication import authentication_utils
    except ImportError:
        return False
    return bool(authentication_utils.is_token_auth_enabled())


def server_authorization() -> str | None:
    """The header that a replica must demand: what Ray's own server on the same port would, None if it would not.

    Raises:
        Mismatch: Ray demands a token, and there is none in this process to compare with.
    """
    replica = importlib.import_module("ray.serve._private.replica")
    if not hasattr(replica, "create_grpc_server_with_interceptors"):
        return None  # Ray before 2.58 leaves this port open
    from ray._private.authentication import authentication_utils

    if not authentication_utils.is_token_auth_enabled():
        return None
    token = authorization()
    if token is None:
        raise Mismatch("token authentication is on, but this process has no token")
    return token


def channel_is_encrypted() -> bool:
    """Whether Ray's own channel to a replica would use TLS: with `RAY_USE_TLS`, read the way Ray reads it.

    Before 2.58 Ray left this port in plain text whatever the setting, and so do peers without the plugin.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return False
    return hasattr(importlib.import_module("ray.serve._private.request_router.replica_wrapper"), "init_grpc_channel")


def tls_credentials() -> tuple[bytes, bytes, bytes]:
    """(certificate chain, private key, certificate authorities) from the files that Ray's settings name.

    Read anew each time: a rotated certificate counts for every replica and channel from then on.

    Raises:
        RuntimeError: a setting is missing; the text names them.
        OSError: a file cannot be read.
    """
    return cast("tuple[bytes, bytes, bytes]", importlib.import_module("ray._common.tls_utils").load_certs_from_env())


def _host_to_bind(node_ip: str) -> str:
    """The node's address, or all of them, as Ray does it, where that one belongs to a gateway in front of the node."""
    ipv6 = ":" in node_ip
    with socket.socket(socket.AF_INET6 if ipv6 else socket.AF_INET) as trial:
        try:
            trial.bind((node_ip, 0))
        except OSError as error:
            logger.debug("%s cannot be bound (%s): all addresses", node_ip, error)
            return "::" if ipv6 else "0.0.0.0"
    return node_ip


def _own_node_id() -> str | None:
    import ray

    return ray.get_runtime_context().get_node_id() if ray.is_initialized() else None


def _socket_path(actor_id: str) -> str | None:
    """Both ends derive it: the caller from the replica's actor id, the replica from its own."""
    folder = socket_folder()
    if folder is None:
        return None
    path = os.path.join(folder, f"{actor_id[:16]}.sock")
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        logger.debug("no unix lane: %s is longer than %d bytes", path, LONGEST_SOCKET_PATH)
        return None
    return path


def _session_folder() -> str | None:
    node: Any = importlib.import_module("ray._private.worker")._global_node
    return None if node is None else str(node.get_session_dir_path())


def _private_folder(path: str) -> bool:
    """Makes the folder, or sees that the one there is nobody else's."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.lstat(path)
    except OSError as error:
        logger.debug("no unix lane: %s", error)
        return False
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return True
    logger.debug("no unix lane: %s is not a folder of this user alone", path)
    return False
