"""A serializer of one's own: requests and responses as compressed JSON, for text that compresses well.

Every process that names the serializer registers it: the caller here, and each replica in `__init__`.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from ray_serve_grpc import serializers

NAME = "compressed-json"


def dumps(value: Any) -> bytes:
    return zlib.compress(json.dumps(value).encode())


def loads(data: bytes | memoryview) -> Any:
    return json.loads(zlib.decompress(data))


def compressed(handle: DeploymentHandle) -> DeploymentHandle:
    """`handle`, with requests and responses as compressed JSON."""
    serializers.register(NAME, dumps, loads)
    return handle.options(_by_reference=False, request_serialization=NAME, response_serialization=NAME)


@serve.deployment(ray_actor_options={"num_cpus": 0})
class WordCount:
    def __init__(self) -> None:
        serializers.register(NAME, dumps, loads)

    def __call__(self, text: str) -> dict[str, int]:
        return Counter(text.split())

    def keys_as_text(self, numbers: dict) -> dict:
        return numbers


def main() -> None:
    handle = compressed(serve.run(WordCount.bind(), name="words", route_prefix=None))
    try:
        text = "a request is a list of arguments and a dict of keyword arguments " * 2_000
        counts = handle.remote(text).result()
        assert counts == Counter(text.split())
        request = [[text], {}]
        print(f"{sum(counts.values())} words counted; 'a' came {counts['a']} times")
        print(f"the request had {len(dumps(request))} bytes instead of {len(json.dumps(request))}")
        # The proof that it is JSON that travelled: its keys are always text.
        print(f"keys came back as {handle.keys_as_text.remote({1: 'one'}).result()}")
    finally:
        serve.delete("words")


if __name__ == "__main__":
    main()
