"""Every test here runs on every lane, and on both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop


@pytest.fixture(params=["tcp", "unix", "shm"])
def lane(request: pytest.FixtureRequest) -> str:
    return request.param


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
