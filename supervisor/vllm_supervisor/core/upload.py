"""A request body on its way: raw bytes of the client in, bytes for the engine out, and where the request ends."""

from vllm_supervisor.core.chunked import ChunkedBody
from vllm_supervisor.core.http_semantics import CHUNKED


class BodyTooLargeError(Exception):
    """A chunked body has grown beyond the limit."""


class Upload:
    """Keeps count of one body. `complete` once its last byte has come; `rest` holds what came after it."""

    # What begins so stands here, once, not in every body.
    _chunks: ChunkedBody | None = None
    _received = 0
    begun = False
    rest = b""

    def __init__(self, length: int, *, max_body: int, max_trailer: int) -> None:
        """`length` in bytes, or CHUNKED; `max_body` and `max_trailer` in bytes bound a chunked one."""
        if length == CHUNKED:
            self._chunks = ChunkedBody(max_trailer=max_trailer)
        self._left = length
        self._max_body = max_body
        self.complete = length == 0

    @property
    def untouched(self) -> bool:
        """Whether nothing has come yet of the body that was announced."""
        return not self.complete and not self.begun

    def take_whole(self) -> None:
        """Note that the body has come as one piece of just the announced length, and goes to the engine as it is."""
        self._left = 0
        self.begun = self.complete = True

    def feed(self, data: bytes) -> bytes:
        """Return what goes to the engine for `data`; raises ChunkError, BodyTooLargeError."""
        if self.complete:
            self.rest += data
            return b""
        self.begun = True
        if self._chunks is None:
            part = data[: self._left] if len(data) > self._left else data
            self._left -= len(part)
            self.complete = self._left == 0
            self.rest = data[len(part) :]
            return part
        part = self._chunks.feed(data)
        self._received += len(part)
        if self._received > self._max_body:
            raise BodyTooLargeError
        out = b"%x\r\n%b\r\n" % (len(part), part) if part else b""
        if self._chunks.done:
            self.complete = True
            self.rest = self._chunks.rest
            out += b"0\r\n\r\n"
        return out
