"""No transport: two copies into memory that is warm, the least that an echo between two processes must do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import payloads
from bench.transport.peers.peer import Client, Peer


class _Client(Client):
    def __init__(self) -> None:
        self._there: Any = None
        self._back: Any = None

    async def echo(self, value: Any) -> Any:
        import numpy as np

        data = np.frombuffer(value, np.uint8)
        if self._there is None or len(self._there) != payloads.length(value):
            self._there, self._back = np.empty_like(data), np.empty_like(data)
        np.copyto(self._there, data)
        np.copyto(self._back, self._there)
        return value


class Memcpy(Peer):
    async def serve(self, folder: Path) -> object:
        return None

    async def connect(self, folder: Path) -> Client:
        return _Client()
