"""What the project set out to reach, cell by cell."""

from __future__ import annotations

from dataclasses import dataclass

from bench.compare import TESTS, Key
from bench.payloads import parse_size

#: Up to which size -> how many times better than the better of the two others, on one host.
_ONE_HOST = {
    "latency": {"100KB": 2.0, "1MB": 4.0, "10MB": 2.5, "100MB": 1.3},
    "chain": {"100KB": 2.0, "1MB": 4.0, "10MB": 4.0, "100MB": 2.0},
    "throughput": {"100KB": 2.5, "1MB": 5.0, "10MB": 3.5, "100MB": 1.5},
}
_TWO_HOSTS = {"100KB": 1.8, "1MB": 3.5, "10MB": 2.2}
_BYTES = 0.75  # of what is asked of numpy arrays' latency
_THROUGHPUT_MODE = 1.2  # the throughput-optimised mode aims that much higher
_MANY_IN_FLIGHT = 3.0


@dataclass(frozen=True)
class Bar:
    """Ours must be `times` better in `figure` than the best of `rivals` (of all others, if there are none)."""

    times: float
    figure: str
    more_is_better: bool = False
    rivals: tuple[str, ...] = ()


def bars(bench: str, key: Key) -> list[Bar]:
    """Of one cell; none where nothing was promised."""
    if bench == "transport":
        return _transport(key)
    return _streams(key) if key.test in ("streams", "paced") else _calls(bench, key)


def _calls(bench: str, key: Key) -> list[Bar]:
    test, found = TESTS[key.test], []
    times = _times(bench, key)
    if times is not None:
        found.append(Bar(times, test.figure, test.more_is_better))
    if bench == "serve" and key.kind == "numpy" and key.test == "throughput":
        if key.size == parse_size("1KB"):
            found.append(Bar(1 / 0.35, "cpu_ms", rivals=("stock",)))
        if key.size == parse_size("1MB"):
            found.append(Bar(1 / 0.2, "cpu_ms", rivals=("stock",)))
    return found


def _times(bench: str, key: Key) -> float | None:
    if bench == "two-hosts":
        sizes = _TWO_HOSTS if key.test in ("latency", "throughput") else {}
        return _by_size(sizes, key.size) if key.kind == "numpy" else None
    aim = _THROUGHPUT_MODE if "throughput" in key.place else 1.0
    if key.in_flight > 10:
        return _MANY_IN_FLIGHT * aim
    times = _by_size(_ONE_HOST.get(key.test, {}), key.size)
    if times is None or (key.kind == "bytes" and key.test != "latency"):
        return None
    return times * aim * (_BYTES if key.kind == "bytes" else 1.0)


def _by_size(sizes: dict[str, float], size: int) -> float | None:
    return next((times for limit, times in sizes.items() if size <= parse_size(limit)), None)


def _streams(key: Key) -> list[Bar]:
    if key.test == "streams":
        return [Bar(8.0, "per_s", True, ("stock",))]
    return [Bar(3.0, "p50_ms", rivals=("stock",)), Bar(1 / 0.4, "cpu_ms", rivals=("stock",))]


def _transport(key: Key) -> list[Bar]:
    small, big = key.size == parse_size("1KB"), key.size == parse_size("10MB")
    if key.test == "throughput" and small and key.in_flight == 64:
        return [Bar(7.0, "per_s", True, ("grpc.aio",)), Bar(3.0, "per_s", True, ("pygrpc-native",))]
    if key.test == "latency" and small:
        return [Bar(1 / 2.5, "p50_ms", rivals=("unix-socket",))]
    if key.test == "latency" and big:
        return [Bar(1 / 2, "p50_ms", rivals=("memcpy",))]
    return []
