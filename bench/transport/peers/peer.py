"""What a peer does. Every one of them pickles and unpickles the value at both ends, both ways."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

ITEM = "token "


class Client(ABC):
    @abstractmethod
    async def echo(self, value: Any) -> Any:
        """The value, as the server got it and sent it back. Any number of calls at a time."""

    def stream(self, count: int) -> AsyncIterator[Any]:
        """So many items from the server, which makes them without a pause."""
        raise NotImplementedError


class Peer(ABC):
    @abstractmethod
    async def serve(self, folder: Path) -> object:
        """Serves until the process ends. Returns what must be kept meanwhile. The folder is for sockets and ports."""

    @abstractmethod
    async def connect(self, folder: Path) -> Client: ...
