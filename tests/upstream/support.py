"""A pytest plugin with the fixtures that Ray's Serve tests ask for, and their package where they import it.

Ray's own conftest.py imports `ray.tests`, which its wheel leaves out.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import types
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
import ray
import ray.serve
from ray import serve

#: Exit status of a run that was not one of our transport.
FELL_BACK = 90

GRPC_SERVICERS = [
    f"ray.serve.generated.serve_pb2_grpc.add_{service}Servicer_to_server"
    for service in ("UserDefinedService", "FruitService")
]


def _make_importable(folder: str) -> None:
    """`ray.serve.tests` becomes the folder, and its `conftest` this module."""
    package = types.ModuleType("ray.serve.tests")
    package.__path__ = [folder]
    sys.modules["ray.serve.tests"] = package
    sys.modules["ray.serve.tests.conftest"] = sys.modules[__name__]


_make_importable(os.environ["RAY_SERVE_UPSTREAM_TESTS"])
# Replicas import what a test module's deployments refer to.
os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["RAY_SERVE_UPSTREAM_TESTS"], os.environ.get("PYTHONPATH", "")])


def _start_ray(**options: Any) -> Any:
    directory = tempfile.mkdtemp(prefix="rsu")
    return ray.init(
        address="local",
        num_cpus=36,
        include_dashboard=False,
        object_store_memory=300 * 2**20,
        namespace="default_test_namespace",
        _temp_dir=directory,
        _system_config={"metrics_report_interval_ms": 1000, "task_retry_delay_ms": 50},
        **options,
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run in which our transport gave way to Ray's own, which would pass the tests just as well."""
    if os.environ.get("RAY_SERVE_GRPC_NATIVE") != "1":
        return
    import ray_serve_grpc

    status = ray_serve_grpc.status()
    if not status["active"]:
        print(f"the plugin fell back: {status['reason']}", file=sys.stderr)
        session.exitstatus = FELL_BACK


@pytest.fixture(scope="session")
def _shared_serve_instance() -> Iterator[Any]:
    from ray.serve.context import _get_global_client

    _start_ray()
    serve.start(
        http_options={"host": "0.0.0.0"},
        grpc_options={"port": 9000, "grpc_servicer_functions": GRPC_SERVICERS},
    )
    yield _get_global_client()
    serve.shutdown()
    ray.shutdown()


@pytest.fixture
def serve_instance(_shared_serve_instance: Any) -> Iterator[Any]:
    yield _shared_serve_instance
    _shared_serve_instance.delete_all_apps()
    _shared_serve_instance.shutdown_cached_handles()


@pytest_asyncio.fixture
async def serve_instance_async(_shared_serve_instance: Any) -> AsyncIterator[Any]:
    """As `serve_instance`, for tests whose routers are on the test's own loop."""
    yield _shared_serve_instance
    _shared_serve_instance.delete_all_apps()
    for handle in list(_shared_serve_instance.handle_cache.values()):
        await asyncio.wait_for(handle.shutdown_async(), 10)
    _shared_serve_instance.handle_cache.clear()


@pytest.fixture
def ray_instance(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A Ray of the test's own, started with the environment variables that its parameter asks for."""
    before = dict(os.environ)
    os.environ.update(getattr(request, "param", {}))
    yield _start_ray()
    serve.shutdown()
    ray.shutdown()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def ray_shutdown() -> Iterator[None]:
    serve.shutdown()
    ray.shutdown()
    yield
    serve.shutdown()
    ray.shutdown()


shutdown_ray = ray_shutdown


@pytest.fixture
def tmp_dir() -> Iterator[str]:
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        yield directory
        os.chdir(before)
