"""Probes name what is missing."""

from __future__ import annotations

import functools

import pytest

from ray_serve_grpc.seam import probe
from ray_serve_grpc.seam.probe import Mismatch


class Sample:
    def __init__(self):
        self._server = None

    async def start(self, grace=None):
        def inner():
            return self._port

        return inner

    def wrapped(self, port): ...


def test_what_is_there_is_returned():
    assert probe.member(Sample, "start") is Sample.start
    assert probe.function(Sample, "start", "grace", asynchronous=True) is Sample.start
    probe.uses([Sample.__init__, Sample.start], "_server", "_port")


def test_decorated_functions_are_probed_as_they_are_called():
    @functools.wraps(Sample.wrapped)
    def around(*args, **kwargs): ...

    probe.function(type("Other", (), {"wrapped": around}), "wrapped", "port")


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (lambda: probe.member(Sample, "stop"), "Sample has no stop"),
        (lambda: probe.function(Sample, "start", "seconds"), "Sample.start does not take seconds"),
        (lambda: probe.function(Sample, "wrapped", asynchronous=True), "not a coroutine function"),
        (lambda: probe.function(Sample, "__doc__"), "not a function"),
        (lambda: probe.uses([Sample.__init__], "_server", "_socket"), "no use of _socket"),
    ],
)
def test_what_is_missing_is_named(check, text):
    with pytest.raises(Mismatch, match=text):
        check()
