"""A strict decoder of the chunked coding (RFC 9112, 7.1) for request bodies, which also tells where the body ends.

Rules:
* CRLF ends every line; a size is hexadecimal digits and nothing else before an optional extension; anything else is an
  error, so nobody behind us can read the body differently. What it accepts llhttp accepts too (tests hold it to that).
* Extensions and trailers are read, bounded and dropped.
* Memory is bounded by one line; the work is linear in the bytes.
"""

import re
from enum import Enum, auto

_MAX_LINE = 4096  # one size line with its extension
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15}+)(?:;[\t -~\x80-\xff]*+)?+")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[\t -~\x80-\xff]*+")


class ChunkError(Exception):
    """The body breaks the chunked coding."""


class _State(Enum):
    SIZE = auto()
    DATA = auto()
    DATA_END = auto()
    TRAILER = auto()
    DONE = auto()


class ChunkedBody:
    """Feed it raw bytes; it returns the body's bytes. `rest` holds what came after the end."""

    __slots__ = ("_held", "_left", "_state", "_trailer_left", "rest")

    def __init__(self, *, max_trailer: int) -> None:
        """`max_trailer` bounds the trailer section in bytes."""
        self._state = _State.SIZE
        self._left = 0
        self._held = b""
        self._trailer_left = max_trailer
        self.rest = b""

    @property
    def done(self) -> bool:
        """Whether the last chunk and the trailer section have been read."""
        return self._state is _State.DONE

    def feed(self, data: bytes) -> bytes:
        """Return the body bytes in `data`; raises ChunkError."""
        if self._held:
            data = self._held + data
            self._held = b""
        pieces: list[bytes] = []
        at = 0
        while at < len(data) and self._state is not _State.DONE:
            if self._state is _State.DATA:
                piece = data[at : at + self._left]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left == 0:
                    self._state = _State.DATA_END
                continue
            end = data.find(b"\n", at)
            if end < 0:
                self._hold(data[at:])
                return b"".join(pieces)
            if end == at or data[end - 1] != 0x0D:
                raise ChunkError("a line of the chunked coding does not end with CRLF")
            self._line(data[at : end - 1])
            at = end + 1
        if self._state is _State.DONE:
            self.rest = data[at:]
        return b"".join(pieces)

    def _line(self, line: bytes) -> None:
        if self._state is _State.DATA_END:
            if line:
                raise ChunkError("a chunk is longer than it said")
            self._state = _State.SIZE
        elif self._state is _State.SIZE:
            match = _SIZE_LINE.fullmatch(line)
            if match is None or len(line) > _MAX_LINE:
                raise ChunkError("a chunk size is not a number")
            self._left = int(match[1], 16)
            self._state = _State.DATA if self._left else _State.TRAILER
        elif not line:
            self._state = _State.DONE
        else:
            self._trailer_left -= len(line)
            if self._trailer_left < 0 or _TRAILER_LINE.fullmatch(line) is None:
                raise ChunkError("the trailer section is broken or too long")

    def _hold(self, line: bytes) -> None:
        limit = {_State.DATA_END: 1, _State.SIZE: _MAX_LINE, _State.TRAILER: max(self._trailer_left, 1)}
        if len(line) > limit[self._state]:
            raise ChunkError("a line of the chunked coding is too long")
        if line.find(b"\r", 0, -1) >= 0:
            raise ChunkError("a line of the chunked coding holds a bare CR")
        self._held = line
