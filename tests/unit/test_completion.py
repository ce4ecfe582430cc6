"""What surrounds a native call: its end, a late start, a failed start."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

from ray_serve_grpc import _native
from ray_serve_grpc.completion import Child, Completion, FailedCall, Start


class Owner:
    def __init__(self) -> None:
        self.cancels = 0

    def failure(self) -> BaseException | None:
        return None

    def cancel(self) -> None:
        self.cancels += 1


@pytest.mark.parametrize("keep", [True, False])
def test_a_completion_keeps_its_owner_until_the_end_or_not_at_all(keep):
    owner = Owner()
    alive = weakref.ref(owner)
    completion = Completion(owner, keep=keep)
    del owner
    assert (alive() is not None) == keep
    completion()
    assert alive() is None


def test_a_completion_runs_once():
    owner, ran = Owner(), []
    completion = Completion(owner, keep=True)
    completion.untrack = lambda: ran.append("untracked")
    completion.add(ran.append)
    completion()
    completion()
    assert ran == ["untracked", None]


def test_callbacks_added_while_it_ends_run_too():
    owner, ran = Owner(), []
    completion = Completion(owner, keep=True)
    start = threading.Barrier(2)

    def add() -> None:
        start.wait()
        for _ in range(2000):
            completion.add(ran.append)

    thread = threading.Thread(target=add)
    thread.start()
    start.wait()
    completion()
    thread.join()
    assert len(ran) == 2000


def test_callbacks_run_although_untracking_fails():
    owner, ran = Owner(), []
    completion = Completion(owner, keep=True)
    completion.untrack = lambda: 1 / 0
    completion.add(ran.append)
    with pytest.raises(ZeroDivisionError):
        completion()
    assert ran == [None]


def test_a_child_forwards_to_an_owner_that_is_there():
    owner = Owner()
    child = Child(owner)
    child.cancel()
    assert owner.cancels == 1
    del owner
    gc.collect()
    child.cancel()


async def test_everybody_is_told_of_a_start():
    went: list[Any] = []
    start = Start(lambda: went.append(1))
    waiting = [asyncio.ensure_future(start.wait_async()) for _ in range(2)]
    thread = asyncio.get_running_loop().run_in_executor(None, start.wait, 10)
    await asyncio.sleep(0)
    start()
    start()
    await asyncio.gather(*waiting)
    assert await thread
    assert went == [1]
    await start.wait_async()
    assert start.wait(0)


async def test_an_abandoned_start_does_not_go():
    went: list[Any] = []
    start = Start(lambda: went.append(1))
    waiting = asyncio.ensure_future(start.wait_async())
    await asyncio.sleep(0)
    assert start.abandon()
    start.abandoned()
    await waiting
    start()
    assert not went
    assert not start.abandon()


def test_a_start_outlives_the_loop_of_a_waiter():
    start = Start(lambda: None)

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(start.wait_async(), 0.01)

    asyncio.run(give_up())
    start()


async def test_a_failed_call_answers_at_once():
    call = FailedCall(_native.STATUS_UNAVAILABLE, "why")
    future = asyncio.get_running_loop().create_future()
    call.watch_message(None, future)  # type: ignore[arg-type]
    await future
    call.cancel()
    assert (call.take(), call.take_all(), call.admission(), call.wait(None)) == (None, [], None, True)
    assert call.status() == (_native.STATUS_UNAVAILABLE, "why")
