"""One non-blocking socket in the pump: bytes in by callback, bytes out at once, back-pressure in both directions.

Rules:
* `write` hands the kernel what it takes; the rest waits in `outbox`. Whoever feeds a link stops its own source while
  `outbox` holds something and goes on at `on_drained`, so what waits is bounded by about one read.
* A watchful link (a client's) tells at once that its peer went, even while it is not read. A patient one (the
  engine's) does not: what the engine sent before it closed is still to be read.
* After `on_gone` no more bytes come; after `close` no callback comes at all.
"""

import errno
import select
import socket
import ssl
from collections.abc import Callable
from functools import partial

from vllm_supervisor.adapters import sockets
from vllm_supervisor.core.forwarding import UNKNOWN, Peer
from vllm_supervisor.runtime.pump import GONE, HANGUP, NOT_WRITABLE, READABLE, WRITABLE, Pump

_BYTES = select.EPOLLIN
_READ_SIZE = sockets.READ_SIZE
_WOULD_BLOCK = sockets.WOULD_BLOCK


def _ignore_bytes(_data: bytes) -> None: ...


def _ignore_end(_clean: bool) -> None: ...


def _ignore() -> None: ...


class Link:
    """See the module's rules. `blocked_since` is when the peer last took a byte, meaningful while `outbox` is full."""

    __slots__ = (
        "_fd",
        "_mask",
        "_patient",
        "_pump",
        "_reading",
        "_tls",
        "blocked_since",
        "closed",
        "deaf",
        "dozing",
        "ended",
        "on_bytes",
        "on_drained",
        "on_gone",
        "outbox",
        "peer",
        "sock",
        "was_reset",
    )

    def __init__(self, pump: Pump, sock: socket.socket, *, patient: bool, peer: Peer = UNKNOWN) -> None:
        """Begin reading `sock`, which is non-blocking; set the callbacks before the pump runs next."""
        self._pump = pump
        self.sock = sock
        self.peer = peer
        self._fd = sock.fileno()
        self._patient = patient
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._reading = True
        self.dozing = False  # reads nothing for a few milliseconds
        self._mask = 0
        self.outbox = bytearray()
        self.blocked_since = 0.0
        self.deaf = False  # the peer takes no more bytes
        self.ended = False  # the peer sends no more bytes
        self.was_reset = False  # for the peer left with bytes of ours unread
        self.closed = False
        self.on_bytes: Callable[[bytes], None] = _ignore_bytes
        self.on_gone: Callable[[bool], None] = _ignore_end
        self.on_drained: Callable[[], None] = _ignore
        self._watch()

    # -- out ---------------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> int:
        """Send `data`, keeping what the kernel does not take now; return how much it took."""
        if self.closed or self.deaf:
            return 0
        if self.outbox:
            self.outbox += data
            return 0
        try:
            sent = self.sock.send(data)
        except _WOULD_BLOCK:
            sent = 0
        except OSError:
            self._became_deaf()
            return 0
        if sent < len(data):
            self.outbox += memoryview(data)[sent:]
            self.blocked_since = self._pump.now
            self._watch()
        return sent

    def _flush(self) -> None:
        try:
            sent = self.sock.send(self.outbox)
        except _WOULD_BLOCK:
            return
        except OSError:
            self._became_deaf()
            return
        del self.outbox[:sent]
        self.blocked_since = self._pump.now
        if not self.outbox:
            self._watch()
            self.on_drained()

    def _became_deaf(self) -> None:
        self.deaf = True
        waited = bool(self.outbox)
        self.outbox.clear()
        if self._patient:
            self._watch()
            if waited:
                self.on_drained()
        else:
            self._end(clean=False)

    # -- in ----------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Read no more for now."""
        if self._reading:
            self._reading = False
            self._watch()

    def resume(self) -> None:
        """Read again."""
        if not self._reading and not self.ended and not self.closed:
            self._reading = True
            self._watch()
            if self._tls and self.sock.pending():  # type: ignore[attr-defined]  # _tls says it is an SSLSocket
                self._receive()

    def doze(self) -> None:
        """Let bytes gather for a few milliseconds before the next read. `pause` and `resume` are not touched."""
        if not self.dozing:
            self.dozing = True
            self._watch()
            self._pump.doze(self._awake)

    def _awake(self) -> None:
        self.dozing = False
        self._watch()

    def _receive(self) -> None:
        try:
            data = self.sock.recv(_READ_SIZE)
        except _WOULD_BLOCK:
            return
        except OSError as fault:
            self.was_reset = fault.errno == errno.ECONNRESET
            self._end(clean=False)
            return
        if not data:
            self._end(clean=True)
            return
        self.on_bytes(data)
        if self._tls:  # it may hold a decrypted rest that no event of the kernel will ever announce
            while self._reading and not self.closed and self.sock.pending():  # type: ignore[attr-defined]
                self.on_bytes(self.sock.recv(_READ_SIZE))

    def _end(self, *, clean: bool) -> None:
        if self.ended:
            return
        self.ended = True
        self._reading = False
        self._watch()
        self.on_gone(clean)

    # -- the pump ----------------------------------------------------------------------------------------------

    def _ready(self, events: int) -> None:
        try:
            if events == _BYTES and self._reading:  # nothing else, as usual
                self._receive()
            else:
                self._handle(events)
        except Exception as fault:  # noqa: BLE001 - our fault ends this exchange, not the pump with all others
            self.fail(fault)

    def fail(self, fault: Exception) -> None:
        """End the connection for a fault of ours."""
        self._pump.on_fault(fault)
        self._end(clean=False)
        self.close()

    def defer(self, work: Callable[[], None]) -> None:
        """Let the pump do `work` when it has time, unless this is closed by then; a fault ends the connection."""
        self._pump.defer(partial(self._deferred, work))

    def _deferred(self, work: Callable[[], None]) -> None:
        if self.closed:
            return
        try:
            work()
        except Exception as fault:  # noqa: BLE001 - as above
            self.fail(fault)

    def give_up(self) -> None:
        """Take the peer for gone."""
        self._end(clean=False)

    def _handle(self, events: int) -> None:
        if self.outbox and events & ~READABLE:
            self._flush()
        if self._reading:
            if events & NOT_WRITABLE:
                self._receive()
        elif events & GONE and not self._patient and not self.closed:
            self._end(clean=False)

    def _watch(self) -> None:
        if self.closed:
            return
        mask = WRITABLE if self.outbox else 0
        if self._reading:
            mask |= 0 if self.dozing else READABLE
        elif not self._patient and not self.ended:
            mask |= HANGUP
        if mask == self._mask:
            return
        if not mask:
            self._pump.forget(self._fd)
        elif self._mask:
            self._pump.change(self._fd, mask)
        else:
            self._pump.add(self._fd, mask, self._ready)
        self._mask = mask

    def close(self, *, reset: bool = False) -> None:
        """Close the socket; `reset` breaks the connection off instead of ending it."""
        if self.closed:
            return
        self.closed = True
        self.outbox.clear()
        if self._mask:
            self._pump.forget(self._fd)
            self._mask = 0
        if reset:
            sockets.reset(self.sock)
            return
        if isinstance(self.sock, ssl.SSLSocket):
            sockets.say_goodbye(self.sock)
        self.sock.close()
