"""A buffer is copied exactly if somebody besides the response may still write to it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from ray_serve_grpc import ownership
from ray_serve_grpc.serializers import RPCSerializer

SIZE = 10_000
HELD = np.zeros(SIZE)
HELD_TABLE = np.zeros((50, 1000))
HELD_DICT = {"a": np.zeros(SIZE)}
HELD_BYTEARRAY = bytearray(SIZE)


def read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def frozen() -> np.ndarray:
    array = np.zeros(SIZE)
    array.flags.writeable = False
    return array


FROZEN = frozen()


def copied(make: Any, name: str = "cloudpickle") -> list[bool]:
    """For each buffer of the response that `make` returns, whether it is copied."""
    box = [make()]
    _, buffers = RPCSerializer("cloudpickle", name).encode_response(box[0])
    secured = ownership.secured(box, buffers)
    assert [bytes(buffer) for buffer in secured] == [bytes(buffer) for buffer in buffers]
    return [now is not before for now, before in zip(secured, buffers, strict=True)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros(SIZE),
        lambda: np.zeros((100, 1000))[10:],
        lambda: np.asfortranarray(np.ones((100, 1000))),
        lambda: {"a": np.zeros(SIZE), "b": [np.zeros(SIZE), (np.zeros(SIZE),)]},
        lambda: HELD * 2,
        lambda: np.frombuffer(bytes(SIZE), np.uint8),
        lambda: FROZEN,
    ],
    ids=["array", "view", "fortran", "nested", "computed", "of bytes", "frozen"],
)
def test_what_nobody_can_write_to_is_sent_as_it_is(make):
    assert not any(copied(make))


@pytest.mark.parametrize(
    "make",
    [
        lambda: HELD,
        lambda: HELD_TABLE[3:40],
        lambda: HELD_TABLE.T,
        lambda: HELD_DICT,
        lambda: [HELD],
        lambda: read_only(HELD),
        lambda: np.lib.stride_tricks.as_strided(HELD, writeable=False),
        lambda: [[[[[[np.zeros(SIZE)]]]]]],
    ],
    ids=["array", "view", "transposed", "dict", "in a list", "read-only view", "strided", "too deep"],
)
def test_what_somebody_else_may_write_to_is_copied(make):
    assert all(copied(make))


def test_noop():
    assert copied(lambda: bytes(SIZE), "noop") == [False]
    assert copied(lambda: bytearray(SIZE), "noop") == [False]
    assert copied(lambda: np.zeros(SIZE), "noop") == [False]
    assert copied(lambda: HELD_BYTEARRAY, "noop") == [True]
    assert copied(lambda: memoryview(HELD_BYTEARRAY), "noop") == [True]


def test_arrow_is_immutable_and_pandas_is_not():
    arrow = pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    assert not any(copied(lambda: arrow.table({"a": np.zeros(SIZE)})))
    assert all(copied(lambda: pandas.DataFrame({"a": np.zeros(SIZE)})))


async def test_a_turn_of_the_loop_lets_a_future_go():
    future = asyncio.get_running_loop().create_future()
    future.set_result(np.zeros(SIZE))
    box = [await future]
    asyncio.get_running_loop().call_soon(lambda held: None, future)
    del future
    _, buffers = RPCSerializer().encode_response(box[0])
    assert ownership.secured(box, buffers) is not buffers
    assert await ownership.secured_soon(box, buffers) is buffers
    assert ownership.secured(box, buffers) is buffers


async def test_what_takes_long_to_copy_is_copied_on_a_thread(monkeypatch):
    copied_on = []

    def secure(buffer):
        copied_on.append(threading.get_ident())
        return bytes(buffer)

    monkeypatch.setattr(ownership, "secure", secure)
    held = np.arange(ownership.WORTH_A_THREAD, dtype=np.uint8)
    box = [held]
    _, buffers = RPCSerializer().encode_response(box[0])
    (secured,) = await ownership.secured_soon(box, buffers)
    held[:] = 0
    assert any(secured)
    assert ownership.secured(box, [secured])[0] is secured
    assert copied_on != []
    assert threading.get_ident() not in copied_on


async def test_what_a_peer_lent_is_neither_copied_nor_waited_for(monkeypatch):
    turns = []
    asyncio.get_running_loop().call_soon(turns.append, 1)
    monkeypatch.setattr(ownership, "snapshot", bytes)
    monkeypatch.setattr(ownership, "secure", None)
    lent = np.zeros(ownership.WORTH_A_TURN)
    box = [lent]
    _, buffers = RPCSerializer().encode_response(box[0])
    (passed_on,) = await ownership.secured_soon(box, buffers)
    assert ownership.secured(box, [passed_on]) == [passed_on]
    assert (type(passed_on), turns) == (bytes, [])


async def test_no_turn_is_taken_for_little():
    turns = []
    asyncio.get_running_loop().call_soon(turns.append, 1)
    held = np.zeros(1000)
    box = [held]
    _, buffers = RPCSerializer().encode_response(box[0])
    await ownership.secured_soon(box, buffers)
    assert turns == []
