"""One `Bridge` per event loop: where the I/O thread's completions come to Python."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from ray_serve_grpc._native import Bridge

_bridges: WeakKeyDictionary[asyncio.AbstractEventLoop, Bridge] = WeakKeyDictionary()
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, TurnFlush] = WeakKeyDictionary()
_lock = threading.Lock()


def bridge_for(loop: asyncio.AbstractEventLoop) -> Bridge:
    """The bridge of `loop`, made and registered when first asked for.

    Call it from the loop's own thread, since asyncio lets nobody else add a reader. The
    bridge goes when the loop goes.
    """
    bridge = _bridges.get(loop)
    return _register(loop) if bridge is None else bridge


class Flushable(Protocol):
    """Something with things queued in it that go out when it is flushed."""

    def flush(self) -> None: ...


#: Items of a stream after which the loop gets a turn, even if nothing has to be waited for.
BURST = 64

#: Things of one turn that go out together at most: more at once, and whoever waits for them comes in a convoy.
TOGETHER = 4


class TurnFlush:
    """Flushes what was queued in one turn of a loop at the turn's end, or as soon as a few things are."""

    __slots__ = ("_due", "_loop", "_queued")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queued: list[Flushable] = []
        self._due = False

    def add(self, thing: Flushable) -> None:
        """From the loop's own thread."""
        queued = self._queued
        queued.append(thing)
        if len(queued) >= TOGETHER:
            self._flush()
        elif not self._due:
            self._due = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._due = False
        self._flush()

    def _flush(self) -> None:
        queued, self._queued = self._queued, []
        for thing in queued:
            thing.flush()


def turn_of(loop: asyncio.AbstractEventLoop) -> TurnFlush:
    """The one of `loop`, for its own thread."""
    turn = _turns.get(loop)
    if turn is None:
        turn = _turns[loop] = TurnFlush(loop)
    return turn


def _register(loop: asyncio.AbstractEventLoop) -> Bridge:
    bridge = Bridge()
    # A reader keeps the context of its registration for ever: give it an empty one, so that no
    # request's context variables live on in it.
    contextvars.Context().run(loop.add_reader, bridge.fileno(), partial(_drain, bridge))
    with _lock:
        _bridges[loop] = bridge
    return bridge


def _drain(bridge: Bridge) -> None:
    """Here and not in the core: a daemon thread that wants the GIL while the interpreter ends is ended where it stands
    (before Python 3.14). That takes frames of Python and C off its stack, and at one of Rust it aborts the process. So
    Python code must not run below the core: Serve's loops run in daemon threads.
    """
    _tell(iter(bridge.drain()))


def _tell(batch: Iterator[tuple[Any, tuple[Any, ...] | None]]) -> None:
    loop = asyncio.get_running_loop()
    later = []
    try:
        for told, arguments in batch:
            try:
                if arguments:
                    told(*arguments)
                elif arguments is not None:
                    later.append(told)
                elif not told.done():
                    told.set_result(None)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                context = {"message": f"Exception in callback {told!r}", "exception": error}
                loop.call_exception_handler(context)
    finally:
        # Ends of calls, and cancels. Whoever awaits an answer of the same batch goes first, and passes it on to another
        # loop, for which it needs a turn more.
        for told in later:
            loop.call_soon(loop.call_soon, told)
        # An interrupt may have struck anywhere above.
        rest = list(batch)
        if rest:
            loop.call_soon(_tell, iter(rest))


def _forget() -> None:
    """A forked child has none of the parent's loops; its bridges would wake the parent's."""
    global _bridges, _turns
    _bridges = WeakKeyDictionary()
    _turns = WeakKeyDictionary()


os.register_at_fork(after_in_child=_forget)
