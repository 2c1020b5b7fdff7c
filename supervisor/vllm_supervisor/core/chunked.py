"""A strict decoder of the chunked coding (RFC 9112, 7.1) for request bodies, which also tells where the body ends.

Rules:
* CRLF ends every line; a size is hexadecimal digits and nothing else before an optional extension; anything else is an
  error, so nobody behind us can read the body differently. What it accepts llhttp accepts too (tests hold it to that).
* Extensions and trailers are read, bounded and dropped.
* Every byte is looked at a fixed number of times, however the bytes are cut: what is held of an unfinished line is not
  searched again. Memory is bounded by one line.
* The coding may cost MAX_OVERHEAD bytes more than OVERHEAD_RATIO times the body it carries. Chunks of three bytes and
  more never reach that; a body cut into single bytes or padded with extensions does (Go's net/http has the same bound).
"""

import re
from enum import Enum, auto

MAX_LINE = 512  # bytes of a size line with its extension
MAX_OVERHEAD = 16 * 1024  # bytes of sizes, extensions and line ends beyond the ratio
OVERHEAD_RATIO = 2
MAX_TRAILERS = 64  # fields
MAX_TRAILER = 8 * 1024  # bytes of the trailer section
_USUAL_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15}+)\r\n")
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15}+)(?:;[\t -~\x80-\xff]*+)?+")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[\t -~\x80-\xff]*+")


class ChunkError(Exception):
    """The body breaks the chunked coding, or goes beyond one of its limits."""


class _State(Enum):
    SIZE = auto()
    DATA = auto()
    DATA_END = auto()
    TRAILER = auto()
    DONE = auto()


class ChunkedBody:
    """Feed it raw bytes; it returns the body's bytes. `rest` holds what came after the end."""

    __slots__ = ("_held", "_left", "_overhead", "_state", "_trailer_left", "_trailers_left", "rest")

    def __init__(self) -> None:
        """Begin before the first chunk."""
        self._state = _State.SIZE
        self._left = 0  # bytes of the chunk that are still to come
        self._held = bytearray()  # an unfinished line
        self._overhead = -MAX_OVERHEAD  # above 0 it is too much
        self._trailer_left = MAX_TRAILER
        self._trailers_left = MAX_TRAILERS
        self.rest = b""

    @property
    def done(self) -> bool:
        """Whether the last chunk and the trailer section have been read."""
        return self._state is _State.DONE

    def feed(self, data: bytes) -> bytes:
        """Return the body bytes in `data`; raises ChunkError."""
        pieces: list[bytes] = []
        at = self._finish_line(data) if self._held else 0
        size = len(data)
        while at < size:
            state = self._state
            if state is _State.SIZE:
                at = self._whole_chunks(data, at, pieces)
                if at == size:
                    break
            elif state is _State.DATA:
                piece = data[at : at + self._left]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left == 0:
                    self._state = _State.DATA_END
                continue
            elif state is _State.DONE:
                self.rest = data[at:]
                break
            end = data.find(b"\n", at, at + self._longest + 2)
            if end < 0:
                self._hold(data[at:])
                break
            self._line(data[at : end + 1])
            at = end + 1
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _whole_chunks(self, data: bytes, at: int, pieces: list[bytes]) -> int:
        """Read, from a size on, the chunks that are whole and have no extension; return where they end."""
        match = _USUAL_CHUNK.match
        limit = len(data) - 2
        overhead = self._overhead
        while (found := match(data, at)) is not None:
            begin = found.end()
            left = int(found[1], 16)
            end = begin + left
            if not left or end > limit or data[end] != 0x0D or data[end + 1] != 0x0A:
                break
            overhead += begin - at + 2 - OVERHEAD_RATIO * left
            if overhead > 0:
                raise ChunkError(_TOO_MUCH)
            overhead = max(overhead, -MAX_OVERHEAD)
            pieces.append(data[begin:end])
            at = end + 2
        self._overhead = overhead
        return at

    @property
    def _longest(self) -> int:
        """How long the line may be that is being read, without its end."""
        if self._state is _State.DATA_END:
            return 0
        return MAX_LINE if self._state is _State.SIZE else self._trailer_left

    def _finish_line(self, data: bytes) -> int:
        """Read the rest of the line that is held; return where it ends."""
        end = data.find(b"\n") + 1
        if end == 0:
            self._hold(data)
            return len(data)
        self._held += data[:end]
        line = bytes(self._held)
        self._held.clear()
        self._line(line)
        return end

    def _hold(self, part: bytes) -> None:
        """Keep a part of a line that has no end yet, if it can still become one."""
        held = self._held
        begin = max(0, len(held) - 1)
        held += part
        if held.find(b"\r", begin, -1) >= 0:
            raise ChunkError("a line of the chunked coding holds a bare CR")
        if len(held) > self._longest + 1:  # with its CR
            raise ChunkError("a line of the chunked coding is too long")

    def _line(self, raw: bytes) -> None:
        """Read one line with its end."""
        if raw[-2:] != b"\r\n":
            raise ChunkError("a line of the chunked coding does not end with CRLF")
        line = raw[:-2]
        if len(line) > self._longest:
            raise ChunkError("a line of the chunked coding is too long")
        if self._state is _State.DATA_END:
            self._state = _State.SIZE
        elif self._state is _State.SIZE:
            match = _SIZE_LINE.fullmatch(line)
            if match is None:
                raise ChunkError("a chunk size is not a number")
            self._left = int(match[1], 16)
            self._overhead = max(self._overhead + len(raw) + 2 - OVERHEAD_RATIO * self._left, -MAX_OVERHEAD)
            if self._overhead > 0:
                raise ChunkError(_TOO_MUCH)
            self._state = _State.DATA if self._left else _State.TRAILER
        elif not line:
            self._state = _State.DONE
        else:
            self._trailer_left -= len(raw)
            self._trailers_left -= 1
            if min(self._trailer_left, self._trailers_left) < 0 or _TRAILER_LINE.fullmatch(line) is None:
                raise ChunkError("the trailer section is broken or too long")


_TOO_MUCH = "the chunks are too small for what they carry"
