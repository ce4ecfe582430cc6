"""A folder that has no room for a replica's socket costs the Unix lane and one warning, nothing else."""

from __future__ import annotations

import subprocess

import pytest
from fakes import metadata, pending, replica_server

from ray_serve_grpc.client import gRPCReplicaWrapper


async def user_code(value: str) -> str:
    return value


@pytest.fixture
def full(tmp_path):
    """A file system without an inode to spare."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4k,nr_inodes=1", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small file system needs root and mount: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("folder", ["full", "missing"])
async def test_a_replica_whose_socket_finds_no_room_is_reached_by_tcp(folder, request, tmp_path, caplog):
    path = request.getfixturevalue("full") if folder == "full" else tmp_path / "missing"
    actor_id, server = replica_server(user_code, path / "r.sock")
    port = await server.start()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert str(path / "r.sock") in warning
    assert actor_id.hex() in warning
    wrapper = gRPCReplicaWrapper(actor_id, [f"tcp:127.0.0.1:{port}"], deployment="Model")
    try:
        request_ = pending("there", about=metadata())
        result = wrapper.send_request_python(request_, with_rejection=True)
        assert (await result.get_rejection_response()).accepted
        assert await result.get_async() == "there"
    finally:
        wrapper.close()
        await server.stop(0)
