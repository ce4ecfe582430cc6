"""One channel for each replica, shared by every router of the process."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ray_serve_grpc import background, config, lanes
from ray_serve_grpc._native import Channel
from ray_serve_grpc.seam import adapter


class Peer:
    """A replica as its callers see it: who it is, where it is, and the channel to it."""

    __slots__ = ("actor_id", "channel", "deployment", "endpoints", "holders")

    def __init__(self, actor_id: bytes, endpoints: Sequence[str], deployment: str, channel: Channel) -> None:
        self.actor_id = actor_id
        self.endpoints = tuple(endpoints)
        self.deployment = deployment
        self.channel = channel
        self.holders = 0

    def where(self, lane: str = "") -> str:
        """For error texts: which replica, at which address, over which lane."""
        lane = lane or self.channel.lane
        return (
            f"replica {self.actor_id.hex()} of deployment {self.deployment!r} at {' or '.join(self.endpoints)}"
            f"{f' (lane {lane})' if lane else ''}"
        )

    def __repr__(self) -> str:
        return f"<Peer {self.where()}, {self.holders} holders>"


_peers: dict[bytes, Peer] = {}
#: Reentrant: garbage collection may close a wrapper, and so release its channel, while the table is in use.
_lock = threading.RLock()


def lease(actor_id: bytes, endpoints: Sequence[str], *, deployment: str) -> Peer:
    """The peer with this actor id. Give it back with `release`; its channel closes when the last holder did."""
    with _lock:
        peer = _peers.get(actor_id)
        if peer is None:
            peer = _peers[actor_id] = Peer(actor_id, endpoints, deployment, channel_to(actor_id, endpoints))
        peer.holders += 1
        return peer


def release(peer: Peer) -> None:
    """Calls in flight run to their end."""
    with _lock:
        peer.holders -= 1
        if peer.holders:
            return
        if _peers.get(peer.actor_id) is peer:
            del _peers[peer.actor_id]
    peer.channel.close()


def statistics() -> dict[str, dict[str, int]]:
    """Actor id in hex -> the counters of the channel to it."""
    with _lock:
        return {peer.actor_id.hex(): peer.channel.statistics() for peer in list(_peers.values())}


def channel_to(actor_id: bytes, endpoints: Sequence[str]) -> Channel:
    """A channel of its own, with this process's settings, token and certificates."""
    lanes.prepare()
    background.start()
    settings = config.settings()
    return Channel(
        endpoints,
        identity=actor_id.hex(),
        authorization=adapter.authorization(),
        tls=adapter.tls_credentials() if adapter.channel_is_encrypted() else None,
        max_message_size=settings.max_message_size,
        connect_timeout=settings.connect_timeout,
        keepalive_interval=settings.keepalive_interval,
        keepalive_timeout=settings.keepalive_timeout,
    )
