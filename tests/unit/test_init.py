"""The public names of the package."""

from __future__ import annotations

import ray_serve_grpc


def test_only_three_names_are_public():
    assert sorted(ray_serve_grpc.__all__) == ["__version__", "install", "status"]
    for name in ray_serve_grpc.__all__:
        assert hasattr(ray_serve_grpc, name)


def test_the_version_is_the_distributions():
    assert isinstance(ray_serve_grpc.__version__, str)
    assert ray_serve_grpc.__version__ == ray_serve_grpc.status()["version"]


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(ray_serve_grpc, "uninstall")
