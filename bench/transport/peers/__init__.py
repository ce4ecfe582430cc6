"""The transports, by the name that stands in the results."""

from __future__ import annotations

import importlib

from bench.transport.peers.peer import Peer

#: name -> module and class. A module is imported where it is used, since each has a library of its own.
_PEERS = {
    "native": ("ours", "OverUnix"),
    "native-tcp": ("ours", "OverTcp"),
    "native-tls": ("ours", "OverTls"),
    "grpc.aio": ("grpc_aio", "GrpcAio"),
    "pygrpc-native": ("grpc_aio", "PygrpcNative"),
    "pyzmq": ("zmq_pickle", "ZmqPickle"),
    "unix-socket": ("unix_socket", "UnixSocket"),
    "memcpy": ("memcpy", "Memcpy"),
}
NAMES = tuple(_PEERS)


def peer(name: str) -> Peer:
    """Raises ImportError when the peer's library is not installed."""
    module, kind = _PEERS[name]
    made: Peer = getattr(importlib.import_module(f"bench.transport.peers.{module}"), kind)()
    return made
