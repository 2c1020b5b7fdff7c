"""What follows a 101 (a websocket): bytes both ways, unread, until either side ends.

Rules:
* Back-pressure in both directions: who cannot be written to stops the other side from being read.
* The engine's clean end is the end once its last bytes have gone out. That the client left is for the relay to note.
"""

from collections.abc import Callable

from vllm_supervisor.core.ending import Ending
from vllm_supervisor.runtime.link import Link


class Tunnel:
    """Takes both links over from the relay, which still ends them."""

    def __init__(
        self, client: Link, engine: Link, *, end: Callable[[Ending], object], passed: Callable[[int], None]
    ) -> None:
        """`end` is told how it ended, `passed` the size of each piece that goes to the client."""
        self._client = client
        self._engine = engine
        self._end = end
        self._passed = passed
        client.on_bytes = self._to_engine
        client.on_drained = self._client_drained
        engine.on_bytes = self._to_client
        engine.on_gone = self._engine_gone
        engine.on_drained = client.resume

    def begin(self, *, to_engine: bytes, to_client: bytes) -> None:
        """Pass on what has already come from either side."""
        if to_engine:
            self._to_engine(to_engine)
        if to_client:
            self._to_client(to_client)
        if not self._engine.outbox:
            self._client.resume()

    def _to_engine(self, data: bytes) -> None:
        self._engine.write(data)
        if self._engine.outbox:
            self._client.pause()

    def _to_client(self, data: bytes) -> None:
        self._client.write(data)
        self._passed(len(data))
        if self._client.outbox:
            self._engine.pause()

    def _client_drained(self) -> None:
        if self._engine.ended:
            self._end(Ending.ANSWERED)
        else:
            self._engine.resume()

    def _engine_gone(self, clean: bool) -> None:
        if not clean:
            self._end(Ending.ENGINE_FAILED)
        elif not self._client.outbox:
            self._end(Ending.ANSWERED)
