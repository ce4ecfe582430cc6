"""There is one bridge for a loop, and it leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading

import uvloop

from ray_serve_grpc import bridge
from ray_serve_grpc.bridge import bridge_for


async def test_a_loop_has_one_bridge():
    loop = asyncio.get_running_loop()
    assert bridge_for(loop) is bridge_for(loop)


def test_loops_of_threads_have_their_own():
    found = []

    async def ask() -> None:
        found.append(bridge_for(asyncio.get_running_loop()))

    threads = [threading.Thread(target=asyncio.run, args=(ask(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(one) for one in found}) == 3


def test_a_bridge_goes_with_its_loop():
    async def ask() -> None:
        bridge_for(asyncio.get_running_loop())

    gc.collect()
    before = len(bridge._bridges)
    for new_loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        loop = new_loop()
        loop.run_until_complete(ask())
        loop.close()
        del loop
    gc.collect()
    assert len(bridge._bridges) == before


async def test_awaited_futures_go_before_callbacks_even_by_way_of_another_task():
    loop = asyncio.get_running_loop()
    order: list[str] = []
    future: asyncio.Future[None] = loop.create_future()

    async def wait() -> None:
        await future

    waiting = asyncio.ensure_future(wait())
    waiting.add_done_callback(lambda _: order.append("passed on"))
    await asyncio.sleep(0)
    bridge._tell(iter([(lambda: order.append("ended"), ()), (order.append, ("called",)), (future, None)]))
    await waiting
    await asyncio.sleep(0)
    assert order == ["called", "passed on", "ended"]


async def test_callbacks_do_not_see_the_context_of_whoever_asked_first():
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("of a request")
    registered = []

    class Loop:
        def add_reader(self, fileno, callback):
            registered.append(contextvars.copy_context())

    bridge._register(Loop())
    assert variable not in registered[0]


def test_a_forked_child_has_bridges_of_its_own():
    async def ask() -> object:
        return bridge_for(asyncio.get_running_loop())

    loop = asyncio.new_event_loop()
    before = loop.run_until_complete(ask())
    bridge._forget()
    assert loop.run_until_complete(ask()) is not before
    loop.close()
