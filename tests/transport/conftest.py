"""Every test here runs on every lane, and on both event loops."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Callable, Iterator

import pytest
import uvloop


@pytest.fixture(params=["tcp", "unix", "shm"])
def lane(request: pytest.FixtureRequest) -> str:
    return request.param


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def _switching() -> Iterator[None]:
    """With SWITCH_SEED set, Python's threads take turns after another random interval in each test."""
    seed = os.environ.get("SWITCH_SEED")
    if seed is None:
        yield
        return
    before = sys.getswitchinterval()
    chance = random.Random(f"{seed} {os.environ.get('PYTEST_CURRENT_TEST')}")
    sys.setswitchinterval(10 ** chance.uniform(-6, -2))
    yield
    sys.setswitchinterval(before)
