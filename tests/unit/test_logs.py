"""What the plugin logs, and how the core's messages come to the logger."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import FakeReplica

from ray_serve_grpc import _native, background, config, logs
from ray_serve_grpc.bridge import bridge_for
from ray_serve_grpc.server import ReplicaServer


@pytest.fixture(autouse=True)
def levels(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, config.LOGGER_NAME)
    background.stop()  # or it hands the records on before the test looks
    _native.set_log_level(logging.INFO)
    _native.take_log_records()
    yield
    _native.set_log_level(logging.WARNING)


async def nobody_answers(folder: Any) -> _native.Channel:
    """A channel that has tried to connect in vain."""
    channel = _native.Channel([f"unix:{folder}/nobody.sock"], identity="a" * 8)
    tried = asyncio.get_running_loop().create_future()
    channel.watch_ready(bridge_for(tried.get_loop()), lambda: tried.set_result(None))
    await tried
    return channel


async def test_a_message_of_the_core_goes_to_the_logger_with_its_own_time(caplog, tmp_path):
    before = time.time()
    await nobody_answers(tmp_path)
    after = time.time()
    logs.hand_on()
    (record,) = caplog.records
    assert (record.name, record.levelno) == (config.LOGGER_NAME, logging.INFO)
    assert "Cannot connect" in record.getMessage()
    assert f"{tmp_path}/nobody.sock" in record.getMessage()
    assert before - 1 <= record.created <= after + 1
    logs.hand_on()
    assert len(caplog.records) == 1


async def test_the_log_level_holds_for_the_core(caplog, tmp_path):
    _native.set_log_level(logging.WARNING)
    await nobody_answers(tmp_path)
    assert _native.take_log_records() == []


async def test_the_setting_of_the_log_level_reaches_the_core(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "settings", lambda: config.Settings(log_level="ERROR"))
    background.start()
    try:
        await nobody_answers(tmp_path)
        assert _native.take_log_records() == []
    finally:
        background.stop()


async def test_what_the_core_told_last_is_handed_on_when_the_process_ends(caplog, tmp_path):
    background.start()
    await nobody_answers(tmp_path)
    background.stop()
    assert [record.levelno for record in caplog.records] == [logging.INFO]


@pytest.mark.parametrize("token", ["Bearer secret", None])
async def test_a_replica_logs_one_line_at_its_start_and_one_for_each_step_of_its_end(caplog, tmp_path, token):
    path = str(tmp_path / "r.sock")
    server = ReplicaServer(
        FakeReplica(None), host="127.0.0.1", unix_path=path, identity=os.urandom(8).hex(), authorization=token
    )
    port = await server.start()
    (line,) = [record.getMessage() for record in caplog.records]
    for part in (f"tcp:127.0.0.1:{port}", f"unix:{path}", "lanes shm, unix, tcp", "TLS off"):
        assert part in line
    assert ("token on" if token else "token off") in line
    assert "secret" not in line
    await server.stop(1.5)
    await server.stop(1.5)
    assert [record.getMessage()[:14] for record in caplog.records[1:]] == ["Takes no more ", "Stopped servin"]
