"""A by-value result as object references: put when asked for, by the process that asks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray
from fakes import FakeCall, metadata, result_of, value
from ray.exceptions import ActorUnavailableError, RayTaskError

from ray_serve_grpc import _native, errors


@pytest.fixture
def store(monkeypatch):
    """What was put, in order; a reference is ("ref", index)."""
    items: list[Any] = []

    def put(item: Any) -> Any:
        items.append(item)
        return "ref", len(items) - 1

    monkeypatch.setattr(ray, "put", put)
    return items


def failed_message() -> Any:
    return (*errors.encode(ValueError("bad"), method="m", actor_id="00", limit=1 << 20), ())


async def in_thread(function: Any, *args: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, function, *args)


@pytest.mark.parametrize("size", [1, 1 << 20])
async def test_a_value_is_put_once(store, size):
    result = result_of(FakeCall().arrives(value(b"x" * size)).end())
    first = await result.to_object_ref_async()
    assert await result.to_object_ref_async() == first
    assert await in_thread(result.to_object_ref) == first
    assert store == [b"x" * size]


async def test_a_user_error_is_raised_by_whoever_gets_the_reference(store):
    result = result_of(FakeCall().arrives(failed_message()).end())
    await result.to_object_ref_async()
    (item,) = store
    # An object of this class in the store is raised by `ray.get`.
    assert isinstance(item, RayTaskError)


async def test_a_lost_call_is_raised_at_once(store):
    result = result_of(FakeCall().admit().end(_native.STATUS_UNAVAILABLE, "lost"))
    with pytest.raises(ActorUnavailableError):
        await result.to_object_ref_async()
    assert store == []


async def test_waiting_for_a_reference_can_time_out(store):
    with pytest.raises(TimeoutError):
        await in_thread(result_of(FakeCall()).to_object_ref, 0.01)


async def test_a_stream_of_references(store):
    call = FakeCall().arrives(value("a"), value("b"), failed_message()).end()
    refs = result_of(call, metadata(stream=True)).to_object_ref_gen()
    assert isinstance(refs, ray.ObjectRefGenerator)
    assert store == []
    assert [ref async for ref in refs] == [("ref", 0), ("ref", 1), ("ref", 2)]
    assert store[:2] == ["a", "b"]
    assert isinstance(store[2], RayTaskError)
    assert refs.is_finished()


async def test_a_stream_of_references_for_a_thread(store):
    refs = result_of(FakeCall().arrives(value("a")).end(), metadata(stream=True)).to_object_ref_gen()
    assert await in_thread(list, refs) == [("ref", 0)]


async def test_a_lost_stream_of_references(store):
    call = FakeCall().admit().end(_native.STATUS_UNAVAILABLE, "lost")
    refs = result_of(call, metadata(stream=True)).to_object_ref_gen()
    with pytest.raises(ActorUnavailableError):
        await refs.__anext__()


async def test_closing_cancels_the_stream(store):
    call = FakeCall()
    result_of(call, metadata(stream=True)).to_object_ref_gen().close()
    assert call.cancels == 1


async def test_what_a_by_value_stream_cannot_do_says_so(store):
    refs = result_of(FakeCall(), metadata(stream=True)).to_object_ref_gen()
    for name in ("completed", "next_ready", "__getstate__", "__reduce__"):
        with pytest.raises(NotImplementedError, match="_by_reference=True"):
            getattr(refs, name)()
