"""An image pipeline on Ray Serve: which photograph is this, and a few words about it.

    HTTP -> Frontend -> Decoder -> Normaliser -> Classifier -> HTTP        POST /classify, a JPEG
                     -> Narrator (streams text token by token) -> HTTP     GET /tell

Nothing in the application knows which transport carries its calls; `serve run examples.image_pipeline:app` starts it.
Run as a script, it starts the application on a local Ray cluster for each transport, sends it real requests, and prints
what carried each call and how long it took:

    python examples/image_pipeline.py [--requests N] [--rounds N] [--transports actor,grpc.aio,native]
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

WIDTH, HEIGHT, PATCH = 512, 384, 32  # pixels
# How Serve's proxy sends its requests on; a replica is not told.
PROXY_BY_REFERENCE = os.environ.get("RAY_SERVE_PROXY_USE_GRPC") != "1"
PHOTOGRAPHS = ("china.jpg", "flower.jpg")  # they ship with scikit-learn


class Stopwatch:
    """Milliseconds spent in named pieces of work."""

    def __init__(self) -> None:
        self.milliseconds: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.milliseconds[name].append((time.perf_counter() - started) * 1e3)

    def collect(self) -> dict[str, list[float]]:
        """Hands over what was measured and starts anew."""
        collected, self.milliseconds = dict(self.milliseconds), defaultdict(list)
        return collected


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Decoder:
    """JPEG bytes -> uint8 pixels, height x width x 3."""

    def __init__(self) -> None:
        self._work = Stopwatch()

    def __call__(self, jpeg: bytes) -> np.ndarray:
        from PIL import Image

        with self._work.timing("decode"):
            return np.array(Image.open(io.BytesIO(jpeg)).convert("RGB"))

    def collect(self) -> dict[str, list[float]]:
        return self._work.collect()


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Normaliser:
    """uint8 pixels -> float32, HEIGHT x WIDTH x 3, each channel with mean 0 and deviation 1."""

    def __init__(self) -> None:
        self._work = Stopwatch()

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        with self._work.timing("normalise"):
            return normalise(pixels)

    def collect(self) -> dict[str, list[float]]:
        return self._work.collect()


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Classifier:
    """Normalised pixels -> which photograph, by a vote of its patches.

    A logistic regression on the colour and texture of patches, fitted when the replica starts on the left halves of
    the photographs and scored on the right halves.
    """

    def __init__(self) -> None:
        from sklearn.datasets import load_sample_image
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        self._work = Stopwatch()
        seen, unseen, labels = [], [], []
        for name in PHOTOGRAPHS:
            features = patch_features(normalise(load_sample_image(name)))
            columns = WIDTH // PATCH
            left = np.arange(len(features)) % columns < columns // 2
            seen.append(features[left])
            unseen.append(features[~left])
            labels += [name] * int(left.sum())
        self._model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        self._model.fit(np.concatenate(seen), labels)
        self._score = float(self._model.score(np.concatenate(unseen), labels))

    def __call__(self, image: np.ndarray) -> dict[str, Any]:
        with self._work.timing("classify"):
            votes = self._model.predict(patch_features(image)).tolist()
            label = max(PHOTOGRAPHS, key=votes.count)
            return {"label": label, "share": votes.count(label) / len(votes)}

    def score(self) -> float:
        """Share of the patches of the photographs' right halves that are told apart."""
        return self._score

    def collect(self) -> dict[str, list[float]]:
        return self._work.collect()


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Narrator:
    """Streams text: a chain of words fitted on the data set descriptions that ship with scikit-learn."""

    def __init__(self) -> None:
        from sklearn import datasets

        self._following: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for load in (datasets.load_iris, datasets.load_wine, datasets.load_digits, datasets.load_breast_cancer):
            words = re.findall(r"[A-Za-z][a-z'-]*[,.]?", load().DESCR)
            for first, second, third in zip(words, words[1:], words[2:], strict=False):
                self._following[first, second].append(third)
        self._openings = sorted(pair for pair in self._following if pair[0].istitle() and len(pair[0]) > 1)

    async def __call__(self, count: int, seed: int) -> AsyncIterator[str]:
        """Yields `count` words, each with the space that follows it."""
        choose = random.Random(seed)
        pair = choose.choice(self._openings)
        for _ in range(count):
            yield pair[0] + " "
            await asyncio.sleep(0)  # where a language model would compute the next token
            following = self._following.get(pair)
            pair = (pair[1], choose.choice(following)) if following else choose.choice(self._openings)


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Frontend:
    """The HTTP side: hands each request through the other deployments and measures each hop."""

    def __init__(
        self,
        decoder: DeploymentHandle,
        normaliser: DeploymentHandle,
        classifier: DeploymentHandle,
        narrator: DeploymentHandle,
    ) -> None:
        self._stages = {"decode": decoder, "normalise": normaliser, "classify": classifier}
        self._narrator = narrator.options(stream=True)
        self._hops = Stopwatch()
        self._served_at_rest: dict[str, int] = {}

    async def __call__(self, request: Request) -> Response:
        match request.url.path:
            case "/classify":
                return JSONResponse(await self._classify(await request.body()))
            case "/tell":
                count, seed = int(request.query_params["words"]), int(request.query_params["seed"])
                return StreamingResponse(self._tell(count, seed), media_type="text/plain")
            case "/trace":
                return JSONResponse(await self._trace(await request.body()))
            case "/report":
                return JSONResponse(await self._report())
        return PlainTextResponse("POST /classify, GET /tell?words=20&seed=1 or GET /report\n", status_code=404)

    async def _classify(self, jpeg: bytes) -> dict[str, Any]:
        value: Any = jpeg
        with self._hops.timing("pipeline"):
            for name, handle in self._stages.items():
                with self._hops.timing(name):
                    value = await handle.remote(value)
        return value

    async def _tell(self, count: int, seed: int) -> AsyncIterator[str]:
        with self._hops.timing("all words"):
            with self._hops.timing("first word"):
                words = self._narrator.remote(count, seed)
                first = await anext(words)
            yield first
            async for word in words:
                yield word

    async def _trace(self, jpeg: bytes) -> dict[str, str]:
        """What carries each hop. The first one is known from the second trace on, when nothing else came between."""
        carriers = {"proxy": carrier(PROXY_BY_REFERENCE, self._served_at_rest, by_lane("served"))}
        value: Any = jpeg
        for name, handle in self._stages.items():
            before, response = by_lane("calls"), handle.remote(value)
            value = await response
            carriers[name] = carrier(response.by_reference, before, by_lane("calls"))
        before, words = by_lane("calls"), self._narrator.remote(3, 0)
        async for _ in words:
            pass
        carriers["tell"] = carrier(words.by_reference, before, by_lane("calls"))
        self._served_at_rest = by_lane("served")
        return carriers

    async def _report(self) -> dict[str, Any]:
        """What was measured since the last report, and the transport's own account of the calls of this replica."""
        work: dict[str, list[float]] = {}
        for handle in self._stages.values():
            work |= await handle.collect.remote()
        return {
            "hops": self._hops.collect(),
            "work": work,
            "score": await self._stages["classify"].score.remote(),
            "transport": transport_status(),
        }


def normalise(pixels: np.ndarray) -> np.ndarray:
    from PIL import Image, ImageStat

    resized = Image.fromarray(pixels).resize((WIDTH, HEIGHT))
    channels = ImageStat.Stat(resized)
    return (np.asarray(resized) - np.float32(channels.mean)) / np.float32(channels.stddev)


def patch_features(image: np.ndarray) -> np.ndarray:
    """Colour and texture of each PATCH x PATCH square, row by row: 12 numbers for each, from every second pixel."""
    pixels, side = image[::2, ::2], PATCH // 2
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side

    def mean(values: np.ndarray) -> np.ndarray:
        return values.reshape(rows, side, columns, side, 3).mean(axis=(1, 3)).reshape(-1, 3)

    colour = mean(pixels)
    across = np.abs(np.diff(pixels, axis=1, append=pixels[:, -1:]))
    down = np.abs(np.diff(pixels, axis=0, append=pixels[-1:]))
    return np.concatenate([colour, mean(pixels * pixels) - colour * colour, mean(across), mean(down)], axis=1)


def transport_status() -> dict[str, Any]:
    """`ray_serve_grpc.status()` of this process, or why there is none."""
    try:
        import ray_serve_grpc
    except ImportError as error:
        return {"active": False, "reason": str(error), "calls": {}, "served": {}}
    return json.loads(json.dumps(ray_serve_grpc.status(), default=str))


def by_lane(account: Literal["calls", "served"]) -> dict[str, int]:
    """How many calls each lane of ray_serve_grpc has carried from this process, or to it, and what went by "shm"."""
    status = transport_status()
    counts = {lane: sum(kinds.values()) for lane, kinds in status[account].items()}
    shared = status.get("shared_memory", {})
    return counts | {"shm": shared.get("messages_sent", 0) + shared.get("messages_received", 0)}


def carrier(by_reference: bool, before: dict[str, int], after: dict[str, int]) -> str:
    if by_reference:
        return "actor call"
    lanes = [lane for lane, count in after.items() if count > before.get(lane, 0)]
    return f"ray_serve_grpc, {'+'.join(lanes)}" if lanes else "grpc.aio, tcp"


app = Frontend.bind(Decoder.bind(), Normaliser.bind(), Classifier.bind(), Narrator.bind())


if __name__ == "__main__":
    from compare_transports import main

    raise SystemExit(main())
