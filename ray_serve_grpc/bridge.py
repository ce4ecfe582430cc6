"""One `Bridge` per event loop: where the I/O thread's completions come to Python."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from weakref import WeakKeyDictionary

from ray_serve_grpc._native import Bridge

_bridges: WeakKeyDictionary[asyncio.AbstractEventLoop, Bridge] = WeakKeyDictionary()
_lock = threading.Lock()


def bridge_for(loop: asyncio.AbstractEventLoop) -> Bridge:
    """The bridge of `loop`, made and registered when first asked for.

    Call it from the loop's own thread, since asyncio lets nobody else add a reader. The
    bridge goes when the loop goes.
    """
    bridge = _bridges.get(loop)
    return _register(loop) if bridge is None else bridge


def _register(loop: asyncio.AbstractEventLoop) -> Bridge:
    bridge = Bridge()
    # A reader keeps the context of its registration for ever: give it an empty one, so that no
    # request's context variables live on in it.
    contextvars.Context().run(loop.add_reader, bridge.fileno(), bridge.drain)
    with _lock:
        _bridges[loop] = bridge
    return bridge


def _forget() -> None:
    """A forked child has none of the parent's loops; its bridges would wake the parent's."""
    global _bridges
    _bridges = WeakKeyDictionary()


os.register_at_fork(after_in_child=_forget)
