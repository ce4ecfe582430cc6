"""The Rust core: HTTP/2 channels and servers driven by tokio, off the GIL.

Nothing here knows Ray. Threads: every method may be called from any thread that
holds the GIL; no I/O thread ever takes it. Completions travel through a
`Bridge`, one per event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

__version__: str

#: anything that exports a C-contiguous buffer
BytesLike: TypeAlias = Any

# What a message holds (`kind`), as protos/inter_deployment.proto numbers it.
KIND_VALUE: Final = 0  # a value in the serialiser the caller asked for
KIND_RAW: Final = 1  # bytes that are handed on as they are (the HTTP proxy's)
KIND_ERROR: Final = 2  # a pickled RayTaskError
KIND_ERROR_TEXT: Final = 3  # the text of an error that could not be pickled

# The four methods of InterDeploymentService and of Ray's ASGIService (`method`).
METHOD_UNARY: Final = 0  # HandleRequest
METHOD_STREAMING: Final = 1  # HandleRequestStreaming
METHOD_UNARY_REJECTION: Final = 2  # HandleRequestWithRejection
METHOD_STREAMING_REJECTION: Final = 3  # HandleRequestWithRejectionStreaming

# Which service carries a call (`dialect`).
DIALECT_NATIVE: Final = 0  # ray_serve_grpc.v1.InterDeploymentService
DIALECT_STOCK: Final = 1  # ray.serve.ASGIService

# gRPC status codes used by the core.
STATUS_OK: Final = 0
STATUS_CANCELLED: Final = 1
STATUS_UNKNOWN: Final = 2
STATUS_DEADLINE_EXCEEDED: Final = 4
STATUS_RESOURCE_EXHAUSTED: Final = 8
STATUS_UNIMPLEMENTED: Final = 12
STATUS_INTERNAL: Final = 13
STATUS_UNAVAILABLE: Final = 14
STATUS_UNAUTHENTICATED: Final = 16

class Buffer:
    """Received memory: exports a writable, contiguous, private buffer of bytes.

    Starts at a multiple of 64. Freed (or its lease returned) when the last view of it dies.
    """

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

#: (certificate chain, private key, certificate authorities), each in PEM
TLSCredentials: TypeAlias = tuple[bytes, bytes, bytes]

#: (kind, body, buffers): the body is `bytes` when small, else a `Buffer`
Message: TypeAlias = tuple[int, "bytes | Buffer", "tuple[Buffer, ...]"]

class Bridge:
    """Brings what finished on the I/O thread to one event loop.

    `fileno()` becomes readable when something is ready; `drain()` then tells what of it, all of a batch in one go.
    `ray_serve_grpc.bridge` puts the two together.
    """

    def __init__(self) -> None: ...
    def fileno(self) -> int: ...
    def drain(self) -> list[tuple[Any, tuple[Any, ...] | None]]:
        """Callbacks and their arguments, and futures to be resolved, which have none. In the order in which they came.

        It calls none of them: see `ray_serve_grpc.bridge`.
        """
    def close(self) -> None: ...
    def statistics(self) -> dict[str, int]: ...

class Call:
    """One call of a client channel. Dropping an unfinished one cancels it."""

    def admission(self) -> tuple[bool, int] | None:
        """(accepted, num_ongoing_requests) as the response's headers told, or None if they have not come."""
    def take(self) -> Message | None:
        """The next message that has come, or None. Taking makes room: a stream is held back until it is read."""
    def take_all(self) -> list[Message]: ...
    def status(self) -> tuple[int, str] | None:
        """(gRPC status, detail) once the call ended and every message of it was received, else None.

        Messages may still wait for `take()` then.
        """
    @property
    def sent(self) -> bool:
        """False only if the request certainly never reached the replica's user code:
        it was never written to the connection, or the peer refused it before it ran."""
    @property
    def lane(self) -> str:
        """What carried the call: "unix", "tcp" or "" while not yet sent."""
    def watch_admission(self, bridge: Bridge, future: asyncio.Future[None]) -> None:
        """Sets the future's result to None when the admission is known or the call ended, also if already so."""
    def watch_message(self, bridge: Bridge, future: asyncio.Future[None]) -> None:
        """Sets the future's result to None when a message waits or the call ended, also if already so."""
    def watch_done(self, bridge: Bridge, callback: Callable[[], object]) -> None:
        """Has `bridge` call back when the call ended (all received, failed or cancelled)."""
    def wait(self, timeout: float | None) -> bool:
        """Blocks without the GIL until a message waits or the call ended. False when `timeout` seconds passed first.

        Handles signals about every 100 ms (KeyboardInterrupt is raised).
        """
    def cancel(self) -> None:
        """RST_STREAM(CANCEL); the status becomes CANCELLED. Nothing when the call has ended."""

class Channel:
    """One connection to one replica, made on the first call and made again when it was lost."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        identity: str = "",
        authorization: str | None = None,
        tls: TLSCredentials | None = None,
        max_message_size: int = ...,
        connect_timeout: float = 5.0,
        keepalive_interval: float = 5.0,
        keepalive_timeout: float = 10.0,
    ) -> None:
        """Args:
        endpoints: tried in order, "unix:/path" or "tcp:host:port" (an IPv6 host in brackets).
        identity: what the peer's Handshake must name (the replica's actor id, hex); "" accepts any.
        authorization: value of the `authorization` header of every call. Never shown by `repr`.
        tls: for the TCP endpoints: TLS 1.3, with this certificate shown to the server. The server's must be
            signed by one of the authorities and name the host of the endpoint. A Unix-domain socket stays plain.
        max_message_size: bytes; a larger message from the peer ends its call with RESOURCE_EXHAUSTED.
        """
    def dialect(self) -> int | None:
        """DIALECT_NATIVE or DIALECT_STOCK once a handshake settled it, else None. Kept over reconnects."""
    def connect(self) -> None:
        """Starts to connect and shake hands, if it is not connected or under way."""
    def watch_ready(self, bridge: Bridge, callback: Callable[[], object]) -> None:
        """Starts to connect if need be; calls back when the connection is settled or has failed.

        After it: `dialect()` is set, or `failure()` says why not.
        """
    def failure(self) -> tuple[int, str] | None:
        """(gRPC status, text) of the last attempt to connect, None if it succeeded or none was made."""
    def call(
        self,
        method: int,
        metadata: tuple[str, ...],
        extra: bytes,
        body: BytesLike | list[BytesLike],
        buffers: Sequence[BytesLike],
        flush: bool = True,
        traceparent: str | None = None,
    ) -> Call:
        """Sends a CallRequest to InterDeploymentService.

        Args:
            metadata: strings for the fields 1, 2, 3, … of `RequestMetadata`, in order; an empty one is left out.
            extra: field `extra` of `RequestMetadata`; b"" is left out.
            body: the serialised value; parts of a list are sent one after the other as one.
            buffers: out-of-band buffers. Bytes-like objects over 4 KiB are not copied: they are
                held until they are written, and must not change before.
            flush: without it the call may stay queued until `flush` or a call with it.
            traceparent: header of W3C Trace Context that goes along.
        """
    def flush(self) -> None:
        """Has queued calls sent now."""
    def call_stock(self, method: int, fields: Sequence[BytesLike]) -> Call:
        """Sends the fields 1, 2, 3 … as a message to Ray's ASGIService.

        Its answers are messages (is_error, serialized_message, ()).
        """
    def ping(self, timeout: float = 5.0) -> tuple[float, str, str, bool]:
        """(seconds of a round trip, lane, version of the plugin at the peer, whether shared memory was agreed on).

        Connects if need be, which the time leaves out; then exchanges a small message that no user code sees. The
        version is "" where the peer has no plugin. Blocks without the GIL for `timeout` seconds at most.

        Raises:
            ConnectionError: there is no connection, or no answer in time.
        """
    @property
    def quiet(self) -> bool:
        """Whether no call is under way, and the last one was so alone."""
    @property
    def lane(self) -> str:
        """Lane of the present connection: "unix", "tcp" or "" when there is none."""
    def close(self) -> None:
        """Ends the connection once the calls in flight have ended; new calls fail with UNAVAILABLE."""
    def statistics(self) -> dict[str, int]: ...

class ServerCall:
    """One call that came in. Dropping it unfinished ends it with INTERNAL."""

    @property
    def method(self) -> int: ...
    @property
    def dialect(self) -> int: ...
    @property
    def metadata(self) -> tuple[str, ...]:
        """Native: the strings of `RequestMetadata`'s fields 1 to 9 in order, "" where unset. Stock: ()."""
    @property
    def extra(self) -> bytes: ...
    @property
    def traceparent(self) -> str | None:
        """The header of W3C Trace Context as it came, unchecked."""
    @property
    def body(self) -> bytes | Buffer: ...
    @property
    def buffers(self) -> tuple[Buffer, ...]: ...
    @property
    def fields(self) -> tuple[bytes | Buffer, ...]:
        """Stock: the fields 1 to 3 of ASGIRequest (metadata, args, kwargs). Native: ()."""
    @property
    def peer(self) -> str: ...
    @property
    def lane(self) -> str: ...
    def release(self) -> None:
        """Lets go of the request's memory early; `body`, `buffers` and `fields` are empty from here on."""
    def admit(self, accepted: bool, num_ongoing_requests: int, flush: bool = True) -> bool:
        """Sends the response's headers at once. Without it they leave with the first message.

        Without `flush`, those of a call whose admission is safe already may stay queued until the next flush.
        False when it is accepted and `claim` is false: then nothing is sent.
        """
    def claim(self) -> bool:
        """Takes the call, where its caller can look that up. False when the caller has given it up before: it may run
        elsewhere by now, and user code must not start."""
    @property
    def admission_safe(self) -> bool:
        """Whether the caller knows, or can look up if this process dies now, that the call was taken.

        User code must not start before: a caller that does not know sends the request to another replica.
        """
    def watch_admission_safe(self, bridge: Bridge, future: asyncio.Future[None]) -> None:
        """Sets the future's result to None when the admission is safe, or the call was cancelled or has ended."""
    def send(
        self, kind: int, body: BytesLike | list[BytesLike], buffers: Sequence[BytesLike] = (), flush: bool = True
    ) -> bool:
        """Queues one message. False when the queue is over its high-water mark (1 MiB or 1,024 messages not yet
        written): wait with `watch_writable` before the next one. Nothing when the call was cancelled.
        Without `flush` a stream's message may stay queued until `flush`, `finish` or a message with it.
        In the stock dialect `kind` is ASGIResponse.is_error and `buffers` must be empty."""
    def flush(self) -> None:
        """Has queued messages written now."""
    def watch_writable(self, bridge: Bridge, future: asyncio.Future[None]) -> None:
        """Sets the future's result to None when the queue is below half its mark or the call was cancelled."""
    def finish(self, status: int = 0, detail: str = "", flush: bool = True) -> None:
        """Ends the call with trailers; without `flush` they may stay queued until the next one.

        `send` + `finish` of a unary call leave in one write.
        """
    def watch_cancel(self, bridge: Bridge, callback: Callable[[], object]) -> None:
        """Has `bridge` call back if the caller cancels or its connection is lost before `finish`."""
    @property
    def cancelled(self) -> bool: ...

class Server:
    """A gRPC server on one TCP port and, optionally, a Unix-domain socket."""

    def __init__(
        self,
        bridge: Bridge,
        on_call: Callable[[ServerCall], object],
        *,
        host: str,
        port: int = 0,
        unix_path: str | None = None,
        identity: str = "",
        authorization: str | None = None,
        tls: TLSCredentials | None = None,
        on_notice: Callable[[str], object] | None = None,
        max_message_size: int = ...,
        version: str = "",
        reflection: bool = False,
    ) -> None:
        """Binds and serves at once. `bridge` runs `on_call`, once per call, when its request is complete.

        Args:
            host: address to bind; ":: " style IPv6 without brackets.
            identity: what `Handshake` answers (the replica's actor id, hex).
            authorization: every call must carry this `authorization` header, compared in constant time
                before its body is read; None lets everybody in. A connection without such a call is read for
                256 KiB and 10 s at most.
            tls: for TCP: TLS 1.3 only. Callers must show a certificate that one of the authorities has signed;
                with b"" for these, anybody may call.
            on_notice: run by `bridge` with a text for the log: refused calls and handshakes,
                counted and thinned out to one of a kind in 30 s.
            reflection: whether generic gRPC clients may ask what is served (v1 and v1alpha).
        Raises:
            OSError: the address or the path cannot be bound.
            ValueError: `tls` cannot be used; the text does not show it.
        """
    @property
    def port(self) -> int: ...
    @property
    def unix_path(self) -> str | None: ...
    def stop(self, grace: float, bridge: Bridge, callback: Callable[[], object]) -> None:
        """GOAWAY to all peers and no new connection; calls back when the ongoing calls have ended, or, `grace`
        seconds later, when what is left was cut off."""
    def close(self) -> None:
        """Cuts everything off now."""
    def statistics(self) -> dict[str, int]: ...

def set_shm_limit(bytes: int) -> None:
    """Bytes of shared memory that this process may have for what it sends. 0, as at the start: no shared memory.

    Connections and servers made from here on go by it.
    """

def secure(buffer: BytesLike) -> Buffer:
    """A `snapshot` of `buffer`, or else a copy that nobody changes, made without the GIL.

    Where it is large and there is room, it lies in shared memory already: it is lent to each peer that it is sent
    to without another copy.
    """

def snapshot(buffer: BytesLike) -> Buffer | None:
    """The bytes of a received `buffer` as they are now, whatever is written to it later, without a copy.

    None when it does not lie in a peer's shared memory, is smaller than 1 MiB, or was written to. It looks at its
    pages without the GIL, 6 to 10 microseconds per MB.
    """

def to_bytes(buffer: BytesLike) -> bytes:
    """As `bytes(buffer)`, but from 1 MiB on the copy is made without the GIL, and from 32 MiB on by two
    threads, into huge pages where the system has them."""

def statistics() -> dict[str, int]:
    """Counters of this process: calls by lane and kind, bytes, connections, cancels, rejections."""

def outcomes() -> list[tuple[str, str, str, str, int]]:
    """(role, lane, kind, outcome, calls) of the calls that have ended, where there were any.

    role: caller, replica. lane: tcp, unix, stock, or none for a call that was never sent. kind: unary, streaming.
    outcome: ok, user_error, rejected, cancelled, unavailable, failed.
    """

#: Upper bounds of the buckets of `timings`, in microseconds; one bucket follows them.
TIMING_BOUNDS: Final[list[int]] = ...

def timings() -> list[tuple[str, list[int], int]]:
    """(stage, observations in each bucket, sum of them in microseconds)."""

def observe(stage: str, nanoseconds: int, /) -> None:
    """Counts a time that was taken in Python.

    Raises:
        KeyError: there is no such stage.
    """

def time_calls(on: bool) -> None:
    """Whether the core times the stages of calls; not from the start."""

def set_log_level(level: int) -> None:
    """Keeps what the core has to tell, of this severity and above (as `logging` numbers them), for `take_log_records`.

    At most 256 records, and 10 of a kind within 30 s; the rest is counted.
    """

def take_log_records() -> list[tuple[int, float, str]]:
    """(level, seconds since 1970, text) of what was kept, oldest first."""
