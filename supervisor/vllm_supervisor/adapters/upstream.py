"""The engine's address as the front door sees it; each incarnation has a new one.

Rules:
* `point_at` is the only way the address changes; whoever keeps connections is told, and drops the old ones.
* A generation number tells connections of an old address from those of the present one.
"""

import socket
from collections.abc import Callable

import trio

from vllm_supervisor.adapters.sockets import connect
from vllm_supervisor.core.address import Address

CONNECT_TIMEOUT = 10.0
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
            return await connect(self.address)
        raise TimeoutError("the engine does not accept connections")
