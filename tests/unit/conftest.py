"""Tests of both ends together run on both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

BOTH_LOOPS = {"test_client_and_server.py"}


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if item.path.name in BOTH_LOOPS:
        loops["uvloop"] = uvloop.new_event_loop
    return loops
