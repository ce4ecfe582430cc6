"""Options and marks of the whole test suite."""

from __future__ import annotations

import signal

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption(
        "--transports",
        default="actor,stock,native",
        help="transports of the differential tests in tests/serve (default: %(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell that runs the tests in the background has them, and all that they start, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "slow: minutes or gigabytes; run with --slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow: run with --slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)
