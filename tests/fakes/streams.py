"""Many chat streams at once, each in a thread, each remembered as its client saw it."""

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

import httpx

from fakes.supervisor_process import Client, until


@dataclass
class Seen:
    """What one client saw: the `data:` values, the transport error it ended with, if any, and when it ended."""

    data: list[str] = field(default_factory=list)
    error: str = ""
    ended_at: float = 0.0  # monotonic seconds

    @property
    def complete(self) -> bool:
        """Whether the stream ended as a complete answer does."""
        return (
            not self.error and self.data[-1:] == ["[DONE]"] and any('"finish_reason":"length"' in d for d in self.data)
        )


class Streams:
    """`count` streams to one port, open from the `with` on."""

    def __init__(self, port: int, count: int, *, first: int | None = None, **body: object) -> None:
        """`body` goes into every request; `first` of them are waited for, where an engine cannot run all at once."""
        self._first = count if first is None else first
        self.seen = [Seen() for _ in range(count)]
        self._port = port
        self._body = body
        self._pool = concurrent.futures.ThreadPoolExecutor(count)

    def _one(self, seen: Seen) -> None:
        try:
            with Client(self._port) as client, client.stream(**self._body) as stream:
                for value in stream:
                    seen.data.append(value)
        except (httpx.TransportError, AssertionError) as error:
            seen.error = repr(error)
        finally:
            seen.ended_at = time.monotonic()

    def __enter__(self) -> Self:
        """Open them all, and wait until each (or the `first`) has had its first token."""
        for seen in self.seen:
            self._pool.submit(self._one, seen)
        until(
            lambda: sum(bool(one.data or one.error) for one in self.seen) >= self._first,
            within=20.0,
            what="every stream's first token",
        )
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for their ends."""
        self._pool.shutdown(wait=True)


@contextlib.contextmanager
def load(port: int, clients: int) -> Iterator[list[int | str]]:
    """Keep `clients` busy with small whole requests; give the list of what they read: a status, or an error."""
    answers: list[int | str] = []
    over = threading.Event()

    def ask() -> None:
        with Client(port) as client:
            while not over.is_set():
                try:
                    answers.append(client.chat(max_tokens=4, ignore_eos=True).status_code)
                except httpx.TransportError as error:
                    answers.append(repr(error))

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        for _ in range(clients):
            pool.submit(ask)
        try:
            yield answers
        finally:
            over.set()
