"""What this process's lanes are made of, tried out for real."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import socket
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from ray_serve_grpc.seam.adapter import LONGEST_SOCKET_PATH

OK = "ok"
FAILED = "failed"
#: There was nothing to try it on.
SKIPPED = "skipped"

#: Descriptors that should be left: a connection takes two, a segment of shared memory one.
SPARE_DESCRIPTORS = 256
#: Bytes that should be left where the sockets are. They need none, but the session's other files beside them do.
SPARE_BYTES = 16 * 2**20
#: Part of the memory above which one process's share of it is a danger to the others.
LARGEST_SHARE = 0.5
#: Linux 5.1 and later. Python names it from 3.13 on.
F_SEAL_FUTURE_WRITE = 0x10
#: As long as the names of the sockets.
A_SOCKET_NAME = "0" * 16 + ".sock"


@dataclass(frozen=True)
class Probe:
    """One thing that was tried."""

    name: str
    outcome: str
    #: what was found, or what went wrong
    detail: str
    #: what to do about it; "" where nothing is wrong
    hint: str = ""


def attempted(name: str, attempt: Callable[[], str], hint: str) -> Probe:
    """The outcome of `attempt`, which tells what it found, or raises OSError."""
    try:
        return Probe(name, OK, attempt())
    except OSError as error:
        return Probe(name, FAILED, error.strerror or str(error), hint)


def memfd() -> Probe:
    """Shared memory without a file: made, sealed, written."""
    return attempted(
        "memfd",
        _sealed_memory,
        "shared memory needs memfd_create with F_SEAL_FUTURE_WRITE: Linux 5.1 or later, and a seccomp profile that "
        "lets it through. Without it, set RAY_SERVE_GRPC_LANES=unix,tcp.",
    )


def _sealed_memory() -> str:
    file = os.memfd_create("ray_serve_grpc doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, mmap.PAGESIZE)
        with mmap.mmap(file, mmap.PAGESIZE) as memory:
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
            memory[:4] = b"mine"
            if os.pread(file, 4, 0) != b"mine":
                raise OSError("what was written is not there")
        try:
            os.ftruncate(file, 0)
        except PermissionError:
            return "made, sealed and written"
        raise OSError("the seals do not hold")
    finally:
        os.close(file)


def descriptor_passing() -> Probe:
    """A descriptor goes through a Unix-domain socket, and opens the same file at the other end."""
    return attempted(
        "descriptor passing",
        _pass_descriptor,
        "a sandbox forbids SCM_RIGHTS over Unix-domain sockets: allow it, or set RAY_SERVE_GRPC_LANES=unix,tcp.",
    )


def _pass_descriptor() -> str:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right, tempfile.TemporaryFile() as file:
        file.write(b"passed on")
        file.flush()
        socket.send_fds(left, [b"."], [file.fileno()])
        _, received, _, _ = socket.recv_fds(right, 1, 1)
        if not received:
            raise OSError("the message came without its descriptor")
        try:
            if os.pread(received[0], 9, 0) != b"passed on":
                raise OSError("the descriptor opens something else")
        finally:
            os.close(received[0])
    return "passed over a socket"


def socket_folder(folder: str | None) -> Probe:
    """The folder that the replicas of this node have their sockets in."""
    name = "socket folder"
    if folder is None:
        return Probe(name, SKIPPED, "this process belongs to no Ray session")
    length = len(os.fsencode(os.path.join(folder, A_SOCKET_NAME)))
    if length > LONGEST_SOCKET_PATH:
        return Probe(
            name,
            FAILED,
            f"the path of a socket in {folder} has {length} bytes, and Linux takes {LONGEST_SOCKET_PATH}",
            "start Ray with a shorter --temp-dir (or _temp_dir of ray.init).",
        )
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        return Probe(name, SKIPPED, f"{folder} is made by the first replica of this node")
    except OSError as error:
        return Probe(name, FAILED, f"{folder}: {error.strerror}", "run as the user whom Ray runs as.")
    if not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        return Probe(
            name,
            FAILED,
            f"{folder} has mode {stat.filemode(found.st_mode)}: others could put sockets there",
            f"chmod 700 {folder}, and restart the replicas of this node.",
        )
    if found.st_uid != os.geteuid():
        return Probe(
            name,
            FAILED,
            f"{folder} belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}",
            "run everything of one Ray session as the same user.",
        )
    return _bound_socket(name, folder)


def _bound_socket(name: str, folder: str) -> Probe:
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if free < SPARE_BYTES:
        text = f"{folder} has {free} bytes left"
        return Probe(name, FAILED, text, "make room on that file system: Ray's session is there.")

    def attempt() -> str:
        path = os.path.join(folder, f"doctor-{os.getpid()}.sock")
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
            listener.bind(path)
            try:
                listener.listen(1)
                caller.connect(path)
            finally:
                os.unlink(path)
        return f"{folder} takes sockets; {free // 2**20} MiB free"

    return attempted(name, attempt, f"sockets cannot be bound in {folder}: see its file system and its mount options.")


def descriptors() -> Probe:
    """Open files that this process may still have."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) - 1  # one of them was for the listing
    text = f"{used} of {'any number of' if limit == resource.RLIM_INFINITY else limit} open files"
    if limit == resource.RLIM_INFINITY or limit - used >= SPARE_DESCRIPTORS:
        return Probe("open files", OK, text)
    raised = "" if hard == resource.RLIM_INFINITY else f" (the hard limit is {hard})"
    hint = f"raise it before Ray starts: ulimit -n 65536, systemd's LimitNOFILE= or the container's --ulimit{raised}."
    return Probe("open files", FAILED, text, hint)


def shared_memory(limit: int, memory: int) -> Probe:
    """The bytes that one process may have as shared memory, beside those that there are."""
    text = f"{limit / 2**20:.0f} MiB for each process, of {memory / 2**20:.0f} MiB of memory"
    if limit == 0:
        return Probe("shared memory", SKIPPED, "RAY_SERVE_GRPC_SHM_LIMIT=0 leaves it out")
    if limit <= LARGEST_SHARE * memory:
        return Probe("shared memory", OK, text)
    hint = "lower RAY_SERVE_GRPC_SHM_LIMIT: what is lent counts as the memory of this machine or container."
    return Probe("shared memory", FAILED, text, hint)
