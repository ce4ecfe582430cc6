"""Values survive each serialization, what need not be copied is not, and errors name the argument."""

from __future__ import annotations

import builtins
import pickle
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import ormsgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.serialization import RPCSerializer as RaysSerializer

from ray_serve_grpc import bare, serializers
from ray_serve_grpc.errors import MissingLibrary, NotSerializable, UnknownSerialization
from ray_serve_grpc.serializers import RPCSerializer

PICKLES = ("cloudpickle", "pickle")
MIB = 1 << 20


def carried(encoded: serializers.Encoded) -> tuple[Any, tuple[bytearray, ...]]:
    """An encoded value as its receiver has it: the body in one piece, the buffers private and writable."""
    body, buffers = encoded
    return body if isinstance(body, bytes) else b"".join(body), tuple(bytearray(buffer) for buffer in buffers)


def there_and_back(value: Any, name: str = "cloudpickle") -> Any:
    serializer = RPCSerializer(name, name)
    return serializer.decode_response(*carried(serializer.encode_response(value)))


def called_with(*args: Any, _name: str = "cloudpickle", **kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    serializer = RPCSerializer(_name)
    positional, named = serializer.decode_request(*carried(serializer.encode_request(args, kwargs)))
    return list(positional), named


@dataclass
class Point:
    x: int
    tag: str


class Text(str):
    __slots__ = ("extra",)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner), max_leaves=40
)


@given(values)
def test_builtins_come_back_as_they_were(value):
    for name in PICKLES:
        result = there_and_back(value, name)
        assert (result, type(result)) == (value, type(value))


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.parametrize(
    "value",
    [
        Point(1, "a"),
        Text("t"),
        OrderedDict(a=1),
        {1: "int key"},
        {(1, 2): 3},
        [set()],
        range(3),
        ValueError("x"),
        Point,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_a_small_builtin_comes_back_too(name, value):
    result = there_and_back(value, name)
    assert type(result) is type(value)
    assert repr(result) == repr(value)


class NotAsked:
    """Stands for cloudpickle where plain pickle is to do."""

    def __init__(self, *_: object, **__: object) -> None:
        pytest.fail("the slow path was taken")


ARRAYS = [
    np.arange(6.0),
    np.arange(100_000, dtype=np.float32).reshape(1000, 100),
    np.asfortranarray(np.arange(100_000).reshape(1000, 100)),
    np.arange(100_000)[::3],
    np.zeros((0, 3)),
    np.array(5),
    np.array(["a", "bc"]),
    np.array(["2026-11-30"], dtype="datetime64[D]"),
    np.array([(1, 2.5)], dtype=[("id", "i4"), ("score", "f8")]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype} {array.shape}")
def test_arrays_and_plain_values_take_the_quick_path(array):
    value = ((array, "text"), {"options": {"id": 1, "raw": b"x" * 100_000}})
    body, buffers = serializers.encode(value, NotAsked)
    (result, text), options = serializers.decode(b"".join([body] if type(body) is bytes else body), buffers)
    np.testing.assert_array_equal(result, array, strict=True)
    assert result.flags.f_contiguous == array.flags.f_contiguous or not array.flags.contiguous
    assert (text, options) == value[0][1:] + value[1:]


@pytest.mark.parametrize(
    "value",
    [
        Text("t"),
        OrderedDict(),
        [[[[[1]]]]],
        {1: 2},
        np.array([Point(1, "inside")]),
        np.zeros(2, dtype=np.dtype("f8", metadata={"unit": Point(1, "inside")})),
        np.ma.masked_array([1, 2], [True, False]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_only_looks_plain_does_not_take_the_quick_path(value):
    with pytest.raises(pytest.fail.Exception, match="slow path"):
        serializers.encode(value, NotAsked)


@pytest.mark.parametrize("depth", [1, 3, 4, 5, 50])
def test_nesting_of_any_depth(depth):
    value: Any = Point(1, "inside")
    for _ in range(depth):
        value = [value]
    assert there_and_back(value) == value


def test_a_value_that_contains_itself():
    value: list[Any] = [1]
    value.append(value)
    result = there_and_back(value)
    assert result[1] is result


def test_identity_among_arguments_is_kept():
    shared = [1]
    (first, second), named = called_with(shared, shared, k=shared)
    assert first is second is named["k"]


def test_functions_and_classes_of_main_travel_by_value():
    factor = 3
    multiply = eval("lambda x: x * factor", {"__name__": "__main__", "factor": factor})
    local = type("Local", (), {"__module__": "__main__", "answer": 42})
    (function, cls), _ = called_with(multiply, local)
    assert function(2) == 6
    assert cls().answer == 42
    with pytest.raises(NotSerializable):
        RPCSerializer("pickle").encode_request([multiply], {})


# Big buffers stay where they are.


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_go_out_of_band_without_a_copy(name, order):
    array = np.asarray(np.arange(100_000, dtype=np.float32).reshape(100, 1000), order=order)
    body, buffers = RPCSerializer(name).encode_request([array], {})
    assert len(body) < 1000
    (buffer,) = buffers
    assert np.shares_memory(np.frombuffer(buffer, np.float32), array)
    (result,), _ = called_with(array, _name=name)
    assert np.array_equal(result, array)
    assert result.flags.writeable
    assert result.flags[f"{order}_CONTIGUOUS"]


#: An array of each kind of number, in each order and of sizes on both sides of the border, is sent without a pickle.
SIMPLE = [
    *(np.arange(24).astype(char).reshape(2, 3, 4) for char in "?bBhHiIlLqQefdFD"),
    *(np.zeros(shape) for shape in ((), (0,), (3, 0), (511,), (512,), (5000,))),
    np.arange(6, dtype=">f4"),
    np.arange(10_000).reshape(100, 100)[10:20],
    *(np.asfortranarray(np.arange(count).reshape(10, -1)) for count in (100, 10_000)),
]


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.parametrize("array", SIMPLE, ids=lambda array: f"{array.dtype} {array.shape}")
def test_a_single_array_of_numbers_is_not_pickled(name, array):
    serializer = RPCSerializer(name, name)
    for encoded in (serializer.encode_request([array], {}), serializer.encode_response(array)):
        assert carried(encoded)[0][:1] == bare.ARRAY
    ((argument,), named), result = called_with(array, _name=name), there_and_back(array, name)
    assert named == {}
    for received in (argument, result):
        np.testing.assert_array_equal(received, array, strict=True)
        assert received.dtype == array.dtype
        assert received.flags.f_contiguous == array.flags.f_contiguous
        assert received.flags.writeable
        assert not np.shares_memory(received, array)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(9)[::2],
        np.array(["text"]),
        np.array([None]),
        np.zeros(3, "datetime64[D]"),
        np.zeros(3, np.longdouble),
        np.zeros(3, dtype=np.dtype("f8", metadata={"unit": "m"})),
        np.ma.masked_array([1, 2], [True, False]),
        np.zeros((2, 2)).view(np.matrix),
        np.broadcast_to(np.zeros(3), (4, 3)),
    ],
    ids=lambda array: f"{type(array).__name__} {array.dtype}",
)
def test_any_other_array_is_pickled(array):
    assert bare.encode(array) is None
    result = there_and_back(array)
    assert (type(result), result.dtype, result.tolist()) == (type(array), array.dtype, array.tolist())


def test_an_array_beside_other_arguments_is_pickled():
    for args, kwargs in (([np.ones(3), 1], {}), ([np.ones(3)], {"k": 1}), ([], {"k": np.ones(3)})):
        positional, named = called_with(*args, **kwargs)
        assert [np.asarray(value).tolist() for value in positional] == [np.asarray(value).tolist() for value in args]
        assert {name: np.asarray(v).tolist() for name, v in named.items()} == {
            name: np.asarray(v).tolist() for name, v in kwargs.items()
        }


@pytest.mark.parametrize("name", [*PICKLES, "noop"])
@pytest.mark.parametrize("size", [bare.BY_REFERENCE, 20 * MIB + 1])
def test_large_bytes_alone_are_not_pickled(name, size):
    value = bytes(range(256)) * (size // 256) + bytes(size % 256)
    _, (buffer,) = RPCSerializer(name, name).encode_response(value)
    assert buffer is value
    for result in (there_and_back(value, name), called_with(value, _name=name)[0][0]):
        assert type(result) is bytes
        assert result == value


def test_an_array_that_lacks_memory_is_an_error():
    serializer = RPCSerializer()
    body, (buffer,) = carried(serializer.encode_response(np.zeros(1000)))
    for wrong, buffers in ((body, [buffer[:-1]]), (body, []), (body[:-1], [buffer]), (bare.ARRAY, [])):
        for decode in (serializer.decode_request, serializer.decode_response):
            with pytest.raises((TypeError, IndexError, EOFError, pickle.UnpicklingError)):
                decode(wrong, buffers)


def test_small_arrays_stay_in_band():
    body, buffers = RPCSerializer().encode_response(np.zeros(10))
    assert isinstance(body, bytes)
    assert not buffers
    assert there_and_back(np.zeros(10)).flags.writeable


@pytest.mark.parametrize("writeable", [True, False])
@pytest.mark.parametrize("size", [10, 10_000])
def test_a_read_only_array_stays_one(size, writeable):
    array = np.zeros(size)
    array.flags.writeable = writeable
    assert there_and_back(array).flags.writeable == writeable


def test_arrays_without_contiguous_memory():
    array = np.zeros((2000, 100))[:, ::3]
    assert np.array_equal(there_and_back(array), array)


def test_object_arrays_and_structured_arrays():
    objects = np.array([{"a": 1}, None, "x" * 9000], dtype=object)
    assert there_and_back(objects).tolist() == objects.tolist()
    structured = np.zeros(9000, dtype=[("a", "i4"), ("b", "f8")])
    assert there_and_back(structured).dtype == structured.dtype


@pytest.mark.parametrize("size", [0, 1, 4095, 65_535, 65_536, 65_537, 5 * MIB])
@pytest.mark.parametrize(
    "kind", [bytes, bytearray, lambda data: data.decode("latin-1")], ids=["bytes", "bytearray", "str"]
)
def test_long_bytes_and_strings(size, kind):
    value = kind(np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes())
    for sent in (value, [value, 1, value], {"k": value, "again": kind(b"z" * size)}):
        assert there_and_back(sent) == sent


def test_big_bytes_are_handed_on_not_copied():
    data = bytes(MIB)
    body, buffers = RPCSerializer().encode_request([data, "x"], {"more": data})
    assert not buffers
    assert any(part is data for part in body)


def test_a_sent_bytearray_can_be_changed_at_once():
    data = bytearray(MIB)
    encoded = RPCSerializer().encode_response({"a": data})
    data[:] = b"x" * MIB
    data.extend(b"more")
    assert serializers.decode(*carried(encoded)) == {"a": bytearray(MIB)}


def test_data_frames_and_arrow_tables():
    pandas = pytest.importorskip("pandas")
    arrow = pytest.importorskip("pyarrow")
    frame = pandas.DataFrame({"a": np.arange(5000.0), "b": ["text"] * 5000})
    pandas.testing.assert_frame_equal(there_and_back(frame), frame)
    table = arrow.table({"a": np.arange(100_000)})
    body, buffers = carried(RPCSerializer().encode_response(table))
    assert len(body) < 10_000
    assert serializers.decode(body, buffers).equals(table)


def test_the_size_counts_parts_and_buffers():
    array = np.zeros(1000)
    data = b"x" * 100_000
    body, buffers = RPCSerializer().encode_response([array, data])
    assert 108_000 < serializers.encoded_size(body, buffers) < 109_000
    assert serializers.encoded_size(b"abc", ()) == 3


# Text formats.


@pytest.mark.parametrize("name", ["msgpack", "orjson"])
def test_plain_data_in_a_text_format(name):
    value = {"a": [1, 2.5, None, True, "x"]}
    assert there_and_back(value, name) == value
    assert called_with(1, "a", _name=name, k=[2]) == ([1, "a"], {"k": [2]})


def test_request_and_response_are_chosen_apart():
    serializer = RPCSerializer("orjson", "noop")
    assert serializer.decode_request(*carried(serializer.encode_request([[1]], {}))) == ([[1]], {})
    assert serializer.decode_response(*carried(serializer.encode_response(b"x"))) == b"x"


@pytest.mark.parametrize("name", ["cloudpickle", "pickle", "msgpack", "orjson"])
def test_what_a_stock_process_gets_is_what_ray_would_send(name):
    ours, rays = RPCSerializer(name, name), RaysSerializer(name, name)
    args, kwargs = [1, "a", [2]], {"k": {"x": None}}
    assert ours.stock_request(args, kwargs) == (rays.dumps_request(args), rays.dumps_request(kwargs))
    assert ours.stock_response(args) == rays.dumps_response(args)
    assert ours.request.loads(memoryview(rays.dumps_request(args))) == args
    assert ours.response.loads(rays.dumps_response(kwargs)) == kwargs


def test_msgpack_is_ormsgpack():
    assert RPCSerializer("msgpack").stock_response  # the name is known
    body, _ = RPCSerializer("msgpack", "msgpack").encode_response([1])
    assert body == ormsgpack.packb([1])


# noop


def test_noop_gives_bytes_back_as_bytes():
    (result,), named = called_with(b"abc", _name="noop")
    assert (result, type(result), named) == (b"abc", bytes, {})


@pytest.mark.parametrize(
    "value",
    [bytearray(b"abcd"), memoryview(b"abcd"), np.arange(4, dtype=np.uint8)],
    ids=["bytearray", "memoryview", "array"],
)
def test_noop_gives_other_buffers_back_as_a_writable_view(value):
    result = there_and_back(value, "noop")
    assert isinstance(result, memoryview)
    assert result.tobytes() == memoryview(value).tobytes()
    result[0] = 255


def test_noop_does_not_copy():
    array = np.zeros((10, 1000), np.int32)
    _, (buffer,) = RPCSerializer("noop").encode_request([array], {})
    assert np.shares_memory(np.frombuffer(buffer, np.int32), array)
    data = bytes(100_000)
    _, (same,) = RPCSerializer("noop").encode_request([data], {})
    assert same is data


def test_noop_takes_any_number_of_arguments():
    assert called_with(_name="noop") == ([], {})
    first, second, empty = called_with(b"a", bytearray(b"b"), b"", _name="noop")[0]
    assert (first, bytes(second), empty) == (b"a", b"b", b"")


@pytest.mark.parametrize("value", [1, "text", [b"x"], None, np.zeros((4, 4))[:, 1]])
def test_noop_refuses_what_is_not_bytes(value):
    with pytest.raises(TypeError, match=r"argument 1 \(type .*\) cannot be sent with request_serialization='noop'"):
        RPCSerializer("noop").encode_request([b"fine", value], {})


def test_noop_refuses_keyword_arguments():
    with pytest.raises(TypeError, match="keyword arguments \\(k\\)"):
        RPCSerializer("noop").encode_request([], {"k": b"x"})


# What goes wrong is said before anything is sent.


@pytest.mark.parametrize("name", ["cloudpickle", "pickle", "msgpack", "orjson"])
def test_an_unserializable_argument_is_named(name):
    with pytest.raises(NotSerializable, match=r"Keyword argument 'lock' \(type _thread.lock\)") as caught:
        RPCSerializer(name).encode_request([1, "fine"], {"lock": threading.Lock()})
    assert isinstance(caught.value, TypeError)
    assert name in str(caught.value)
    assert "Nothing was sent" in str(caught.value)
    with pytest.raises(NotSerializable, match="Positional argument 1"):
        RPCSerializer(name).stock_request([1, threading.Lock()], {})


@pytest.mark.parametrize("name", ["cloudpickle", "msgpack", "orjson", "noop"])
def test_an_unserializable_result_is_named(name):
    with pytest.raises(NotSerializable, match="_thread.lock .*response_serialization='" + name):
        RPCSerializer("cloudpickle", name).encode_response(threading.Lock())


def test_user_classes_that_fail_in_unusual_ways():
    class Hostile:
        def __reduce__(self) -> Any:
            raise RuntimeError("no")

    class Unprintable:
        def __reduce__(self) -> Any:
            raise type("E", (Exception,), {"__str__": lambda self: 1 / 0})

    for value in (Hostile(), Unprintable()):
        with pytest.raises(NotSerializable):
            RPCSerializer().encode_request([value], {})


@pytest.mark.parametrize("position", [0, 1])
def test_an_unknown_name_lists_the_known_ones(position):
    names = ["cloudpickle", "cloudpickle"]
    names[position] = "xml"
    setting = ("request_serialization", "response_serialization")[position]
    with pytest.raises(UnknownSerialization, match=f"{setting}='xml'.*cloudpickle, msgpack, noop, orjson, pickle"):
        RPCSerializer(*names)
    assert issubclass(UnknownSerialization, ValueError)


def test_names_in_any_letter_case():
    assert RPCSerializer("Pickle", "CLOUDPICKLE").request.name == "pickle"


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(serializers, "_codecs", {})
    monkeypatch.setitem(sys.modules, "orjson", None)
    with pytest.raises(MissingLibrary, match="pip install orjson") as caught:
        RPCSerializer("orjson")
    assert isinstance(caught.value, builtins.ImportError)


def test_the_instances_are_shared():
    assert RPCSerializer.named("pickle", "orjson") is RPCSerializer.named("pickle", "orjson")


# One's own.


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(serializers, "_codecs", dict(serializers._codecs))
    yield
    serializers._serializers.clear()


@pytest.mark.usefixtures("registry")
def test_a_registered_serialization():
    serializers.register("Reversed", lambda value: repr(value)[::-1].encode(), lambda data: eval(bytes(data)[::-1]))
    assert there_and_back({"a": (1,)}, "reversed") == {"a": (1,)}
    assert called_with(1, _name="reversed", k=2) == ([1], {"k": 2})


@pytest.mark.usefixtures("registry")
def test_a_registered_serialization_may_give_any_buffer():
    serializers.register("array", lambda value: np.asarray(value, np.uint8), lambda data: np.frombuffer(data, np.uint8))
    assert there_and_back([1, 2], "array").tolist() == [1, 2]


@pytest.mark.usefixtures("registry")
def test_a_stock_replica_does_not_know_a_registered_serialization():
    serializers.register("mine", pickle.dumps, pickle.loads)
    with pytest.raises(UnknownSerialization, match="'mine' was registered with the plugin"):
        RPCSerializer("mine").stock_request([1], {})


@pytest.mark.parametrize("name", ["pickle", "OrJson", ""])
def test_the_names_that_exist_are_taken(name):
    with pytest.raises(ValueError, match="cannot be registered"):
        serializers.register(name, pickle.dumps, pickle.loads)
