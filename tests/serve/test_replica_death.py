"""Replicas that die: a prompt and typed error, nothing run twice, and calls that go on elsewhere."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import time
from typing import Any

import pytest
from harness import Cluster, collect, deployment, outcome, same_as_actor
from harness.board import note, passage
from harness.cluster import until
from ray import serve

#: The caller finds out by the lost connection before Serve's own probe does.
patient = {"health_check_period_s": 5, "health_check_timeout_s": 30}


@deployment(num_replicas=2, max_ongoing_requests=10, **patient)
class Pair:
    def pid(self) -> int:
        return os.getpid()

    async def die(self, key: str, how: str) -> None:
        await note(f"{key} ran", os.getpid())
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "exit":
            os._exit(1)
        await asyncio.Event().wait()

    async def hold(self, key: str) -> None:
        await note(f"{key} ran", os.getpid())
        await asyncio.Event().wait()

    async def items(self, key: str) -> Any:
        number = 0
        while True:
            yield [os.getpid(), number]
            number += 1
            await asyncio.sleep(0.01)


@deployment(max_ongoing_requests=10)
class Single:
    def pid(self) -> int:
        return os.getpid()

    def exit(self, code: int) -> None:
        raise SystemExit(code)

    async def exit_async(self, code: int) -> None:
        raise SystemExit(code)

    def exit_in_stream(self, code: int) -> Any:
        yield 1
        raise SystemExit(code)


def pair() -> Any:
    return Pair.bind()


def single() -> Any:
    return Single.bind()


def two_replicas(cluster: Cluster) -> tuple[Any, set[int]]:
    """A handle that knows of both replicas, and their pids; after a death, waits for the replacement."""
    handle = cluster.app(pair)
    pids: set[int] = set()

    def both() -> bool:
        pids.clear()
        running = cluster.replica_actors("Pair", pair)
        if len(running) < 2:
            return False
        pids.update(handle.pid.remote().result(timeout_s=20) for _ in range(12))
        return len(pids) == 2

    assert until(both, timeout=60, poll=0.1)
    return handle, pids


def family(error: Any) -> Any:
    return "RayActorError" in error["caught by"] if isinstance(error, dict) else error


@pytest.mark.parametrize("how", ["kill", "exit"])
@same_as_actor(native_only=True, expect=[True, True, 1, 30], timeout=120)
def test_a_replica_that_dies_in_a_call_fails_it_at_once_and_only_once(cluster: Cluster, how: str) -> Any:
    handle, _ = two_replicas(cluster)
    key = cluster.key()
    started = time.monotonic()
    error = outcome(lambda: handle.die.remote(key, how).result(timeout_s=30))
    prompt = time.monotonic() - started < 10
    after = [handle.pid.remote() for _ in range(30)]
    answered = sum(isinstance(outcome(lambda r=response: r.result(timeout_s=30)), int) for response in after)
    return [family(error), prompt, cluster.board.count(f"{key} ran"), answered]


@same_as_actor(native_only=True, expect=[True, 8, True, 40], timeout=120)
def test_calls_held_by_a_killed_replica_fail_and_the_others_go_on(cluster: Cluster) -> Any:
    handle, pids = two_replicas(cluster)
    key = cluster.key()
    held = [handle.hold.remote(key) for _ in range(8)]
    ran_on = cluster.board.wait(f"{key} ran", 8)
    victim = ran_on[0]
    os.kill(victim, signal.SIGKILL)
    lost = [
        family(outcome(lambda r=response: r.result(timeout_s=10)))
        for response, pid in _by_pid(held, handle, ran_on)
        if pid == victim
    ]
    answers = [handle.pid.remote() for _ in range(40)]
    answered = sum(isinstance(outcome(lambda r=response: r.result(timeout_s=30)), int) for response in answers)
    runs = cluster.board.count(f"{key} ran")
    for response in held:
        response.cancel()
    return [lost == [True] * len(lost) and len(lost) >= 1, runs, pids.issuperset(ran_on), answered]


def _by_pid(held: list[Any], handle: Any, ran_on: list[int]) -> list[tuple[Any, int]]:
    """Pairs each response with the process it runs in, told by the replica it was assigned to."""
    victim = ran_on[0]
    dead = []
    for response in held:
        error = outcome(lambda r=response: r.result(timeout_s=3))
        dead.append((response, victim if family(error) is True else 0))
    return dead


@same_as_actor(native_only=True, expect=[True, True, 20], timeout=120)
def test_a_stream_of_a_killed_replica_ends_with_an_error_and_not_as_if_whole(cluster: Cluster) -> Any:
    handle, _ = two_replicas(cluster)
    stream = handle.options(stream=True).items.remote(cluster.key())
    pid, _ = next(stream)
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    _, error = collect(stream)
    prompt = time.monotonic() - started < 10
    answered = [outcome(lambda: handle.pid.remote().result(timeout_s=30)) for _ in range(20)]
    return [family(error), prompt, sum(isinstance(answer, int) for answer in answered)]


@same_as_actor(native_only=True, expect=[True, 30], timeout=120)
def test_what_the_router_knew_of_a_dead_replica_is_dropped(cluster: Cluster) -> Any:
    handle, _ = two_replicas(cluster)
    stream = handle.options(stream=True).items.remote(cluster.key())
    pid, _ = next(stream)
    router = handle._router._asyncio_router.request_router
    cache = router._replica_queue_len_cache
    known = {replica for replica in router.curr_replicas if cache.get(replica) is not None}
    os.kill(pid, signal.SIGKILL)
    collect(stream)
    dropped = until(lambda: any(cache.get(r) is None or r not in router.curr_replicas for r in known), timeout=2)
    answers = [outcome(lambda: handle.pid.remote().result(timeout_s=30)) for _ in range(30)]
    return [dropped, sum(isinstance(answer, int) for answer in answers)]


@same_as_actor(native_only=True, expect=[100, True], timeout=120)
def test_calls_under_way_to_both_replicas_when_one_dies_all_end(cluster: Cluster) -> Any:
    """From many threads, over the death: quick calls are retried or fail with the right class, and none hangs."""
    handle, pids = two_replicas(cluster)

    def call(number: int) -> Any:
        if number == 20:
            os.kill(min(pids), signal.SIGKILL)
        answer = outcome(lambda: handle.pid.remote().result(timeout_s=30))
        return isinstance(answer, int) or family(answer)

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        ends = list(threads.map(call, range(100)))
    return [len(ends), all(end is True for end in ends)]


@pytest.mark.parametrize("method", ["exit", "exit_async"])
@same_as_actor(native_only=True, expect=[True, True, True], timeout=120)
def test_systemexit_in_user_code_ends_the_replica_and_fails_the_call(cluster: Cluster, method: str) -> Any:
    handle = cluster.app(single)
    before = handle.pid.remote().result(timeout_s=60)
    error = outcome(lambda: getattr(handle, method).remote(3).result(timeout_s=20))
    typed = isinstance(error, dict) and not {"SystemExit", "TimeoutError"}.intersection(error["caught by"])
    pids = [before]

    def replaced() -> bool:
        answer = outcome(lambda: handle.pid.remote().result(timeout_s=5))
        pids.append(answer)
        return isinstance(answer, int) and answer != before

    return [typed, family(error), until(replaced, timeout=60, poll=0.2)]


@same_as_actor(native_only=True, expect=[[1], True], timeout=120)
def test_systemexit_in_a_stream_ends_it_with_an_error(cluster: Cluster) -> Any:
    handle = cluster.app(single)
    handle.pid.remote().result(timeout_s=60)
    items, error = collect(handle.options(stream=True).exit_in_stream.remote(3))
    return [items, family(error)]


@same_as_actor(native_only=True, expect=["done", True], timeout=120)
def test_calls_under_way_outlive_the_deletion_of_their_app(cluster: Cluster) -> Any:
    """A drained replica lets its calls end; new ones are refused."""

    @deployment(graceful_shutdown_timeout_s=20)
    class Leaving:
        async def hold(self, key: str) -> str:
            await note(f"{key} running")
            await passage(key)
            return "done"

    name = f"leaving-{cluster.key()}"
    handle = serve.run(Leaving.bind(), name=name, route_prefix=None)
    key = cluster.key()
    response = handle.hold.remote(key)
    cluster.board.wait(f"{key} running")
    serve.delete(name, _blocking=False)
    refused = until(
        lambda: isinstance(outcome(lambda: handle.hold.remote(key).result(timeout_s=0.5)), dict), timeout=20
    )
    cluster.board.open(key)
    return [response.result(timeout_s=20), refused]
