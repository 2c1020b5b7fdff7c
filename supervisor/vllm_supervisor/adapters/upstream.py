"""The engine's address as the front door sees it; each incarnation has a new one.

Rules:
* `point_at` is the only way the address changes; whoever keeps connections is told, and drops the old ones.
* A generation number tells connections of an old address from those of the present one.

Sources: connect(2), unix(7).
"""

import errno
import os
import socket
from collections.abc import Callable

import trio

from vllm_supervisor.core.address import Address, UnixAddress

CONNECT_TIMEOUT = 10.0
_UNIX_RETRY, _UNIX_RETRY_MAX = 0.002, 0.1
_REUSE = 0.7  # of the engine's keep-alive: an idle connection older than this may be closing under our hands


class Upstreams:
    """Where the engine listens, and how long it keeps an idle connection."""

    def __init__(self) -> None:
        """Begin with no engine."""
        self.address: Address | None = None
        self.generation = 0
        self.reuse_for = 0.0  # seconds an idle connection may be used again
        self._listeners: list[Callable[[], None]] = []

    def point_at(self, address: Address | None, keep_alive_s: float) -> None:
        """Use `address` from now on (None: the engine is down); its idle connections live `keep_alive_s` seconds."""
        self.address = address
        self.reuse_for = _REUSE * keep_alive_s
        self.generation += 1
        for listener in self._listeners:
            listener()

    def on_move(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change of the address."""
        self._listeners.append(listener)

    async def connect(self) -> socket.socket:
        """Open a connection to the engine; raises OSError (ConnectionError while it is down, TimeoutError)."""
        if self.address is None:
            raise ConnectionRefusedError("no engine is up")
        with trio.move_on_after(CONNECT_TIMEOUT):
            return await _connect(self.address)
        raise TimeoutError("the engine does not accept connections")


async def _connect(address: Address) -> socket.socket:
    if isinstance(address, UnixAddress):
        return await _connect_unix(address.path)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        code = sock.connect_ex((address.host, address.port))
        if code == errno.EINPROGRESS:
            await trio.lowlevel.wait_writable(sock)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        _check(code)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


async def _connect_unix(path: str) -> socket.socket:
    """Connect at once, or wait: a full backlog says EAGAIN and nothing tells when it has room (unix(7))."""
    pause = _UNIX_RETRY
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        while (code := sock.connect_ex(path)) == errno.EAGAIN:
            await trio.sleep(pause)
            pause = min(2 * pause, _UNIX_RETRY_MAX)
        _check(code)
    except BaseException:
        sock.close()
        raise
    return sock


def _check(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))
