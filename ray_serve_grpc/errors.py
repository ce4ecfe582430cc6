"""What a call can raise, and how an error of user code travels.

    ray.serve.exceptions.RayServeException
    └── RayServeGrpcError
        ├── UnknownSerialization    (ValueError)   nobody knows the serialization's name
        ├── MissingLibrary          (ImportError)  its library is not installed
        ├── NotSerializable         (TypeError)    it cannot take this argument or result
        ├── MessageTooLarge         (ValueError)   a message is over RAY_SERVE_GRPC_MAX_MESSAGE_SIZE
        └── CallFailed              the replica's transport answered with another failure

    ray.exceptions.ActorUnavailableError           the connection to the replica failed or was lost
    ray.exceptions.RaySystemError                  an answer came that cannot be read here
    ray.exceptions.RayTaskError                    user code failed: see below
    ray.serve.exceptions.RequestCancelledError, asyncio.CancelledError, TimeoutError: as with actor calls

An error of user code arrives as an actor call brings it: a `RayTaskError` that is an instance
of the error's own class too, with the remote traceback as its text and the error itself as
`cause`. Where the class cannot be sent or cannot be made again, the text still arrives.
"""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ray import cloudpickle
from ray.exceptions import ActorUnavailableError, RayError, RaySystemError, RayTaskError, UnserializableException
from ray.serve.exceptions import RayServeException

from ray_serve_grpc import _native

if TYPE_CHECKING:
    from ray_serve_grpc.serializers import BytesLike

SIZE_SETTING = "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"

#: Raised at the caller, an exception of these classes would act on the caller itself: end its
#: iteration, cancel its task or stop its process. They arrive as a plain `RayTaskError`.
CONTROL_FLOW = (
    asyncio.CancelledError,
    GeneratorExit,
    KeyboardInterrupt,
    StopAsyncIteration,
    StopIteration,
    SystemExit,
)

_PACKAGE = os.path.dirname(__file__) + os.sep


class RayServeGrpcError(RayServeException):
    """Anything that the plugin itself raises at a caller."""


class UnknownSerialization(RayServeGrpcError, ValueError):
    """A handle names a serialization that this process, or the replica, does not know."""


class MissingLibrary(RayServeGrpcError, ImportError):
    """A handle names a serialization whose library is not installed."""


class NotSerializable(RayServeGrpcError, TypeError):
    """An argument or a result that the chosen serialization does not take."""


class MessageTooLarge(RayServeGrpcError, ValueError):
    """A request, a response or an item of a stream is over the size limit of one of the two sides."""


class CallFailed(RayServeGrpcError):
    """The transport failed in a way that another try would not mend. `code` is a gRPC status code."""

    def __init__(self, message: str, code: int = _native.STATUS_UNKNOWN) -> None:
        super().__init__(message, code)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


def encode(error: BaseException, *, method: str, actor_id: str, limit: int) -> tuple[int, bytes]:
    """(kind, body) of a message that carries an error of user code, at most `limit` bytes."""
    try:
        body = pickle.dumps(_fields(error, method, actor_id), protocol=5)
        if len(body) <= limit:
            return _native.KIND_ERROR, body
    except Exception:
        # User classes take part above (`__reduce__`, `__getstate__`, …) and may do anything.
        pass
    text = remote_traceback(error).encode(errors="backslashreplace")
    if len(text) > limit:
        cut = f"\n… {len(text)} bytes of text, cut at the limit {SIZE_SETTING}={limit} of the replica".encode()
        text = text[: max(limit - len(cut), 0)] + cut
    return _native.KIND_ERROR_TEXT, text


def decode(kind: int, body: BytesLike) -> RayTaskError:
    """The error that `encode` packed. `raisable` makes of it what is raised."""
    if kind == _native.KIND_ERROR:
        try:
            return _task_error(*pickle.loads(body))
        except Exception as error:
            text = f"An error of the replica came in a form that cannot be read here: {error!r}"
    else:
        text = str(memoryview(body), "utf-8", "replace")
    return RayTaskError("", text, UnserializableException(text), "replica", 0, "unknown")


def encode_stock(error: BaseException, *, method: str, actor_id: str) -> bytes:
    """For a caller without the plugin, which raises what it unpickles, as a class made from its cause."""
    packed, cause = _packed(error, method, actor_id)
    try:
        harmless = not isinstance(pickle.loads(cause), CONTROL_FLOW)
    except Exception:
        harmless = False
    if not harmless:
        packed.cause = UnserializableException(packed.traceback_str)
        packed.args = (*packed.args[:2], packed.cause, *packed.args[3:])
    data: bytes = cloudpickle.dumps(packed)
    return data


def raisable(error: RayTaskError) -> BaseException:
    """A fresh exception for each raise, so that one raise does not extend the traceback of another."""
    raised: BaseException = error if isinstance(error.cause, CONTROL_FLOW) else error.as_instanceof_cause()
    return fresh(error) if raised is error else raised


def fresh(error: BaseException) -> BaseException:
    """Another one like it. An exception that cannot be copied is used again."""
    try:
        return copy.copy(error)
    except Exception:
        return error.with_traceback(None)


def remote_traceback(error: BaseException) -> str:
    """As Python prints it, without the frames of this package that only pass the call on.

    Ray's replica raises what user code raised once more, `from None`, and so hides its cause:
    here it is seen again, as the context that Python keeps beside it.
    """
    suppressed = error.__suppress_context__
    try:
        error.__suppress_context__ = suppressed and error.__cause__ is not None
        return "".join(traceback.format_exception(type(error), error, _outside(error.__traceback__)))
    except Exception as broken:
        return f"{type(error).__name__} (its traceback cannot be made: {type(broken).__name__})\n"
    finally:
        error.__suppress_context__ = suppressed


def unavailable(actor_id: bytes, where: str, happened: str, advice: str) -> ActorUnavailableError:
    """The router takes it as a sign to choose another replica, if the call was not admitted yet."""
    return ActorUnavailableError(f"{where}: {happened}. {advice}", actor_id)


def request_too_large(size: int, limit: int, where: str) -> MessageTooLarge:
    return MessageTooLarge(
        f"A request of {size} bytes to {where} is over the limit {SIZE_SETTING}={limit} of this process. Nothing was "
        "sent. Raise the setting for the caller and the replicas, or pass the value by reference (`ray.put`)."
    )


def response_too_large(size: int, limit: int) -> MessageTooLarge:
    return MessageTooLarge(
        f"A result of {size} bytes is over the limit {SIZE_SETTING}={limit} of the replica. Raise the setting for the "
        "replicas and their callers, or return the value by reference (`ray.put`) or in parts (a stream)."
    )


def message_refused(where: str, detail: str) -> MessageTooLarge:
    return MessageTooLarge(
        f"A message of a call to {where} is over the size limit of one side: {detail}. "
        f"Set {SIZE_SETTING} to the same, larger value for the caller and the replicas."
    )


def unauthenticated(where: str, detail: str) -> CallFailed:
    return CallFailed(
        f"{where} does not let this process in: {detail}. Both need the same token of Ray's token authentication, or "
        "certificates of the same authority. Nothing ran.",
        _native.STATUS_UNAUTHENTICATED,
    )


def unreadable(error: BaseException) -> RaySystemError:
    """An answer whose deserialization failed at the caller, as an actor call reports it."""
    return RaySystemError(error.with_traceback(None), remote_traceback(error))


def _fields(error: BaseException, method: str, actor_id: str) -> tuple[Any, ...]:
    """What `_task_error` takes: builtins only, with the user's exception as a pickle within the pickle."""
    packed, cause = _packed(error, method, actor_id)
    return (
        packed.function_name,
        packed.traceback_str,
        cause,
        packed.proctitle,
        packed.pid,
        packed.ip,
        packed.actor_repr,
        actor_id,
    )


def _packed(error: BaseException, method: str, actor_id: str) -> tuple[RayTaskError, bytes]:
    # An error that came from a further replica is not wrapped again; its text has the whole way.
    cause = getattr(error, "cause", error) if isinstance(error, RayTaskError) else error
    text = remote_traceback(error)
    try:
        packed = RayTaskError(method, text, cause, actor_id=actor_id)
        pickled = cloudpickle.dumps(packed.cause)
    except Exception as unpicklable:
        name = f"{type(cause).__module__}.{type(cause).__qualname__}"
        replacement = RayError(f"{name} cannot be pickled ({type(unpicklable).__name__}). It was:\n{text}")
        packed = RayTaskError(method, text, replacement, actor_id=actor_id)
        pickled = cloudpickle.dumps(replacement)
    packed.actor_repr = packed.proctitle.removeprefix("ray::")
    packed.proctitle = f"{packed.proctitle}.{method}"
    return packed, pickled


def _task_error(
    method: str, text: str, cause: bytes, title: str, pid: int, ip: str, actor_repr: str, actor_id: str
) -> RayTaskError:
    exception: Any
    try:
        exception = pickle.loads(cause)
        if not isinstance(exception, BaseException):
            exception = UnserializableException(text)
    except Exception:
        exception = UnserializableException(text)
    return RayTaskError(method, text, exception, title, pid, ip, actor_repr, actor_id)


def _outside(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        frames = frames.tb_next
    return frames
