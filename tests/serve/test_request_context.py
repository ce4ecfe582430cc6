"""What code in a replica learns about the request it serves."""

from __future__ import annotations

import urllib.request
from typing import Any

from harness import Cluster, deployment, same_as_actor
from ray import serve
from ray.serve.context import _get_serve_request_context


def present() -> dict[str, Any]:
    context = _get_serve_request_context()
    return {
        "request_id": context.request_id,
        "app": context.app_name,
        "route": context.route,
        "model": context.multiplexed_model_id,
        "session": context.session_id,
        "http": context.is_http_request,
    }


@deployment
class Inner:
    @serve.multiplexed(max_num_models_per_replica=3)
    async def load(self, model: str) -> str:
        return f"loaded {model}"

    def context(self) -> Any:
        return present()

    async def context_async(self) -> Any:
        return present()

    async def contexts(self) -> Any:
        for _ in range(2):
            yield present()

    async def model(self) -> Any:
        return [await self.load(serve.get_multiplexed_model_id()), serve.get_multiplexed_model_id()]

    def replica_context(self) -> Any:
        context = serve.get_replica_context()
        return [context.deployment, context.app_name, context.replica_id.deployment_id.name]


@deployment
class Outer:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def __call__(self, _request: Any) -> Any:
        streamed = [item async for item in self._inner.options(stream=True).contexts.remote()]
        return {
            "outer": present(),
            "sync": await self._inner.context.remote(),
            "async": await self._inner.context_async.remote(),
            "stream": streamed,
            "model": await self._inner.options(multiplexed_model_id="m1").model.remote(),
        }

    async def composed(self) -> Any:
        responses = [self._inner.context.remote(), self._inner.options(session_id="s2").context.remote()]
        return [present(), *[await response for response in responses]]


def contexts() -> Any:
    return Outer.bind(Inner.bind())


def fetch(cluster: Cluster, path: str, headers: dict[str, str]) -> Any:
    import json

    request = urllib.request.Request(f"{cluster.http}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer), dict(answer.headers)


@same_as_actor()
def test_a_request_from_http_keeps_its_id_route_and_app_through_both_hops(cluster: Cluster) -> Any:
    cluster.app(contexts, route=True)
    body, headers = fetch(cluster, "/test-request-context-contexts", {"x-request-id": "given-id"})
    return [body, {name.lower(): value for name, value in headers.items()}.get("x-request-id")]


@same_as_actor(expect=[True, True])
def test_a_request_of_the_driver_gets_one_id_for_all_its_hops(cluster: Cluster) -> Any:
    response = cluster.app(contexts, route=True).composed.remote()
    outer, first, second = response.result(timeout_s=20)
    return [
        outer["request_id"] == first["request_id"] == second["request_id"] == response.request_id,
        len(response.request_id) > 8,
    ]


@same_as_actor()
def test_the_context_of_a_driver_call(cluster: Cluster) -> Any:
    outer = cluster.app(contexts, route=True)
    return [{**context, "request_id": None} for context in outer.composed.remote().result(timeout_s=20)]


@same_as_actor(expect=[["loaded m7", "m7"], "m7", "", "s1", ["", ""]])
def test_model_and_session_ids_reach_the_replica(cluster: Cluster) -> Any:
    inner = cluster.handle("Inner", contexts)
    context = inner.options(multiplexed_model_id="m7").context.remote().result(timeout_s=20)
    plain = inner.context.remote().result(timeout_s=20)
    return [
        inner.options(multiplexed_model_id="m7").model.remote().result(timeout_s=20),
        context["model"],
        context["session"],
        inner.options(session_id="s1").context_async.remote().result(timeout_s=20)["session"],
        [plain["model"], plain["session"]],
    ]


@same_as_actor(expect=["m1", "m2", "m3", "m4"])
def test_concurrent_requests_do_not_mix_their_contexts(cluster: Cluster) -> Any:
    inner = cluster.handle("Inner", contexts)
    models = ["m1", "m2", "m3", "m4"]
    rounds = [[inner.options(multiplexed_model_id=m).context_async.remote() for m in models] for _ in range(20)]
    answers = [[r.result(timeout_s=20)["model"] for r in responses] for responses in rounds]
    return answers[0] if all(answer == answers[0] for answer in answers) else answers


@same_as_actor()
def test_a_stream_sees_its_context_at_every_item(cluster: Cluster) -> Any:
    inner = cluster.handle("Inner", contexts).options(stream=True, multiplexed_model_id="m5")
    return [{**context, "request_id": None} for context in inner.contexts.remote()]


@same_as_actor(expect=["Inner", "test-request-context-contexts", "Inner"])
def test_the_replica_context_is_there(cluster: Cluster) -> Any:
    return cluster.handle("Inner", contexts).replica_context.remote().result(timeout_s=20)


@same_as_actor(expect=["loaded m1", "loaded m2", "loaded m3", "loaded m4", "loaded m1"])
def test_multiplexed_models_are_loaded_and_evicted(cluster: Cluster) -> Any:
    inner = cluster.handle("Inner", contexts)
    models = ["m1", "m2", "m3", "m4", "m1"]
    return [inner.options(multiplexed_model_id=m).model.remote().result(timeout_s=20)[0] for m in models]
