"""What each process does once per second, apart from calls: hands on the core's log, exports metrics."""

from __future__ import annotations

import atexit
import logging
import os
import threading

import ray

from ray_serve_grpc import _native, config, logs, timing
from ray_serve_grpc.metrics_export import Exporter, Origin

logger = logging.getLogger(config.LOGGER_NAME)

INTERVAL_S = 1.0


class Background:
    """One thread, from `start` to `stop` or to the end of the process."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray-serve-grpc-background", daemon=True)
        self._exporter: Exporter | None = None
        self._complained = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when nothing is handed on any more; at most about a second later."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2 * INTERVAL_S)

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            self.tick()

    def tick(self) -> None:
        logs.hand_on()
        if not config.settings().metrics or not ray.is_initialized():
            return
        timing.renew()
        try:
            if self._exporter is None:
                self._exporter = Exporter(Origin.here())
            self._exporter.export()
        except Exception as error:
            # Calls go on without metrics; the next second may be better.
            if not self._complained:
                self._complained = True
                logger.warning("Metrics cannot be exported: %r", error)


_present: Background | None = None
_lock = threading.Lock()


def start() -> None:
    """Once per process, before its first channel or server is made; then nothing."""
    global _present
    if _present is not None:
        return
    with _lock:
        if _present is None:
            settings = config.settings()
            _native.set_log_level(logging.getLevelName(settings.log_level))
            _native.time_calls(settings.metrics)
            if settings.metrics:
                timing.renew()
            _present = Background()
            _present.start()


def stop() -> None:
    """What was told until now is handed on."""
    global _present
    with _lock:
        present, _present = _present, None
    if present is not None:
        present.stop()
        logs.hand_on()


def _forget() -> None:
    """The thread stayed in the parent."""
    global _present, _lock
    _present = None
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)
atexit.register(stop)
