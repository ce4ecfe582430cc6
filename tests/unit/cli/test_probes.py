"""Each probe passes on a sound machine, and tells what is wrong with one that is not."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_serve_grpc.cli import probes
from ray_serve_grpc.cli.probes import FAILED, OK, SKIPPED


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for sockets, and private."""
    with tempfile.TemporaryDirectory(prefix="rsg") as path:
        yield Path(path)


def refusing(number: int):
    def refuse(*arguments, **named):
        raise OSError(number, os.strerror(number))

    return refuse


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_memory_is_made_and_sealed():
    before = open_files()
    assert probes.memfd() == probes.Probe("memfd", OK, "made, sealed and written")
    assert open_files() == before


def test_a_refused_memfd_is_told_with_its_errno_and_a_remedy(monkeypatch):
    monkeypatch.setattr(os, "memfd_create", refusing(errno.EPERM))
    found = probes.memfd()
    assert (found.outcome, found.detail) == (FAILED, "Operation not permitted")
    assert "seccomp" in found.hint
    assert "RAY_SERVE_GRPC_LANES=unix,tcp" in found.hint


def test_seals_that_are_refused_fail_the_probe_and_leave_nothing_open(monkeypatch):
    monkeypatch.setattr(fcntl, "fcntl", refusing(errno.EINVAL))
    before = open_files()
    assert probes.memfd().outcome == FAILED
    assert open_files() == before


def test_seals_that_do_not_hold_fail_the_probe(monkeypatch):
    monkeypatch.setattr(fcntl, "fcntl", lambda *arguments: 0)
    assert probes.memfd().detail == "the seals do not hold"


def test_a_descriptor_is_passed():
    before = open_files()
    assert probes.descriptor_passing().outcome == OK
    assert open_files() == before


def test_a_sandbox_that_forbids_passing_is_told(monkeypatch):
    monkeypatch.setattr(socket, "send_fds", refusing(errno.EPERM))
    found = probes.descriptor_passing()
    assert (found.outcome, found.detail) == (FAILED, "Operation not permitted")
    assert "SCM_RIGHTS" in found.hint


def test_a_descriptor_that_is_dropped_on_the_way_is_told(monkeypatch):
    monkeypatch.setattr(socket, "send_fds", lambda sock, data, files: sock.send(data[0]))
    assert probes.descriptor_passing().detail == "the message came without its descriptor"


def test_a_private_folder_takes_sockets_and_keeps_none(folder):
    found = probes.socket_folder(str(folder))
    assert found.outcome == OK, found
    assert not list(folder.iterdir())


def test_outside_of_a_session_there_is_nothing_to_try():
    assert probes.socket_folder(None).outcome == SKIPPED


def test_a_folder_that_no_replica_has_made_yet_is_not_made_here(folder):
    assert probes.socket_folder(str(folder / "rsg")).outcome == SKIPPED
    assert not (folder / "rsg").exists()


def test_a_folder_that_others_may_enter_is_wrong(folder):
    folder.chmod(0o755)
    found = probes.socket_folder(str(folder))
    assert found.outcome == FAILED
    assert "drwxr-xr-x" in found.detail
    assert f"chmod 700 {folder}" in found.hint


def test_a_link_to_a_private_folder_is_wrong(folder):
    link = folder / "link"
    link.symlink_to(folder)
    assert probes.socket_folder(str(link)).outcome == FAILED


def test_a_folder_of_another_user_is_wrong(folder, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(folder).st_uid + 1)
    found = probes.socket_folder(str(folder))
    assert found.outcome == FAILED
    assert "belongs to user" in found.detail


def test_a_path_that_is_too_long_for_a_socket_is_wrong(folder):
    deep = folder / ("x" * probes.LONGEST_SOCKET_PATH)
    found = probes.socket_folder(str(deep))
    assert found.outcome == FAILED
    assert str(probes.LONGEST_SOCKET_PATH) in found.detail
    assert "--temp-dir" in found.hint


def test_the_longest_path_that_fits_is_right(folder):
    room = probes.LONGEST_SOCKET_PATH - len(str(folder)) - len(probes.A_SOCKET_NAME) - 2
    fits, not_quite = folder / ("x" * room), folder / ("x" * (room + 1))
    for path in (fits, not_quite):
        path.mkdir(mode=0o700)
    assert probes.socket_folder(str(fits)).outcome == OK
    assert probes.socket_folder(str(not_quite)).outcome == FAILED


def test_a_full_file_system_is_wrong(folder, monkeypatch):
    space = os.statvfs(folder)
    full = os.statvfs_result([*space[:4], 1, *space[5:]])
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    assert "left" in probes.socket_folder(str(folder)).detail


def test_a_file_system_that_takes_no_sockets_is_wrong(folder, monkeypatch):
    class Refused(socket.socket):
        bind = refusing(errno.EPERM)

    monkeypatch.setattr(socket, "socket", Refused)
    found = probes.socket_folder(str(folder))
    assert (found.outcome, found.detail) == (FAILED, "Operation not permitted")


def test_few_open_files_left_are_wrong():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(open_files()) + probes.SPARE_DESCRIPTORS // 2, before[1]))
    try:
        found = probes.descriptors()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found.outcome == FAILED
    assert "ulimit -n" in found.hint
    assert f"hard limit is {before[1]}" in found.hint or before[1] == resource.RLIM_INFINITY


@pytest.mark.parametrize("limit", [65536, resource.RLIM_INFINITY])
def test_many_open_files_are_right(monkeypatch, limit):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit, limit))
    assert probes.descriptors().outcome == OK


@pytest.mark.parametrize(("limit", "outcome"), [(100, OK), (500, OK), (501, FAILED), (0, SKIPPED)])
def test_shared_memory_may_be_half_of_what_there_is(limit, outcome):
    assert probes.shared_memory(limit, 1000).outcome == outcome
