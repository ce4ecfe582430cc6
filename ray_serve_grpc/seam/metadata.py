"""Ray's request metadata to and from the wire, in the way that costs the least.

A pickle of the whole object takes 20 µs both ways; almost every request differs from the
defaults in the same few strings, so these travel as they are and only the rest is pickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import fields
from enum import Enum
from operator import itemgetter
from typing import Any

from ray_serve_grpc.seam.probe import Mismatch

#: the strings of the wire's RequestMetadata, fields 1 to 9
STRINGS = (
    "request_id",
    "internal_request_id",
    "call_method",
    "route",
    "app_name",
    "multiplexed_model_id",
    "session_id",
    "request_serialization",
    "response_serialization",
)
REQUIRED = {"request_id", "internal_request_id", "call_method", "_by_reference", "is_streaming"}

#: Not sent: what the method and the transport imply, and how the caller's router runs.
IMPLIED = {"is_streaming", "_by_reference", "_on_separate_loop"}


class MetadataCodec:
    """Knows one Ray's `RequestMetadata` class.

    Raises:
        Mismatch: the class is not one that can be taken apart and built again.
    """

    def __init__(self, metadata_class: type) -> None:
        try:
            blank = metadata_class(**dict.fromkeys(("request_id", "internal_request_id"), ""))
            defaults: dict[str, Any] = dict(blank.__dict__)
            known = {entry.name for entry in fields(metadata_class)}
        except (TypeError, AttributeError) as error:
            raise Mismatch(f"{metadata_class.__qualname__} cannot be built field by field: {error}") from None
        if missing := REQUIRED - known:
            raise Mismatch(f"{metadata_class.__qualname__} has no {', '.join(sorted(missing))}")
        self._class = metadata_class
        self._defaults = defaults | {"_by_reference": False}
        self._known = known
        self._lacking = [name for name in STRINGS if name not in known]
        # `_by_reference` is along so that there are never fewer than two names, and itemgetter gives a tuple.
        self._rest = sorted(known - set(STRINGS) - IMPLIED)
        self._rest_values = itemgetter(*self._rest, "_by_reference", "_by_reference")
        self._rest_defaults = (*(defaults[name] for name in self._rest), False, False)
        # These three have a default that is not empty; the wire says "" for it.
        self._call_method = defaults["call_method"]
        self._serialization = defaults.get("request_serialization", "cloudpickle")
        # Enums are sent by value: a pickled one costs as much as everything else together.
        self._enums = {name: type(value) for name, value in defaults.items() if isinstance(value, Enum)}

    def to_wire(self, metadata: Any) -> tuple[tuple[str, ...], bytes]:
        """(strings, extra): the fields `STRINGS`, "" for a default; b"" or a pickle of what else is not default."""
        values = metadata.__dict__
        extra = b"" if self._rest_values(values) == self._rest_defaults else self._pickled_rest(values)
        if self._lacking:
            values = dict.fromkeys(self._lacking, "") | values
        request_id, internal_id, method, route, app, model, session, request_form, response_form = _STRINGS(values)
        return (
            request_id,
            internal_id,
            "" if method == self._call_method else method,
            route,
            app,
            model,
            session,
            "" if request_form == self._serialization else request_form,
            "" if response_form == self._serialization else response_form,
        ), extra

    def from_wire(self, strings: Sequence[str], extra: bytes | memoryview, *, is_streaming: bool) -> Any:
        """The metadata as the replica's methods take it. Fields that this Ray does not know are dropped."""
        metadata: Any = object.__new__(self._class)
        values = metadata.__dict__
        values.update(self._defaults)
        (
            values["request_id"],
            values["internal_request_id"],
            method,
            values["route"],
            values["app_name"],
            values["multiplexed_model_id"],
            values["session_id"],
            request_form,
            response_form,
        ) = strings
        if method:
            values["call_method"] = method
        if request_form:
            values["request_serialization"] = request_form
        if response_form:
            values["response_serialization"] = response_form
        if is_streaming:
            values["is_streaming"] = True
        if extra:
            self._add_rest(values, pickle.loads(extra))
        for name in self._lacking:
            values.pop(name, None)
        return metadata

    def _pickled_rest(self, values: dict[str, Any]) -> bytes:
        rest = {}
        for name in self._rest:
            value = values[name]
            if value != self._defaults[name]:
                rest[name] = value.value if name in self._enums else value
        return pickle.dumps(rest, protocol=pickle.HIGHEST_PROTOCOL) if rest else b""

    def _add_rest(self, values: dict[str, Any], rest: dict[str, Any]) -> None:
        for name, value in rest.items():
            if name in self._known:
                values[name] = self._enums[name](value) if name in self._enums else value


_STRINGS = itemgetter(*STRINGS)
