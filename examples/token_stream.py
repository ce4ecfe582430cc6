"""Tokens of a language model, sent to HTTP clients as server-sent events while they are made.

One client reads all of its text. Another one leaves after five tokens, and the model stops working for it.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import StreamingResponse

TOKENS = ["The ", "reader ", "sets ", "the ", "pace", ". "]
LONG = 100_000  # tokens; more than any client here waits for


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Model:
    """Repeats the same words; a real one would compute each token where this one sleeps."""

    def __init__(self) -> None:
        self._made: dict[str, int] = {}
        self._stopped: set[str] = set()

    async def generate(self, client: str, count: int) -> AsyncIterator[str]:
        self._made[client] = 0
        try:
            for number in range(count):
                await asyncio.sleep(0.002)
                self._made[client] += 1
                yield TOKENS[number % len(TOKENS)]
        finally:
            self._stopped.add(client)

    def made(self, client: str) -> int | None:
        """How many tokens were made for a client; None while the model still works for it."""
        return self._made[client] if client in self._stopped else None


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Frontend:
    def __init__(self, model: DeploymentHandle) -> None:
        self._model = model.options(_by_reference=False, stream=True)

    async def __call__(self, request: Request) -> StreamingResponse:
        client, count = request.query_params["client"], int(request.query_params["count"])
        return StreamingResponse(self._events(client, count), media_type="text/event-stream")

    async def _events(self, client: str, count: int) -> AsyncIterator[str]:
        async for token in self._model.generate.remote(client, count):
            yield f"data: {json.dumps(token)}\n\n"
        yield "data: [DONE]\n\n"


def read(url: str, client: str, count: int, leave_after: int | None = None) -> str:
    """The text that came until the end, or until this client left."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    try:
        connection.request("GET", f"{parts.path}?client={client}&count={count}")
        response, tokens = connection.getresponse(), list[str]()
        assert response.status == 200, response.read()
        while (line := response.readline().decode().strip()) != "data: [DONE]":
            if line:
                tokens.append(json.loads(line.removeprefix("data: ")))
            if len(tokens) == leave_after:
                response.close()
                break
        return "".join(tokens)
    finally:
        connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http", default="http://127.0.0.1:8000", help="Serve's HTTP address (default: %(default)s)")
    url = parser.parse_args().http + "/tokens"

    serve.run(Frontend.bind(Model.bind()), name="tokens", route_prefix="/tokens")
    try:
        model = serve.get_deployment_handle("Model", "tokens").options(_by_reference=False)

        text = read(url, "patient", count=60)
        print(f"the patient client read {len(text.split())} words: {text[:25]}…")
        assert text == "".join(TOKENS) * 10

        print(f"the other one left after: {read(url, 'hasty', count=LONG, leave_after=5)}")
        deadline = time.monotonic() + 30
        while (made := model.made.remote("hasty").result()) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert made is not None, "the model still works for a client that left"
        assert made < LONG
        print(f"the model stopped for it after {made} of {LONG} tokens")
    finally:
        serve.delete("tokens")


if __name__ == "__main__":
    main()
