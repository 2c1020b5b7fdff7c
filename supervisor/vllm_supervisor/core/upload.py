"""A request body on its way: raw bytes of the client in, bytes for the engine out, and where the request ends."""

from vllm_supervisor.core.chunked import ChunkedBody
from vllm_supervisor.core.http_semantics import CHUNKED


class BodyTooLargeError(Exception):
    """A chunked body has grown beyond the limit."""


class Upload:
    """Keeps count of one body. `complete` once its last byte has come; `rest` holds what came after it."""

    # What begins so stands here, once, not in every body.
    _chunks: ChunkedBody | None = None
    _decoded = 0
    rest = b""

    def __init__(self, length: int, *, max_body: int) -> None:
        """`length` in bytes, or CHUNKED; `max_body` in bytes bounds a chunked one."""
        if length == CHUNKED:
            self._chunks = ChunkedBody()
        self._left = length
        self._max_body = max_body
        self.complete = length == 0

    def take_whole(self) -> None:
        """Note that the body has come as one piece of just the announced length, and goes to the engine as it is."""
        self._left = 0
        self.complete = True

    @property
    def chunked(self) -> bool:
        """Whether reading it is more than counting its bytes."""
        return self._chunks is not None

    def feed(self, data: bytes) -> bytes:
        """Return what goes to the engine for `data`; raises ChunkError, BodyTooLargeError."""
        if self.complete:
            self.rest += data
            return b""
        return self.encode(self.decode(data))

    def decode(self, data: bytes) -> bytes:
        """Return the bytes of the body in `data`, which is not complete yet; raises ChunkError, BodyTooLargeError."""
        if self._chunks is None:
            part = data[: self._left] if len(data) > self._left else data
            self._left -= len(part)
            self.complete = self._left == 0
            self.rest = data[len(part) :]
            return part
        part = self._chunks.feed(data)
        self._decoded += len(part)
        if self._decoded > self._max_body:
            raise BodyTooLargeError
        if self._chunks.done:
            self.complete = True
            self.rest = self._chunks.rest
        return part

    def encode(self, part: bytes) -> bytes:
        """Return what goes to the engine for `part`, all that was decoded since the last call, and for the end."""
        if self._chunks is None:
            return part
        out = b"%x\r\n%b\r\n" % (len(part), part) if part else b""
        return out + b"0\r\n\r\n" if self.complete else out
