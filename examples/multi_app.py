"""Two applications that are deployed apart and call each other: a shop asks a recommender.

`multi_app.yaml` is their config file: `serve deploy examples/multi_app.yaml`.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from starlette.requests import Request

import ray_serve_grpc

ITEMS = ["anchor", "buoy", "compass", "dinghy"]


@serve.deployment
class Recommender:
    def __call__(self, item: str, count: int) -> list[str]:
        """The items that follow in the list."""
        start = ITEMS.index(item) + 1
        return [ITEMS[(start + offset) % len(ITEMS)] for offset in range(count)]


@serve.deployment
class Shop:
    def __init__(self, count: int) -> None:
        self._count = count
        # The other application need not be up yet: the handle waits for its replicas at the first call.
        self._recommender = serve.get_app_handle("recommender").options(_by_reference=False)

    async def __call__(self, request: Request) -> dict[str, Any]:
        item = request.query_params["item"]
        others = await self._recommender.remote(item, self._count)
        calls = ray_serve_grpc.status()["calls"]
        lanes = [lane for lane, kinds in calls.items() if any(kinds.values())]
        return {"item": item, "see also": others, "lanes": lanes}


def shop(arguments: dict[str, str]) -> Any:
    """The builder that the config file names; its `args` come here."""
    return Shop.bind(int(arguments["count"]))


recommender = Recommender.bind()
