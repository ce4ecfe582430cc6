"""What goes on around a native call: its end, its late start, and a start that failed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from ray_serve_grpc._native import STATUS_CANCELLED

if TYPE_CHECKING:
    from ray_serve_grpc._native import Bridge, Message

#: Held for a few instructions at a time, by all calls of the process.
_lock = threading.Lock()


class Owner(Protocol):
    """The result that a call belongs to."""

    def failure(self) -> BaseException | None:
        """Why the call ended without a proper end, None when it ended well."""

    def cancel(self) -> None: ...


class Completion:
    """Runs the callbacks of a call once it ended, also when nobody reads its result.

    The native call holds it until then. A unary call's result is held as well, so that a
    request whose response was thrown away runs to its end, as an actor call does. A stream's
    is not: whoever drops it wants no more of it.
    """

    __slots__ = ("_callbacks", "_kept", "_owner", "untrack")

    def __init__(self, owner: Owner, *, keep: bool) -> None:
        self._owner = ref(owner)
        self._kept = owner if keep else None
        self._callbacks: list[Callable[[Any], object]] | None = []
        self.untrack: Callable[[], object] | None = None

    def owner(self) -> Owner | None:
        return self._owner()

    def add(self, callback: Callable[[Any], object]) -> None:
        with _lock:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        callback(self._outcome())

    def __call__(self) -> None:
        with _lock:
            callbacks, self._callbacks = self._callbacks, None
        if callbacks is None:
            return
        untrack, self.untrack = self.untrack, None
        try:
            if untrack is not None:
                untrack()
        finally:
            outcome = self._outcome()
            self._kept = None
            for callback in callbacks:
                callback(outcome)

    def _outcome(self) -> BaseException | None:
        owner = self._owner()
        return None if owner is None else owner.failure()


class Child:
    """A stream in Ray's table of in-flight requests, which must not keep it alive."""

    __slots__ = ("_owner",)

    def __init__(self, owner: Owner) -> None:
        self._owner = ref(owner)

    def cancel(self) -> None:
        owner = self._owner()
        if owner is not None:
            owner.cancel()


class Start:
    """A call that waits for its channel to find out what the replica speaks."""

    __slots__ = ("_go", "_wakers")

    def __init__(self, go: Callable[[], object]) -> None:
        self._go: Callable[[], object] | None = go
        self._wakers: list[Callable[[], object]] | None = []

    def __call__(self) -> None:
        """Goes, unless the call was cancelled before."""
        with _lock:
            go, self._go = self._go, None
        if go is not None:
            go()
            self._wake()

    def abandon(self) -> bool:
        """False when the call has started already."""
        with _lock:
            go, self._go = self._go, None
        return go is not None

    def abandoned(self) -> None:
        self._wake()

    def wait(self, timeout: float | None) -> bool:
        """Blocks until the call has started."""
        started = threading.Event()
        self._on_start(started.set)
        return started.wait(timeout)

    async def wait_async(self) -> None:
        loop = asyncio.get_running_loop()
        started = loop.create_future()
        self._on_start(lambda: _resolve_from_anywhere(loop, started))
        await started

    def _on_start(self, waker: Callable[[], object]) -> None:
        with _lock:
            if self._wakers is not None:
                self._wakers.append(waker)
                return
        waker()

    def _wake(self) -> None:
        with _lock:
            wakers, self._wakers = self._wakers, None
        for waker in wakers or ():
            waker()


class FailedCall:
    """Stands where a native call would, when none was made."""

    __slots__ = ("_status",)

    lane = ""
    sent = False

    def __init__(self, code: int, detail: str) -> None:
        self._status = (code, detail)

    @classmethod
    def cancelled(cls) -> FailedCall:
        return cls(STATUS_CANCELLED, "cancelled before it was sent")

    def admission(self) -> tuple[bool, int] | None:
        return None

    def take(self) -> Message | None:
        return None

    def take_all(self) -> list[Message]:
        return []

    def status(self) -> tuple[int, str] | None:
        return self._status

    def wait(self, timeout: float | None) -> bool:
        return True

    def watch_admission(self, bridge: Bridge, future: asyncio.Future[None]) -> None:
        _resolve(future)

    def watch_message(self, bridge: Bridge, future: asyncio.Future[None]) -> None:
        _resolve(future)

    def cancel(self) -> None:
        pass


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _resolve_from_anywhere(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    try:
        loop.call_soon_threadsafe(_resolve, future)
    except RuntimeError:
        pass  # the loop was closed, and its tasks with it
