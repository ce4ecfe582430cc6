"""Settings: parsed once, at the edge, or refused with the name, the value and what is allowed."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from ray_serve_grpc import config
from ray_serve_grpc.config import InvalidSetting, Settings

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_an_empty_environment_gives_the_defaults():
    settings = Settings.from_environment({})
    assert settings == Settings()
    assert settings.native
    assert settings.max_message_size == 2**31 - 1
    assert settings.lanes == ("tcp", "unix", "shm")
    assert (settings.connect_timeout, settings.keepalive_interval, settings.keepalive_timeout) == (5, 5, 10)


def test_a_dead_peer_is_noticed_within_20_seconds_by_default():
    assert Settings().keepalive_interval + Settings().keepalive_timeout < 20


def test_an_empty_variable_counts_as_unset():
    assert Settings.from_environment({"RAY_SERVE_GRPC_LANES": " "}) == Settings()


@pytest.mark.parametrize(
    ("variable", "text", "attribute", "value"),
    [
        ("RAY_SERVE_GRPC_NATIVE", "0", "native", False),
        ("RAY_SERVE_GRPC_NATIVE", "1", "native", True),
        ("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE", str(3 << 30), "max_message_size", 3 << 30),
        ("RAY_SERVE_GRPC_LANES", "unix, TCP", "lanes", ("tcp", "unix")),
        ("RAY_SERVE_GRPC_LANES", "unix", "lanes", ("unix",)),
        ("RAY_SERVE_GRPC_SHM_LIMIT", "0", "shm_limit", 0),
        ("RAY_SERVE_GRPC_CONNECT_TIMEOUT_S", "0.25", "connect_timeout", 0.25),
        ("RAY_SERVE_GRPC_KEEPALIVE_INTERVAL_S", "30", "keepalive_interval", 30.0),
        ("RAY_SERVE_GRPC_KEEPALIVE_TIMEOUT_S", "1e1", "keepalive_timeout", 10.0),
        ("RAY_SERVE_GRPC_LOG_LEVEL", "debug", "log_level", "DEBUG"),
    ],
)
def test_a_value_is_parsed(variable, text, attribute, value):
    assert getattr(Settings.from_environment({variable: text}), attribute) == value


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("RAY_SERVE_GRPC_NATIVE", "yes"),
        ("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE", "4GiB"),
        ("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE", "0"),
        ("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE", str(1 << 32)),
        ("RAY_SERVE_GRPC_LANES", "carrier pigeon,tcp"),
        ("RAY_SERVE_GRPC_LANES", "shm"),
        ("RAY_SERVE_GRPC_LANES", ","),
        ("RAY_SERVE_GRPC_SHM_LIMIT", "-2"),
        ("RAY_SERVE_GRPC_CONNECT_TIMEOUT_S", "0"),
        ("RAY_SERVE_GRPC_CONNECT_TIMEOUT_S", "nan"),
        ("RAY_SERVE_GRPC_KEEPALIVE_INTERVAL_S", "inf"),
        ("RAY_SERVE_GRPC_KEEPALIVE_TIMEOUT_S", "soon"),
        ("RAY_SERVE_GRPC_LOG_LEVEL", "LOUD"),
        ("RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH", "0"),
    ],
)
def test_a_bad_value_is_refused_with_the_name_the_value_and_what_is_allowed(variable, text):
    with pytest.raises(InvalidSetting) as caught:
        Settings.from_environment({variable: text})
    error = caught.value
    assert (error.variable, error.value) == (variable, text)
    for part in (variable, repr(text), error.allowed):
        assert part in str(error)


def test_the_error_survives_a_pickle():
    error = InvalidSetting("A", "b", "c")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_rays_own_limit_binds_only_where_it_is_set_and_ours_is_not():
    limit = {"RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": "5000000"}
    assert Settings.from_environment(limit).max_message_size == 5_000_000
    ours = {"RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": "2000"}
    assert Settings.from_environment(limit | ours).max_message_size == 2000


def test_rays_unlimited_means_the_most_that_a_message_can_be():
    settings = Settings.from_environment({"RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": "-1"})
    assert settings.max_message_size == config.LARGEST_MESSAGE


def test_every_default_is_within_what_is_allowed():
    for _name, variable, kind, default, _meaning in config.table():
        text = str(int(default)) if isinstance(default, bool) else kind.show(default).split()[0]
        assert kind.parse(text) == default, variable


def test_the_page_of_the_docs_is_current():
    assert PAGE.read_text() == config.markdown(), "run: python -m ray_serve_grpc.config > docs/configuration.md"
