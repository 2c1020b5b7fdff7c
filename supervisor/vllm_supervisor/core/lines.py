"""Cut a stream of bytes into lines, at every newline and carriage return, without changing a byte.

Rules:
* The pieces joined are the input: each ends with its own newline, carriage return or both, or is cut at the limit.
* Carriage returns end a line too, so that a progress bar is seen while it moves.
"""

LIMIT = 16 * 1024  # bytes of one piece; longer lines come in several


class LineSplitter:
    """Holds what has no end yet, at most LIMIT bytes."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._rest = b""

    @property
    def pending(self) -> bool:
        """True while bytes without a line end are held."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes, return the pieces they complete."""
        pieces: list[bytes] = []
        # splitlines would also cut at form feeds and other separators in text; on bytes it knows \n, \r and \r\n alone.
        for piece in (self._rest + data).splitlines(keepends=True):
            while len(piece) > LIMIT:
                pieces.append(piece[:LIMIT])
                piece = piece[LIMIT:]  # noqa: PLW2901 - the rest of the same line
            pieces.append(piece)
        self._rest = b"" if not pieces or pieces[-1].endswith((b"\n", b"\r")) else pieces.pop()
        return pieces

    def flush(self) -> list[bytes]:
        """Return what is held, as it is."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


def text(piece: bytes) -> str:
    """Return a piece as text for people and patterns: without its end, undecodable bytes replaced."""
    return piece.rstrip(b"\r\n").decode("utf-8", "replace")
