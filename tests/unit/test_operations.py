"""The error texts of docs/operations.md are those that callers see: each failure is brought about here.

With WRITE_OPERATIONS=1 the table is written anew.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from fakes import FakeReplica, metadata, pending

from ray_serve_grpc import config
from ray_serve_grpc.client import gRPCReplicaWrapper
from ray_serve_grpc.server import ReplicaServer

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
BEGIN, END = "<!-- errors: begin -->", "<!-- errors: end -->"

ACTOR = ray.ActorID(bytes(range(16)))
OTHER = ray.ActorID(bytes(range(16, 32)))


async def user_code(method: str, value: Any = None) -> Any:
    if method == "wait":
        await asyncio.Event().wait()
    return value


@asynccontextmanager
async def replica(folder: Path, actor: Any = ACTOR, **options: Any) -> AsyncIterator[tuple[ReplicaServer, str]]:
    path = str(folder / "r.sock")
    options = {"authorization": None, **options}
    server = ReplicaServer(FakeReplica(user_code), host="127.0.0.1", unix_path=path, identity=actor.hex(), **options)
    await server.start()
    try:
        yield server, path
    finally:
        await server.stop(0)


@asynccontextmanager
async def caller(path: str, actor: Any = ACTOR) -> AsyncIterator[gRPCReplicaWrapper]:
    wrapper = gRPCReplicaWrapper(actor, [f"unix:{path}"], deployment="Model")
    try:
        yield wrapper
    finally:
        wrapper.close()


async def failure(wrapper: gRPCReplicaWrapper, *args: Any, between: Callable[[], Any] | None = None) -> BaseException:
    """Why a call fails, before or after it was admitted."""
    try:
        result = wrapper.send_request_python(pending(*args, about=metadata()), with_rejection=True)
        await asyncio.wait_for(result.get_rejection_response(), 30)
        if between is not None:
            between()
        await asyncio.wait_for(result.get_async(), 30)
    except Exception as error:
        return error
    raise AssertionError("the call did not fail")


async def nobody_listens(folder: Path, monkeypatch: Any) -> BaseException:
    async with caller(str(folder / "r.sock")) as wrapper:
        return await failure(wrapper, "echo", 1)


async def another_replica_there(folder: Path, monkeypatch: Any) -> BaseException:
    async with replica(folder, OTHER) as (_, path), caller(path) as wrapper:
        return await failure(wrapper, "echo", 1)


async def wrong_token(folder: Path, monkeypatch: Any) -> BaseException:
    async with replica(folder, authorization="Bearer right") as (_, path), caller(path) as wrapper:
        return await failure(wrapper, "echo", 1)


async def lost_after_it_was_taken(folder: Path, monkeypatch: Any) -> BaseException:
    async with replica(folder) as (server, path), caller(path) as wrapper:
        return await failure(wrapper, "wait", between=lambda: server._server.close())


async def silent_after_it_was_taken(folder: Path, monkeypatch: Any) -> BaseException:
    """A middle that takes all bytes, and after the admission passes on none."""
    monkeypatch.setenv("RAY_SERVE_GRPC_KEEPALIVE_INTERVAL_S", "0.5")
    monkeypatch.setenv("RAY_SERVE_GRPC_KEEPALIVE_TIMEOUT_S", "0.5")
    config.settings.cache_clear()
    cut = asyncio.Event()

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            if not cut.is_set():
                sink.write(data)
        sink.close()

    async with replica(folder) as (server, _):

        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", server._server.port)
            await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer), return_exceptions=True)

        async with await asyncio.start_server(between, "127.0.0.1", 0) as relay:
            port = relay.sockets[0].getsockname()[1]
            wrapper = gRPCReplicaWrapper(ACTOR, [f"tcp:127.0.0.1:{port}"], deployment="Model")
            try:
                return await failure(wrapper, "wait", between=cut.set)
            finally:
                wrapper.close()


async def refused_while_it_drains(folder: Path, monkeypatch: Any) -> BaseException:
    async with replica(folder) as (server, path), caller(path) as wrapper:
        held = wrapper.send_request_python(pending("wait", about=metadata()), with_rejection=True)
        await held.get_rejection_response()
        stopping = asyncio.ensure_future(server.stop(30))
        while not await _is_refused(wrapper):
            await asyncio.sleep(0)
        error = await failure(wrapper, "echo", 1)
        held.cancel()
        await stopping
        return error


async def _is_refused(wrapper: gRPCReplicaWrapper) -> bool:
    result = wrapper.send_request_python(pending("echo", 1, about=metadata()), with_rejection=True)
    try:
        await asyncio.wait_for(result.get_rejection_response(), 30)
    except Exception:
        return True
    return False


async def request_over_the_limit(folder: Path, monkeypatch: Any) -> BaseException:
    monkeypatch.setenv("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE", "65536")
    config.settings.cache_clear()
    async with replica(folder) as (_, path), caller(path) as wrapper:
        return await failure(wrapper, "echo", bytes(100_000))


async def silent_peer(folder: Path, monkeypatch: Any) -> BaseException:
    """A listener that never says anything."""
    monkeypatch.setenv("RAY_SERVE_GRPC_CONNECT_TIMEOUT_S", "0.2")
    config.settings.cache_clear()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "r.sock"))
        listener.listen()
        async with caller(str(folder / "r.sock")) as wrapper:
            return await failure(wrapper, "echo", 1)


async def unknown_serialization(folder: Path, monkeypatch: Any) -> BaseException:
    async with replica(folder) as (_, path), caller(path) as wrapper:
        about = metadata(request_serialization="yaml")
        try:
            wrapper.send_request_python(pending("echo", 1, about=about), with_rejection=True)
        except Exception as error:
            return error
        raise AssertionError


async def channel_closed(folder: Path, monkeypatch: Any) -> BaseException:
    async with replica(folder) as (_, path), caller(path) as wrapper:
        wrapper._peer.channel.close()
        return await failure(wrapper, "echo", 1)


#: What happened, and what brings it about; what to do stands beside it in the document.
FAILURES: dict[str, tuple[Callable[..., Awaitable[BaseException]], str]] = {
    "Nobody listens": (
        nobody_listens,
        "The replica is gone, or was never there. The router tries another one by itself; look for why it ended "
        "(`serve status`, the replica's log).",
    ),
    "The peer accepts and stays silent": (
        silent_peer,
        "It is frozen or overloaded, or something in between swallows packets. Retried elsewhere.",
    ),
    "Another replica is there": (
        another_replica_there,
        "The port or socket was given to a new process. Retried; the router learns of the new replica from Serve's "
        "controller.",
    ),
    "The token is wrong": (
        wrong_token,
        "Caller and replica have different tokens: see Ray's token authentication. Not retried.",
    ),
    "Lost after the request was taken": (
        lost_after_it_was_taken,
        "The replica died: see its log, or an `exit` in user code. It may have run: repeat it if that does no harm.",
    ),
    "Silent after the request was taken": (
        silent_after_it_was_taken,
        "The replica is frozen (stopped, swapping), or the network is cut. Raise "
        "`RAY_SERVE_GRPC_KEEPALIVE_TIMEOUT_S` where that is to be waited for.",
    ),
    "It drains": (
        refused_while_it_drains,
        "Scale-down or a new deployment: the replica takes nothing new. It did not run, and goes elsewhere.",
    ),
    "The replica was removed": (
        channel_closed,
        "The router has let go of the replica. Retried elsewhere.",
    ),
    "The request is too large": (request_over_the_limit, "Raise the setting on both sides, or pass a reference."),
    "The serialization is unknown": (unknown_serialization, "Register it on both sides, or choose another one."),
}


def normal(text: str, folder: Path) -> str:
    """Without what differs from run to run."""
    text = text.replace(ACTOR.hex(), "REPLICA").replace(OTHER.hex(), "OTHER-REPLICA")
    text = text.replace(str(folder), "/FOLDER")
    text = re.sub(r"A request of \d+ bytes", "A request of SIZE bytes", text)
    text = re.sub(r"(whose process may have ended): [^)]*\)", r"\1: REASON)", text)
    text = re.sub(r"tcp:127\.0\.0\.1:\d+", "tcp:HOST:PORT", text)
    text = re.sub(r"(No such file or directory|Connection refused) \(os error \d+\)", "REASON", text)
    return " ".join(text.split()).replace("|", "\\|")


@pytest.mark.parametrize("happened", FAILURES)
async def test_the_text_of_a_failure_is_the_documented_one(happened, tmp_path, monkeypatch):
    make, advice = FAILURES[happened]
    try:
        error = await make(tmp_path, monkeypatch)
    finally:
        config.settings.cache_clear()
    kind = type(error).__name__
    row = f"| {happened} | `{kind}` | {normal(str(error), tmp_path)} | {advice} |"
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = table.splitlines()
    if os.environ.get("WRITE_OPERATIONS"):
        rows = [line for line in rows if line.strip() and not line.startswith(f"| {happened} |")]
        rows[2:] = sorted([*rows[2:], row], key=lambda line: list(FAILURES).index(line.split("|")[1].strip()))
        DOCUMENT.write_text(before + BEGIN + "\n\n" + "\n".join(rows) + "\n\n" + END + after)
    assert row in rows


def test_every_row_of_the_document_is_tested():
    table = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert rows[2:] == list(FAILURES)
