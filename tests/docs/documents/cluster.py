"""A local Ray cluster with Serve and a dashboard in a process of its own.

`python -m documents.cluster FOLDER` prints one line of JSON when it is up. To each line on its standard input it
deletes all applications and answers with a line; it ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TESTS = Path(__file__).resolve().parent.parent
#: Seconds, with a cold disk and other work on the machine.
_START, _END = 180, 60


@dataclass(frozen=True)
class Cluster:
    address: str
    http_port: int
    dashboard_port: int
    process: subprocess.Popen[str]
    #: Of clusters that a page's commands start for themselves; short, since it holds sockets.
    folder: Path

    def environment(self, *, join: bool = True) -> dict[str, str]:
        """For a process of a page. With `join`, its Ray is this cluster."""
        variables = clean_environment() | {
            "RAY_TMPDIR": str(self.folder),
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{self.dashboard_port}",
            # A local cluster switches token authentication on; commands for its dashboard have to be told.
            "RAY_AUTH_MODE": "token",
            "COLUMNS": "82",  # click leaves two of them free, and none in its own test runner
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        return variables | ({"RAY_ADDRESS": self.address} if join else {})

    def delete_applications(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("delete\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline(), "the cluster is gone"


def clean_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MAKE"))}
    return kept | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_raylet_start_wait_time_s": str(_START),
        # Replicas bring their own workers; those for each CPU would be started for nothing.
        "RAY_prestart_worker_first_driver": "0",
    }


@contextlib.contextmanager
def running() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="rsd"))
    variables = clean_environment() | {
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(_TESTS), str(_TESTS.parent.parent / "examples"), os.environ.get("PYTHONPATH")])
        ),
    }
    with (folder / "cluster.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "documents.cluster", str(folder)],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            text=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        try:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"no cluster:\n{(folder / 'cluster.log').read_text()[-4000:]}")
            yield Cluster(**json.loads(line), process=process, folder=folder)
        finally:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)


def main(folder: str) -> None:
    import ray
    from ray import serve

    signal.alarm(_START)  # the default action of its signal ends a start that hangs
    http_port, dashboard_port = free_port(), free_port()
    context = ray.init(
        address="local",
        num_cpus=32,
        include_dashboard=True,
        dashboard_port=dashboard_port,
        object_store_memory=256 * 2**20,
        log_to_driver=False,
        _temp_dir=folder,
    )
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": http_port})
    signal.alarm(0)
    address = context.address_info["address"]
    print(json.dumps({"address": address, "http_port": http_port, "dashboard_port": dashboard_port}), flush=True)
    for _ in sys.stdin:
        for name in serve.status().applications:
            serve.delete(name)
        print("deleted", flush=True)
    serve.shutdown()
    ray.shutdown()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main(sys.argv[1])
