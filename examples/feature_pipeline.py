"""A feature pipeline: an Arrow table of events becomes a pandas frame of features, and the features a score.

Columns travel beside the pickle, not in it, so that neither side copies them.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
from ray import serve
from ray.serve.handle import DeploymentHandle

import ray_serve_grpc

EVENTS, USERS = 200_000, 1_000


def features(events: pa.Table) -> pd.DataFrame:
    """One row for each user: how many events, their sum, and the largest one."""
    table = events.group_by("user").aggregate([("amount", "count"), ("amount", "sum"), ("amount", "max")])
    return table.to_pandas().set_index("user").sort_index()


def score(rows: pd.DataFrame) -> pd.Series:
    return (rows["amount_sum"] / rows["amount_count"]).rank(pct=True)


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Features:
    def __call__(self, events: pa.Table) -> pd.DataFrame:
        return features(events)


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Scorer:
    def __call__(self, rows: pd.DataFrame) -> pd.Series:
        return score(rows)


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Pipeline:
    def __init__(self, features: DeploymentHandle, scorer: DeploymentHandle) -> None:
        self._features = features.options(_by_reference=False)
        self._scorer = scorer.options(_by_reference=False)

    async def __call__(self, events: pa.Table) -> pd.DataFrame:
        rows = await self._features.remote(events)
        rows["score"] = await self._scorer.remote(rows)
        return rows

    def lanes(self) -> list[str]:
        calls = ray_serve_grpc.status()["calls"]
        return [lane for lane, kinds in calls.items() if any(kinds.values())]


def main() -> None:
    app = Pipeline.bind(Features.bind(), Scorer.bind())
    pipeline = serve.run(app, name="features", route_prefix=None).options(_by_reference=False)
    try:
        generator = np.random.default_rng(11)
        events = pa.table(
            {"user": generator.integers(0, USERS, EVENTS), "amount": generator.exponential(20.0, EVENTS).round(2)}
        )
        rows = pipeline.remote(events).result()
        expected = features(events)
        pd.testing.assert_frame_equal(rows, expected.assign(score=score(expected)))
        print(f"{events.num_rows} events ({events.nbytes / 1e6:.1f} MB) -> {len(rows)} users, as computed here")
        best = rows["score"].idxmax()
        print(f"best user: {best}, {rows.loc[best, 'amount_count']:.0f} events")
        print(f"carried by: {', '.join(pipeline.lanes.remote().result())}")
    finally:
        serve.delete("features")


if __name__ == "__main__":
    main()
