"""The beginning of a request body, read before the request is admitted (as nginx's proxy_request_buffering does).

Rules:
* It is `ready` once the body is whole, or so much of it has come that a large one can be said to flow. Then the client is
  not read until the request goes on.
* Memory: BODY_FIRST and one read at most.
* A large piece of chunks waits until those are served who ask for less.
"""

from collections.abc import Callable

from vllm_supervisor.core.chunked import ChunkError
from vllm_supervisor.core.ending import BodyProgress, Ending
from vllm_supervisor.core.upload import BodyTooLargeError, Upload
from vllm_supervisor.runtime.desk import Desk
from vllm_supervisor.runtime.link import Link
from vllm_supervisor.runtime.request_half import CHUNKS_AT_ONCE

BODY_FIRST = 64 * 1024  # bytes of a body that come before its request is admitted


class BodyBuffer:
    """See the module's rules. Calls `ready` once, or `broken` once and nothing after it."""

    def __init__(
        self, desk: Desk, client: Link, length: int, came: Callable[[], None], broken: Callable[[Ending], None]
    ) -> None:
        """`length` in bytes, or CHUNKED."""
        self.upload = Upload(length, max_body=desk.settings.max_body)
        self.progress = BodyProgress(desk.pump.now, desk.pump.now)
        self.ready = False
        self._stopped = False
        self._pump = desk.pump
        self._client = client
        self._came = came
        self._broken = broken
        self._body = bytearray()
        self._put_off = b""

    def begin(self, data: bytes) -> None:
        """Take over the client, and what has come of the body."""
        self._client.on_bytes = self._feed
        self._client.resume()
        if data:
            self._feed(data)

    def stop(self) -> None:
        """Read no more, not even what is put off: the request is refused."""
        self._stopped = True
        self._put_off = b""

    def restart(self) -> None:
        """Count the time from now on."""
        self.progress.began = self.progress.last_at = self._pump.now

    def take(self) -> bytes:
        """Return what has come, decoded."""
        body, self._body = bytes(self._body), bytearray()
        return body

    def _feed(self, data: bytes) -> None:
        self.progress.came(len(data), self._pump.now)
        if self.upload.complete:  # of the next request, which came before the client was stopped
            self.upload.rest += data
        elif not (self._put_off or (self.upload.chunked and len(data) > CHUNKS_AT_ONCE)):
            self._read(data)
            return
        else:
            if not self._put_off:
                self._client.defer(self._read_chunks)
            self._put_off += data
        self._client.pause()

    def _read_chunks(self) -> None:
        data, self._put_off = self._put_off, b""
        if not self._stopped and self._read(data):
            self._client.resume()

    def _read(self, data: bytes) -> bool:
        """Decode `data`; True if more is to come before the request goes on."""
        try:
            self._body += self.upload.decode(data)
        except ChunkError:
            self._broken(Ending.BODY_BROKEN)
            return False
        except BodyTooLargeError:
            self._broken(Ending.BODY_TOO_LARGE)
            return False
        if not self.ready and (self.upload.complete or len(self._body) >= BODY_FIRST):
            self.ready = True
            self.progress.stop(self._pump.now)
            self._client.pause()
            self._came()
        return not self.ready
