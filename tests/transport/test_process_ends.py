"""Processes that fork, exit and are interrupted with a live channel: no hang, no crash, nothing on stderr."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

#: How often each ending is tried.
TIMES = int(os.environ.get("ENDING_TIMES", "3"))

#: A server, a channel to it, and calls under way in every state.
PROGRAM = """
    import asyncio, gc, multiprocessing, os, signal, subprocess, sys, threading
    from ray_serve_grpc import _native
    from ray_serve_grpc.bridge import bridge_for

    held = []

    def on_call(call):
        if call.body == b"hold":
            call.admit(True, 1)
            held.append(call)
            return
        call.admit(True, 1)
        call.send(0, call.body, call.buffers)
        call.finish()

    async def ask(channel, body=b"ask"):
        loop = asyncio.get_running_loop()
        call = channel.call(0, (), b"", body, ())
        future = loop.create_future()
        call.watch_message(bridge_for(loop), future)
        await asyncio.wait_for(future, 60)
        assert call.take()[1] == body, call.status()

    def in_child(endpoint, queue):
        # A fresh channel of the child's own, to the parent's server, by way of the child's own runtime.
        async def main():
            await ask(_native.Channel([endpoint]))
        asyncio.run(main())
        queue.put("asked")

    async def main(folder, ending):
        loop = asyncio.get_running_loop()
        _native.set_shm_limit(1 << 28)
        server = _native.Server(bridge_for(loop), on_call, host="127.0.0.1", unix_path=f"{folder}/s.sock")
        channel = _native.Channel([f"unix:{folder}/s.sock"])
        await ask(channel)
        calls = [channel.call(0, (), b"", b"hold", (bytes(200_000),)) for _ in range(20)]
        while len(held) < 20:
            await asyncio.sleep(0.01)
        calls += [channel.call(0, (), b"", bytes(1_000_000), ()) for _ in range(20)]
        if ending == "fork":
            context = multiprocessing.get_context("fork")
            queue = context.Queue()
            child = context.Process(target=in_child, args=(f"unix:{folder}/s.sock", queue))
            child.start()
            assert await asyncio.to_thread(queue.get, True, 60) == "asked"
            await asyncio.to_thread(child.join, 60)
            assert child.exitcode == 0
            await ask(channel)
        elif ending == "subprocess":
            done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", "print(1)"], check=True)
            await ask(channel)
        elif ending == "os.fork":
            pid = os.fork()
            if pid == 0:
                # All that the parent's loop does not share with the child goes, calls under way included.
                held.clear()
                del calls, channel, server
                gc.collect()
                os._exit(0)
            _, status = await asyncio.to_thread(os.waitpid, pid, 0)
            assert status == 0
            await ask(channel)
        elif ending == "interrupt":
            print("waiting", flush=True)
            await asyncio.Event().wait()
        elif ending == "interrupt in a thread's wait":
            held.extend([server, channel])
            return calls[0]
        print("done", flush=True)
        if ending == "exit":
            sys.exit(0)

    folder, ending = sys.argv[1:]
    try:
        call = asyncio.run(main(folder, ending))
        if call is not None:
            print("waiting", flush=True)
            call.wait(None)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def program(folder, ending) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(PROGRAM), str(folder), ending]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("ending", ["end", "exit", "fork", "os.fork", "subprocess"])
def test_a_process_with_calls_under_way_forks_and_ends_in_silence(tmp_path, ending):
    for number in range(TIMES):
        (folder := tmp_path / str(number)).mkdir()
        with program(folder, ending) as process:
            out, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (0, ""), err
        assert "done" in out


@pytest.mark.parametrize("ending", ["interrupt", "interrupt in a thread's wait"])
def test_ctrl_c_with_calls_under_way_is_obeyed_at_once(tmp_path, ending):
    for number in range(TIMES):
        (folder := tmp_path / str(number)).mkdir()
        with program(folder, ending) as process:
            assert process.stdout.readline() == "waiting\n" or pytest.fail(process.stderr.read())
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
        assert (process.returncode, out, err) == (0, "interrupted\n", "")


#: A server and its caller on the loop of a daemon thread, as Serve's are in a driver. When the main thread ends, one of
#: these is in the middle of a callback, of what a call brings, or of a wait for one, and wants the GIL again.
DAEMON = """
    import asyncio, sys, threading
    from ray_serve_grpc import _native
    from ray_serve_grpc.bridge import bridge_for

    kept = []
    busy = threading.Event()

    def spin(*_):
        busy.set()
        while True:
            pass

    class Spinning(asyncio.Future):
        def set_result(self, result):
            spin()

    def on_call(call):
        kept.append(call)
        call.admit(True, 1)
        if call.body == b"spin":
            spin()
        if call.body != b"hold":
            call.finish()

    def wait_for(call):
        busy.set()
        call.wait(None)

    async def main(folder, where):
        loop = asyncio.get_running_loop()
        server = _native.Server(bridge_for(loop), on_call, host="127.0.0.1", unix_path=f"{folder}/s.sock")
        channel = _native.Channel([f"unix:{folder}/s.sock"])
        body = {"wait": b"hold", "server": b"spin"}.get(where, b"ends")
        call = channel.call(0, (), b"", body, ())
        kept.extend([server, channel, call])
        if where == "callback":
            call.watch_done(bridge_for(loop), spin)
        elif where == "future":
            call.watch_message(bridge_for(loop), Spinning())
        elif where == "wait":
            for _ in range(4):
                threading.Thread(target=wait_for, args=(call,), daemon=True).start()
        await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(main(*sys.argv[1:])), daemon=True).start()
    busy.wait()
    print("done", flush=True)
"""


@pytest.mark.parametrize("where", ["callback", "future", "server", "wait"])
def test_a_process_ends_while_its_daemon_threads_run_or_wait(tmp_path, where):
    for number in range(TIMES):
        (folder := tmp_path / str(number)).mkdir()
        command = [sys.executable, "-c", textwrap.dedent(DAEMON), str(folder), where]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
