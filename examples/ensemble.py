"""An ensemble: one batch of images goes to three models at once, and their scores are averaged.

The ensemble passes the array on as it came. On one node it travels in shared memory, and is passed on without a copy.
"""

from __future__ import annotations

import asyncio

import numpy as np
from ray import serve
from ray.serve.handle import DeploymentHandle

import ray_serve_grpc

BATCH, SIDE, CLASSES = 16, 128, 10
MODELS = 3
ROUNDS = 5


def weights(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((SIDE * SIDE, CLASSES), dtype=np.float32)


def scores(images: np.ndarray, seed: int) -> np.ndarray:
    return images.reshape(len(images), -1) @ weights(seed)


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Model:
    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, images: np.ndarray) -> np.ndarray:
        images -= images.mean()  # what arrives is this model's own: the others do not see the change
        return scores(images, self._seed)


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Ensemble:
    def __init__(self, *models: DeploymentHandle) -> None:
        self._models = [model.options(_by_reference=False) for model in models]

    async def __call__(self, images: np.ndarray) -> np.ndarray:
        answers = [model.remote(images) for model in self._models]
        return np.mean(await asyncio.gather(*answers), axis=0)

    def status(self) -> dict:
        return ray_serve_grpc.status()


def main() -> None:
    models = [Model.options(name=f"Model{seed}").bind(seed) for seed in range(MODELS)]
    ensemble = serve.run(Ensemble.bind(*models), name="ensemble", route_prefix=None).options(_by_reference=False)
    try:
        images = np.random.default_rng(7).random((BATCH, SIDE, SIDE), dtype=np.float32)
        expected = np.mean([scores(images - images.mean(), seed) for seed in range(MODELS)], axis=0)
        for _ in range(ROUNDS):
            result = ensemble.remote(images).result()
            assert np.allclose(result, expected, rtol=1e-3, atol=1e-2), "not the mean of the models' scores"
        print(
            f"{ROUNDS} batches of {images.nbytes / 1e6:.1f} MB, {MODELS} models: {result.shape} scores, all as expected"
        )

        status = ensemble.status.remote().result()
        calls = {lane: sum(kinds.values()) for lane, kinds in status["calls"].items() if any(kinds.values())}
        shared = status["shared_memory"]
        print(f"calls from the ensemble to its models: {calls}")
        print(f"passed on without a copy: {shared['bytes_forwarded'] / 1e6:.1f} MB")
    finally:
        serve.delete("ensemble")


if __name__ == "__main__":
    main()
