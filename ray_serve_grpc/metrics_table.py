"""Every metric that goes to Ray: name, tags and meaning stand together with where its values come from.

docs/metrics.md holds the table that `python -m ray_serve_grpc.metrics_table` prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

#: Tags that every metric has, and where their values come from: see `metrics_export.Origin`.
COMMON_TAGS = ("application", "deployment", "replica", "component", "pid")

Number = int | float
#: (values of the metric's own tags, value)
Sample = tuple[tuple[str, ...], Number]


@dataclass(frozen=True)
class Snapshot:
    """What the native core has counted, read at one time."""

    counters: Mapping[str, int]
    #: (role, lane, kind, outcome, calls)
    outcomes: Iterable[tuple[str, str, str, str, int]]
    #: (stage, observations in each bucket, sum in microseconds)
    timings: Iterable[tuple[str, list[int], int]]
    #: upper bounds of the buckets but the last, in microseconds
    bounds: list[int]


@dataclass(frozen=True)
class Metric:
    """One metric. Ray's endpoint shows it with `ray_` before its name, and a counter with `_total` after it."""

    name: str
    kind: Literal["counter", "gauge"]
    tags: tuple[str, ...]
    meaning: str
    samples: Callable[[Snapshot], Iterator[Sample]]

    @property
    def exposed(self) -> str:
        """The name at Ray's Prometheus endpoint."""
        return f"ray_{self.name}{'_total' if self.kind == 'counter' else ''}"


def of(**counters: str) -> Callable[[Snapshot], Iterator[Sample]]:
    """Samples of one tag: its value -> name of the native counter."""

    def samples(snapshot: Snapshot) -> Iterator[Sample]:
        for value, counter in counters.items():
            yield (value,), snapshot.counters[counter]

    return samples


def only(counter: str) -> Callable[[Snapshot], Iterator[Sample]]:
    """The sample of a metric without tags of its own."""

    def samples(snapshot: Snapshot) -> Iterator[Sample]:
        yield (), snapshot.counters[counter]

    return samples


def calls(snapshot: Snapshot) -> Iterator[Sample]:
    for role, lane, kind, outcome, count in snapshot.outcomes:
        yield (role, kind, lane, outcome), count


def in_flight(snapshot: Snapshot) -> Iterator[Sample]:
    ended = {"caller": 0, "replica": 0}
    for role, _lane, _kind, _outcome, count in snapshot.outcomes:
        ended[role] += count
    for role, counter in (("caller", "client_calls_begun"), ("replica", "server_calls_begun")):
        # The two are not read at the same instant.
        yield (role,), max(0, snapshot.counters[counter] - ended[role])


def moved_bytes(snapshot: Snapshot) -> Iterator[Sample]:
    counters = snapshot.counters
    yield ("sent", "socket"), counters["client_bytes_sent"] + counters["server_bytes_sent"]
    yield ("received", "socket"), counters["client_bytes_received"] + counters["server_bytes_received"]
    yield ("sent", "shm"), counters["shm_bytes_sent"]
    yield ("received", "shm"), counters["shm_bytes_received"]


def open_connections(snapshot: Snapshot) -> Iterator[Sample]:
    for role, prefix in (("caller", "client"), ("replica", "server")):
        made, ended = (snapshot.counters[f"{prefix}_connections{suffix}"] for suffix in ("", "_ended"))
        yield (role,), max(0, made - ended)


def stage_buckets(snapshot: Snapshot) -> Iterator[Sample]:
    for stage, counts, _sum in snapshot.timings:
        bounds = [*(f"{bound / 1e6:g}" for bound in snapshot.bounds), "+Inf"]
        for bound, count in zip(bounds, accumulate(counts), strict=True):
            yield (stage, bound), count


def stage_sum(snapshot: Snapshot) -> Iterator[Sample]:
    for stage, _counts, microseconds in snapshot.timings:
        yield (stage,), microseconds / 1e6


def stage_count(snapshot: Snapshot) -> Iterator[Sample]:
    for stage, counts, _sum in snapshot.timings:
        yield (stage,), sum(counts)


TABLE: tuple[Metric, ...] = (
    Metric(
        "serve_grpc_calls",
        "counter",
        ("role", "kind", "lane", "outcome"),
        "Calls that have ended. role: caller, replica. kind: unary, streaming. lane: unix, tcp, stock (Ray's own "
        "protocol), none (never sent). outcome: ok, user_error, rejected (no slot: the router asks another replica), "
        "cancelled, unavailable (not reached, lost, or shutting down), failed. A replica does not see calls that never "
        "reached it.",
        calls,
    ),
    Metric("serve_grpc_in_flight", "gauge", ("role",), "Calls under way.", in_flight),
    Metric(
        "serve_grpc_bytes",
        "counter",
        ("direction", "lane"),
        "Bytes of messages. direction: sent, received. lane: socket, shm.",
        moved_bytes,
    ),
    Metric(
        "serve_grpc_rejections",
        "counter",
        ("role",),
        "Requests for which the replica had no slot: each one is tried again elsewhere.",
        of(caller="client_rejections", replica="server_rejections"),
    ),
    Metric(
        "serve_grpc_calls_revoked",
        "counter",
        (),
        "Requests that a replica found given up by their caller, and did not run: they may have run elsewhere.",
        only("server_calls_revoked"),
    ),
    Metric(
        "serve_grpc_cancels",
        "counter",
        ("role",),
        "Calls that were cancelled, or at a replica also lost with their caller's connection.",
        of(caller="client_cancels", replica="server_cancels"),
    ),
    Metric(
        "serve_grpc_retries",
        "counter",
        (),
        "Calls that found their connection lost before they were sent, and took another one. What the router tries "
        "again on another replica is counted as rejected or unavailable.",
        only("client_retries"),
    ),
    Metric("serve_grpc_connections", "gauge", ("role",), "Connections that are open.", open_connections),
    Metric(
        "serve_grpc_connections_made",
        "counter",
        ("role",),
        "Connections to replicas, and those that came in.",
        of(caller="client_connections", replica="server_connections"),
    ),
    Metric(
        "serve_grpc_reconnects",
        "counter",
        (),
        "Connections to replicas in the place of an earlier one.",
        only("client_reconnects"),
    ),
    Metric(
        "serve_grpc_connections_lost",
        "counter",
        (),
        "Connections to replicas that ended with an error.",
        only("client_connections_lost"),
    ),
    Metric(
        "serve_grpc_connect_failures",
        "counter",
        (),
        "Attempts to connect that failed.",
        only("client_connect_failures"),
    ),
    Metric(
        "serve_grpc_refused_peers",
        "counter",
        ("reason",),
        "What a replica refused. reason: token (calls whose token was missing or wrong), handshake (connections that "
        "TLS or the check of a socket's user refused).",
        of(token="server_unauthenticated", handshake="server_handshake_failures"),
    ),
    Metric(
        "serve_grpc_stalls",
        "counter",
        ("where",),
        "Times that something waited for flow control. where: window (a replica for HTTP/2's window or the socket), "
        "replica_queue (user code for 1 MiB or 1,024 messages not yet written), caller_queue (a stream for its "
        "reader).",
        of(window="server_window_stalls", replica_queue="server_queue_stalls", caller_queue="client_queue_stalls"),
    ),
    Metric("serve_grpc_wakeups", "counter", (), "Wake-ups of event loops by the I/O thread.", only("bridge_wakeups")),
    Metric(
        "serve_grpc_wakeup_completions",
        "counter",
        (),
        "What these wake-ups brought: divided by them, the batch size.",
        only("bridge_completions"),
    ),
    Metric(
        "serve_grpc_shm_messages",
        "counter",
        ("direction",),
        "Messages with bytes in shared memory. direction: sent, received.",
        of(sent="shm_messages_sent", received="shm_messages_received"),
    ),
    Metric(
        "serve_grpc_shm_forwarded_bytes",
        "counter",
        (),
        "Bytes that were passed on where they lay, without a copy.",
        only("shm_bytes_forwarded"),
    ),
    Metric(
        "serve_grpc_shm_segments",
        "gauge",
        ("state",),
        "Segments of shared memory of this process. state: leased (being written to, or lent to a peer), free (warm, "
        "wait for a message).",
        of(leased="shm_pool_leased", free="shm_pool_free"),
    ),
    Metric("serve_grpc_shm_bytes", "gauge", (), "Bytes of these segments.", only("shm_pool_bytes")),
    Metric(
        "serve_grpc_shm_trimmed_segments",
        "counter",
        (),
        "Segments that were given back to the system.",
        only("shm_trimmed"),
    ),
    Metric(
        "serve_grpc_fallbacks",
        "counter",
        ("of",),
        "Times that the second-best was taken. of: shm (a message found no warm segment and went by the socket), lane "
        "(a connection found its first lane closed and took the next).",
        of(shm="shm_fallbacks", lane="client_lane_fallbacks"),
    ),
    Metric(
        "serve_grpc_stage_seconds_bucket",
        "counter",
        ("stage", "le"),
        "Observations of at most `le` seconds, for `histogram_quantile`. Stages: see below.",
        stage_buckets,
    ),
    Metric("serve_grpc_stage_seconds_sum", "counter", ("stage",), "Sum of the observations.", stage_sum),
    Metric("serve_grpc_stage_seconds_count", "counter", ("stage",), "Number of observations.", stage_count),
)


def markdown() -> str:
    """The table of docs/metrics.md."""
    lines = ["| metric at Ray's endpoint | type | tags of its own | meaning |", "| --- | --- | --- | --- |"]
    for metric in TABLE:
        tags = ", ".join(f"`{tag}`" for tag in metric.tags)
        lines.append(f"| `{metric.exposed}` | {metric.kind} | {tags} | {metric.meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
