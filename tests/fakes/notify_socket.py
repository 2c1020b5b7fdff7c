"""A service manager's end of the notification socket: collects what it is told, with when."""

import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self


@dataclass
class Told:
    """One message: seconds of the monotonic clock, and its assignments."""

    at: float
    words: list[str]


@dataclass
class NotifySocket:
    """Collects messages in a thread until closed."""

    path: Path
    messages: list[Told] = field(default_factory=list)

    def __enter__(self) -> Self:
        """Listen."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening: an empty message wakes the collector."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as waker:
            waker.sendto(b"", str(self.path))
        self._thread.join(5.0)
        self._socket.close()

    def _collect(self) -> None:
        while data := self._socket.recv(65536):
            self.messages.append(Told(time.monotonic(), data.decode().split("\n")))

    def values(self, name: str) -> list[str]:
        """Give the values assigned to `name` so far, in order."""
        return [
            word.partition("=")[2] for told in list(self.messages) for word in told.words if word.startswith(f"{name}=")
        ]

    def first(self, word: str) -> float | None:
        """Say when `word` ("READY=1") came first."""
        return next((told.at for told in list(self.messages) if word in told.words), None)
