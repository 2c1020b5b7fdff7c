"""Connections to the engine, kept for reuse only as long as the engine surely keeps them too.

Rules:
* An idle connection is watched: if the engine closes it, or sends a byte nobody asked for, it is dropped at once.
* The youngest is used first; the old ones leave by age. Those of an earlier address are never used again.
"""

import errno
import socket
from collections.abc import Callable

from vllm_supervisor.adapters.upstream import Upstreams
from vllm_supervisor.runtime.link import Link
from vllm_supervisor.runtime.pump import Pump

_MAX_IDLE = 512


class EngineLink(Link):
    """A connection to one incarnation of the engine."""

    __slots__ = ("generation", "idle_since", "pool", "reused")

    generation: int
    idle_since: float
    pool: "EngineLinks"
    reused: bool  # it has answered a request before

    @property
    def refused(self) -> bool:
        """Whether the peer has left without having read all that was sent to it.

        A Unix socket says so by a reset (unix(7)), which `on_gone` tells; TCP by a reset, or by EPIPE where the peer had
        closed its side before the bytes came (tcp(7); tried on Linux 6.18).
        """
        return self.deaf or self.was_reset or self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.EPIPE

    def unasked(self, what: bytes | bool) -> None:
        """Take note, while idle, of bytes nobody asked for, or of the end."""
        if isinstance(what, bytes):
            self.pool.unsolicited()
        self.pool.drop(self)


class EngineLinks:
    """The pool. One event loop owns it."""

    def __init__(
        self, pump: Pump, upstreams: Upstreams, now: Callable[[], float], unsolicited: Callable[[], None]
    ) -> None:
        """Follow the address of `upstreams`; `unsolicited` is called for bytes that belong to no answer."""
        self.unsolicited = unsolicited
        self._pump = pump
        self._upstreams = upstreams
        self._now = now
        self._idle: list[EngineLink] = []
        upstreams.on_move(self.drop_all)

    def idle(self) -> EngineLink | None:
        """Return a connection that can be used again, or None."""
        while self._idle:
            link = self._idle.pop()
            if link.idle_since > self._now() - self._upstreams.reuse_for:
                return link
            link.close()
        return None

    async def connect(self) -> EngineLink:
        """Return a new connection; raises OSError."""
        generation = self._upstreams.generation
        link = EngineLink(self._pump, await self._upstreams.connect(), patient=True)
        link.generation = generation
        link.pool = self
        link.reused = False
        return link

    def give_back(self, link: EngineLink) -> None:
        """Keep a connection whose last answer ended cleanly."""
        stale = link.generation != self._upstreams.generation or link.ended or link.deaf
        if stale or link.dozing or len(self._idle) >= _MAX_IDLE:  # one that dozes could not be watched
            link.close()
            return
        link.idle_since = self._pump.now
        link.reused = True
        link.on_bytes = link.on_gone = link.unasked
        self._idle.append(link)

    def drop(self, link: EngineLink) -> None:
        """Close one that is idle."""
        self._idle.remove(link)
        link.close()

    def drop_old(self) -> None:
        """Close what has been idle for too long."""
        limit = self._now() - self._upstreams.reuse_for
        while self._idle and self._idle[0].idle_since <= limit:
            self._idle.pop(0).close()

    def drop_all(self) -> None:
        """Close every idle connection."""
        for link in self._idle:
            link.close()
        self._idle.clear()
