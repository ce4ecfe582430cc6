"""What a caller sees of one call: its value, its timeouts, its awaiters."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import Any

from harness import Cluster, deployment, outcome, outcome_async, same_as_actor
from harness.board import passage, passage_sync
from ray import serve


@deployment
class Callee:
    async def __call__(self, *positional: Any, **named: Any) -> Any:
        return {"positional": positional, "named": named}

    def plain(self, value: Any) -> Any:
        return value

    async def asynchronous(self, value: Any) -> Any:
        await asyncio.sleep(0)
        return value

    async def held(self, gate: str, value: Any) -> Any:
        await passage(gate)
        return value

    def held_in_thread(self, gate: str, value: Any) -> Any:
        passage_sync(gate)
        return value

    def nothing(self) -> None:
        return None

    def with_default(self, first: int, second: int = 7, *rest: int, keyword: int = 9) -> list[Any]:
        return [first, second, list(rest), keyword]


@deployment
async def function(value: int) -> int:
    return value + 1


@deployment
class Caller:
    """The calls that only code in a replica can make: awaiting on the replica's own loop."""

    def __init__(self, callee: Any) -> None:
        self._callee = callee

    async def awaits_twice(self) -> list[Any]:
        response = self._callee.plain.remote("value")
        return [await response, await response]

    async def awaited_by_many(self, count: int) -> list[Any]:
        response = self._callee.asynchronous.remote("shared")

        async def wait() -> Any:
            return await response

        return list(await asyncio.gather(*[wait() for _ in range(count)]))

    async def awaits_out_of_order(self, gate: str) -> list[Any]:
        held = self._callee.held.remote(gate, "held")
        quick = await self._callee.plain.remote("quick")
        await (await self._opener(gate))
        return [quick, await held]

    async def _opener(self, gate: str) -> Any:
        from harness.board import board

        return board().open.remote(gate)

    async def times_out_then_awaits(self, gate: str) -> list[Any]:
        response = self._callee.held.remote(gate, "kept")
        waiter = asyncio.ensure_future(_await(response))
        first = await outcome_async(asyncio.wait_for(asyncio.shield(waiter), 0.2))
        await (await self._opener(gate))
        return ["TimeoutError" in first["caught by"], await waiter]

    async def result_in_a_loop(self) -> Any:
        response = self._callee.plain.remote(1)
        try:
            response.result()
        except RuntimeError as error:
            refused = "should not be called from within an `asyncio`" in str(error)
        return [refused, await response]

    async def as_completed(self, count: int) -> list[Any]:
        responses = [_await(self._callee.asynchronous.remote(number)) for number in range(count)]
        return sorted([await ready for ready in asyncio.as_completed(responses)])


async def _await(response: Any) -> Any:
    return await response


def calls() -> Any:
    return Caller.bind(Callee.bind())


def functions() -> Any:
    return function.bind()


@same_as_actor(expect={"positional": (1, "two"), "named": {"three": 3, "four": [4]}})
def test_positional_and_keyword_arguments_arrive(cluster: Cluster) -> Any:
    return cluster.handle("Callee", calls).remote(1, "two", three=3, four=[4]).result()


@same_as_actor(expect=[[1, 7, [], 9], [1, 2, [3, 4], 9], [1, 7, [], 5], [1, 6, [], 9]])
def test_defaults_varargs_and_keyword_only_parameters_bind_as_in_a_local_call(cluster: Cluster) -> Any:
    method = cluster.handle("Callee", calls).with_default
    responses = [
        method.remote(1),
        method.remote(1, 2, 3, 4),
        method.remote(1, keyword=5),
        method.remote(first=1, second=6),
    ]
    return [response.result() for response in responses]


@same_as_actor(expect=3)
def test_a_deployed_function_is_called(cluster: Cluster) -> Any:
    return cluster.app(functions).remote(2).result()


@same_as_actor(expect=[None, None])
def test_none_is_a_value(cluster: Cluster) -> Any:
    handle = cluster.handle("Callee", calls)
    return [handle.nothing.remote().result(), handle.plain.remote(None).result()]


@same_as_actor(expect=["v", "v", "v"])
def test_a_result_can_be_read_again(cluster: Cluster) -> Any:
    response = cluster.handle("Callee", calls).plain.remote("v")
    return [response.result(), response.result(), response.result(timeout_s=1)]


@same_as_actor(expect=[True, "late"])
def test_a_result_is_still_there_after_a_timeout(cluster: Cluster) -> Any:
    gate = cluster.key()
    response = cluster.handle("Callee", calls).held.remote(gate, "late")
    first = outcome(lambda: response.result(timeout_s=0.3))
    cluster.board.open(gate)
    return ["TimeoutError" in first["caught by"], response.result(timeout_s=20)]


@same_as_actor(expect=[True, "late"])
def test_a_result_from_a_thread_of_the_replica_is_still_there_after_a_timeout(cluster: Cluster) -> Any:
    gate = cluster.key()
    response = cluster.handle("Callee", calls).held_in_thread.remote(gate, "late")
    first = outcome(lambda: response.result(timeout_s=0.3))
    cluster.board.open(gate)
    return ["TimeoutError" in first["caught by"], response.result(timeout_s=20)]


@same_as_actor(expect=["shared"] * 8)
def test_many_threads_can_wait_for_one_result(cluster: Cluster) -> Any:
    gate = cluster.key()
    response = cluster.handle("Callee", calls).held.remote(gate, "shared")
    waiting = threading.Barrier(9)

    def wait() -> Any:
        waiting.wait(10)
        return response.result(timeout_s=20)

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        results = [threads.submit(wait) for _ in range(8)]
        waiting.wait(10)
        cluster.board.open(gate)
        return [result.result(20) for result in results]


@same_as_actor(expect=[True, "gone", "gone"])
def test_the_driver_can_await_on_a_loop_of_its_own(cluster: Cluster) -> Any:
    handle = cluster.handle("Callee", calls)

    async def call() -> list[Any]:
        response = handle.plain.remote("gone")
        return [asyncio.isfuture(asyncio.ensure_future(_await(response))), await response, await response]

    return asyncio.run(call())


@same_as_actor(expect=["first", "second", "first"])
def test_a_response_made_on_one_loop_can_be_awaited_on_another_and_read_from_a_thread(cluster: Cluster) -> Any:
    handle = cluster.handle("Callee", calls)

    async def make() -> Any:
        return handle.plain.remote("first"), handle.plain.remote("second")

    first, second = asyncio.run(make())
    return [asyncio.run(_await(first)), second.result(timeout_s=10), asyncio.run(_await(first))]


@same_as_actor(expect=list(range(200)))
def test_two_hundred_calls_in_flight_keep_their_values_apart(cluster: Cluster) -> Any:
    handle = cluster.handle("Callee", calls)
    responses = [handle.asynchronous.remote(number) for number in range(200)]
    return [response.result(timeout_s=30) for response in responses]


@same_as_actor(expect=["value", "value"])
def test_a_replica_can_await_a_response_twice(cluster: Cluster) -> Any:
    return cluster.app(calls).awaits_twice.remote().result(timeout_s=20)


@same_as_actor(expect=["shared"] * 20)
def test_many_tasks_of_a_replica_can_await_one_response(cluster: Cluster) -> Any:
    return cluster.app(calls).awaited_by_many.remote(20).result(timeout_s=20)


@same_as_actor(expect=["quick", "held"])
def test_responses_can_be_awaited_in_any_order(cluster: Cluster) -> Any:
    return cluster.app(calls).awaits_out_of_order.remote(cluster.key()).result(timeout_s=20)


@same_as_actor(expect=[True, "kept"])
def test_an_await_that_timed_out_can_be_repeated(cluster: Cluster) -> Any:
    return cluster.app(calls).times_out_then_awaits.remote(cluster.key()).result(timeout_s=20)


@same_as_actor(expect=[True, 1])
def test_blocking_for_a_result_on_an_event_loop_is_refused(cluster: Cluster) -> Any:
    return cluster.app(calls).result_in_a_loop.remote().result(timeout_s=20)


@same_as_actor(expect=list(range(50)))
def test_responses_work_with_as_completed(cluster: Cluster) -> Any:
    return cluster.app(calls).as_completed.remote(50).result(timeout_s=20)


@same_as_actor(stock=False)  # Ray's own gRPC path drops the RayTaskError part of the class
def test_a_method_that_does_not_exist_is_refused_by_name(cluster: Cluster) -> Any:
    missing = cluster.handle("Callee", calls).missing
    return outcome(lambda: missing.remote().result(timeout_s=20), contains=("missing", "with_default"))


@same_as_actor(expect=True)
def test_a_handle_passed_to_another_process_works_there(cluster: Cluster) -> Any:
    import ray

    handle = cluster.handle("Callee", calls)

    @ray.remote(num_cpus=0)
    def task(inner: Any) -> Any:
        return inner.plain.remote("from a task").result(timeout_s=20)

    return ray.get(task.remote(handle), timeout=60) == "from a task"


@same_as_actor(expect=["a", "b"])
def test_a_new_version_of_an_app_answers_on_the_old_handle(cluster: Cluster) -> Any:
    def version(text: str) -> Any:
        @deployment(name="Versioned")
        class Versioned:
            def __call__(self) -> str:
                return text

        return Versioned.bind()

    name = f"versions-{cluster.key()}"
    handle = serve.run(version("a"), name=name, route_prefix=None)
    first = handle.remote().result(timeout_s=20)
    serve.run(version("b"), name=name, route_prefix=None)
    second = handle.remote().result(timeout_s=20)
    serve.delete(name, _blocking=False)
    return [first, second]
