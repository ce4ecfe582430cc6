"""Values to bytes and back, in the serialization that a handle asks for.

Layout:
    encode, decode      a value as a pickle in band plus the buffers that stay out of it
    bare                a single array, or large bytes, without a pickle
    Codec               one serialization; its subclasses are the ones a handle can name
    register            adds one of the user's own
    RPCSerializer       the pair of codecs that a call uses, for its request and its response

Between two of our processes a request is one message: `(args, kwargs)` together, and big
buffers beside the pickle, never copied into it (PEP 574). A process without the plugin gets
what it would send itself: args and kwargs apart, everything in band (`stock_*`).
"""

from __future__ import annotations

import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from ray import cloudpickle

from ray_serve_grpc import bare, timing
from ray_serve_grpc._native import to_bytes
from ray_serve_grpc.errors import MissingLibrary, NotSerializable, UnknownSerialization

BytesLike: TypeAlias = Any
#: (body, buffers): parts of a list are sent one after the other as one body
Encoded: TypeAlias = "tuple[bytes | list[BytesLike], Sequence[BytesLike]]"

PROTOCOL = 5

#: Strings and bytes from here on are handed over by the C pickler as they are, not copied
#: (its frame size), so this is where the quick path ends.
BY_REFERENCE = bare.BY_REFERENCE

#: Longest container that the quick path looks into.
FEW = 16

#: How plain a value is, see `_plainness`.
OTHER, PLAIN, SMALL = range(3)

_ATOMS = frozenset((int, float, bool, type(None), complex))


def encode(value: Any, pickler: Callable[..., Any] = cloudpickle.CloudPickler) -> Encoded:
    """Pickles `value` without copying its big buffers, bytes and strings.

    The parts of the body and the buffers refer to the value's own memory: it must not change
    before they are written, a `bytearray` excepted, which is copied since its owner may resize it.
    """
    plainness = _plainness(value)
    if plainness == SMALL:
        return pickle.dumps(value, PROTOCOL), ()
    if plainness == PLAIN:
        pickler = pickle.Pickler
    buffers: list[BytesLike] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Whether the buffer goes into the pickle."""
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous: the pickler says so
            return True
        if raw.nbytes < bare.OUT_OF_BAND:
            return True
        buffers.append(raw)
        return False

    sink = _Sink()
    pickler(sink, PROTOCOL, buffer_callback=keep).dump(value)
    parts = sink.parts
    if len(parts) == 1:
        return parts[0], buffers
    for index, part in enumerate(parts):
        if type(part) is not bytes:
            parts[index] = bytes(part)
    return parts, buffers


def decode(body: BytesLike, buffers: Sequence[BytesLike]) -> Any:
    return pickle.loads(body, buffers=buffers) if buffers else pickle.loads(body)


def _plainness(value: Any, depth: int = 4) -> int:
    """SMALL or PLAIN for few values of types for which plain pickle does what cloudpickle does in several times the
    time, SMALL if nothing in them is large either; OTHER for all else."""
    kind = type(value)
    if kind is str or kind is bytes:
        return SMALL if len(value) < BY_REFERENCE else PLAIN
    if kind in _ATOMS:
        return SMALL
    if not depth:
        return OTHER
    if kind is tuple or kind is list or kind is dict:
        if len(value) > FEW:
            return OTHER
        if kind is dict:
            for key in value:
                if type(key) is not str:
                    return OTHER
            value = value.values()
        least = SMALL
        for item in value:
            found = _plainness(item, depth - 1)
            if found < least:
                if found == OTHER:
                    return OTHER
                least = found
        return least
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        dtype = value.dtype
        if dtype.hasobject or dtype.metadata is not None:
            return OTHER
        return SMALL if value.nbytes < bare.OUT_OF_BAND else PLAIN
    return OTHER


def encoded_size(body: bytes | list[BytesLike], buffers: Sequence[BytesLike]) -> int:
    """Bytes of an encoded value, without the few of the message around it."""
    size = len(body) if isinstance(body, bytes) else sum(map(_nbytes, body))
    return size + sum(map(_nbytes, buffers)) if buffers else size


class _Sink:
    """A file for the C pickler, which writes big bytes by handing over the object itself."""

    __slots__ = ("parts", "write")

    def __init__(self) -> None:
        self.parts: list[BytesLike] = []
        self.write = self.parts.append


def _nbytes(data: BytesLike) -> int:
    return len(data) if isinstance(data, bytes) else memoryview(data).nbytes


class Codec(ABC):
    """One serialization. A codec has no state: any thread uses it at any time."""

    name: str

    #: Whether a process without the plugin knows it.
    stock: bool = True

    #: Whether a request may have keyword arguments; Serve's own trace context is one.
    keywords: bool = True

    @abstractmethod
    def encode(self, value: Any) -> Encoded: ...

    @abstractmethod
    def decode(self, body: BytesLike, buffers: Sequence[BytesLike]) -> Any: ...

    def encode_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Encoded:
        return self.encode((args, kwargs))

    def decode_call(self, body: BytesLike, buffers: Sequence[BytesLike]) -> tuple[Sequence[Any], dict[str, Any]]:
        args, kwargs = self.decode(body, buffers)
        return args, kwargs

    @abstractmethod
    def dumps(self, value: Any) -> bytes:
        """All in band, byte for byte what Ray's own transport makes of it."""

    def loads(self, data: BytesLike) -> Any:
        return self.decode(data, ())


class _Pickling(Codec):
    def encode(self, value: Any) -> Encoded:
        return bare.encode(value) or self._pickled(value)

    def decode(self, body: BytesLike, buffers: Sequence[BytesLike]) -> Any:
        return bare.decode(body, buffers) if bare.is_bare(body) else decode(body, buffers)

    def encode_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Encoded:
        encoded = bare.encode(args[0]) if len(args) == 1 and not kwargs else None
        return encoded or self._pickled((args, kwargs))

    def decode_call(self, body: BytesLike, buffers: Sequence[BytesLike]) -> tuple[Sequence[Any], dict[str, Any]]:
        if bare.is_bare(body):
            return [bare.decode(body, buffers)], {}
        args, kwargs = decode(body, buffers)
        return args, kwargs

    @abstractmethod
    def _pickled(self, value: Any) -> Encoded: ...


class CloudPickle(_Pickling):
    """What Ray itself uses: takes classes and functions of `__main__`, lambdas and closures too."""

    name = "cloudpickle"

    def dumps(self, value: Any) -> bytes:
        data: bytes = cloudpickle.dumps(value)
        return data

    def _pickled(self, value: Any) -> Encoded:
        return encode(value)


class Pickle(_Pickling):
    """The standard library's, for values that both sides can import."""

    name = "pickle"

    def dumps(self, value: Any) -> bytes:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)

    def _pickled(self, value: Any) -> Encoded:
        return encode(value, pickle.Pickler)


class Functions(Codec):
    """A pair of functions: `dumps` to bytes, `loads` from them."""

    def __init__(
        self, name: str, dumps: Callable[[Any], BytesLike], loads: Callable[[Any], Any], *, stock: bool
    ) -> None:
        self.name = name
        self.stock = stock
        self._dumps = dumps
        self._loads = loads

    def encode(self, value: Any) -> Encoded:
        data = self._dumps(value)
        return (data if type(data) is bytes else [data]), ()

    def decode(self, body: BytesLike, buffers: Sequence[BytesLike]) -> Any:
        return self._loads(body if type(body) is bytes else memoryview(body))

    def encode_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Encoded:
        return self.encode([list(args), kwargs])

    def dumps(self, value: Any) -> bytes:
        return bytes(self._dumps(value))


class Noop(Codec):
    """Bytes as they are. `bytes` arrive as `bytes`, all else as a writable `memoryview` of them.

    The body has one letter for each positional argument, or for the result: what it was.
    """

    name = "noop"
    keywords = False

    BYTES = ord("b")
    VIEW = ord("v")

    def encode(self, value: Any) -> Encoded:
        return self._encoded((value,))

    def decode(self, body: BytesLike, buffers: Sequence[BytesLike]) -> Any:
        return self._decoded(body, buffers)[0]

    def encode_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Encoded:
        if kwargs:
            raise TypeError(
                f"keyword arguments ({', '.join(kwargs)}) have no place among raw bytes; pass them by position"
            )
        return self._encoded(args)

    def decode_call(self, body: BytesLike, buffers: Sequence[BytesLike]) -> tuple[Sequence[Any], dict[str, Any]]:
        return self._decoded(body, buffers), {}

    def dumps(self, value: Any) -> bytes:
        if not isinstance(value, bytes):
            raise TypeError(f"Ray's own noop takes bytes only, not {type(value).__name__}")
        return value

    def loads(self, data: BytesLike) -> Any:
        return data if type(data) is bytes else bytes(data)

    def _encoded(self, values: Sequence[Any]) -> Encoded:
        letters = bytes(self.BYTES if isinstance(value, bytes) else self.VIEW for value in values)
        return letters, [value if isinstance(value, bytes) else flat(value) for value in values]

    def _decoded(self, letters: BytesLike, buffers: Sequence[BytesLike]) -> list[Any]:
        return [
            to_bytes(buffer) if letter == self.BYTES else memoryview(buffer)
            for letter, buffer in zip(bytes(letters), buffers, strict=True)
        ]


def flat(value: Any) -> memoryview:
    """The bytes of anything that exports a contiguous buffer, not copied."""
    try:
        return pickle.PickleBuffer(value).raw()
    except (TypeError, BufferError) as error:
        raise TypeError(f"bytes-like values only, not {type(value).__name__}: {error}") from None


def register(name: str, dumps: Callable[[Any], BytesLike], loads: Callable[[Any], Any]) -> None:
    """Makes `handle.options(request_serialization=name, response_serialization=name)` work.

    Register in every process that calls or is called with it. A replica does not import the module
    that defines its deployment (Serve sends the class by value), so register in a module of its own
    and import that in the deployment's `__init__`. It serves calls between processes that have the
    plugin; others do not know the name.

    Args:
        name: any letter case; the names that come with the plugin are taken.
        dumps: value -> anything bytes-like. A request is the list `[args, kwargs]`.
        loads: bytes or a writable memoryview -> value; a request in the same form.

    Raises:
        ValueError: the name is empty or taken.
    """
    name = name.lower()
    if not name or name in _BUILT_IN:
        raise ValueError(f"{name!r} cannot be registered: choose another name than {', '.join(sorted(_BUILT_IN))}")
    _codecs[name] = Functions(name, dumps, loads, stock=False)
    _serializers.clear()


class RPCSerializer:
    """How one call's request and response are serialized. Shared by all calls that name the same two."""

    __slots__ = ("request", "response")

    def __init__(self, request: str = "cloudpickle", response: str = "cloudpickle") -> None:
        """Raises:
        UnknownSerialization: nobody knows the name.
        MissingLibrary: the name needs a library that is not installed.
        """
        self.request = _codec(request, "request_serialization")
        self.response = _codec(response, "response_serialization")

    @staticmethod
    def named(request: str, response: str) -> RPCSerializer:
        """The shared instance."""
        found = _serializers.get((request, response))
        if found is None:
            found = _serializers.setdefault((request, response), RPCSerializer(request, response))
        return found

    def encode_request(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Encoded:
        """Raises:
        NotSerializable: names the argument.
        """
        try:
            if timing.left > 0:
                return timing.timed("serialise", self.request.encode_call, args, kwargs)
            return self.request.encode_call(args, kwargs)
        except Exception as error:
            raise _unserializable_argument(self.request, args, kwargs, error) from error

    def decode_request(self, body: BytesLike, buffers: Sequence[BytesLike]) -> tuple[Sequence[Any], dict[str, Any]]:
        if timing.left > 0:
            return timing.timed("deserialise", self.request.decode_call, body, buffers)
        return self.request.decode_call(body, buffers)

    def encode_response(self, value: Any) -> Encoded:
        """Raises:
        NotSerializable: names the type of the result.
        """
        try:
            if timing.left > 0:
                return timing.timed("serialise", self.response.encode, value)
            return self.response.encode(value)
        except Exception as error:
            raise _unserializable_result(self.response, value, error) from error

    def decode_response(self, body: BytesLike, buffers: Sequence[BytesLike]) -> Any:
        if timing.left > 0:
            return timing.timed("deserialise", self.response.decode, body, buffers)
        return self.response.decode(body, buffers)

    def stock_request(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[bytes, bytes]:
        """The two fields of a request to a process without the plugin.

        Raises:
            NotSerializable: names the argument.
            UnknownSerialization: the other process does not know it.
        """
        for codec, setting in ((self.request, "request_serialization"), (self.response, "response_serialization")):
            if not codec.stock:
                raise UnknownSerialization(
                    f"{setting}={codec.name!r} was registered with the plugin, but the replica runs without it."
                )
        try:
            return self.request.dumps(args), self.request.dumps(kwargs)
        except Exception as error:
            raise _unserializable_argument(self.request, args, kwargs, error) from error

    def stock_response(self, value: Any) -> bytes:
        try:
            return self.response.dumps(value)
        except Exception as error:
            raise _unserializable_result(self.response, value, error) from error

    def __repr__(self) -> str:
        return f"RPCSerializer(request={self.request.name!r}, response={self.response.name!r})"


def _codec(name: str, setting: str) -> Codec:
    name = name.lower()
    codec = _codecs.get(name)
    if codec is None:
        codec = _loaded(name, setting)
        _codecs[name] = codec
    return codec


def _loaded(name: str, setting: str) -> Codec:
    """A codec whose library is imported when it is first named."""
    known = sorted(_BUILT_IN | _codecs.keys())
    try:
        if name == "msgpack":
            import ormsgpack

            return Functions(name, ormsgpack.packb, ormsgpack.unpackb, stock=True)
        if name == "orjson":
            import orjson

            return Functions(name, orjson.dumps, orjson.loads, stock=True)
    except ImportError as error:
        library = "ormsgpack" if name == "msgpack" else name
        raise MissingLibrary(
            f"{setting}={name!r} needs the library {library} in this process ({sys.executable}): {error}. "
            f"Install it at the caller and in the replicas with `pip install {library}`."
        ) from None
    raise UnknownSerialization(
        f"{setting}={name!r} is not known in this process. Choose one of {', '.join(known)}, or register it "
        "with `ray_serve_grpc.serializers.register`, in the caller's process and in the replicas'."
    )


def _unserializable_argument(
    codec: Codec, args: Sequence[Any], kwargs: dict[str, Any], error: Exception
) -> NotSerializable:
    return NotSerializable(
        f"{_culprit(codec, args, kwargs)} cannot be sent with request_serialization={codec.name!r}: "
        f"{_text(error)}. Nothing was sent. {_advice(codec)}"
    )


def _unserializable_result(codec: Codec, value: Any, error: Exception) -> NotSerializable:
    return NotSerializable(
        f"A result of type {_type_name(value)} cannot be returned with response_serialization={codec.name!r}: "
        f"{_text(error)}. {_advice(codec)}"
    )


def _culprit(codec: Codec, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """The first argument that cannot be serialized alone."""
    for label, value in _labelled(args, kwargs):
        try:
            codec.encode(value)
        except Exception:
            return f"{label} (type {_type_name(value)})"
    return "A request with these arguments"


def _labelled(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for index, value in enumerate(args):
        yield f"Positional argument {index}", value
    for name, value in kwargs.items():
        yield f"Keyword argument {name!r}", value


def _advice(codec: Codec) -> str:
    if isinstance(codec, CloudPickle):
        return "Leave out what cannot be pickled (locks, open files, connections), or define `__reduce__` for it."
    if isinstance(codec, Noop):
        return "Pass bytes-like values by position only, or choose another serialization."
    return "Choose 'cloudpickle', which takes almost any Python object, or convert the value first."


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _text(error: Exception) -> str:
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be made)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_codecs: dict[str, Codec] = {codec.name: codec for codec in (CloudPickle(), Pickle(), Noop())}
_BUILT_IN = frozenset((*_codecs, "msgpack", "orjson"))
_serializers: dict[tuple[str, str], RPCSerializer] = {}
