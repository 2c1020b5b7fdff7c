"""One status line at the bottom of a terminal, beside lines that others write to it.

Rules:
* Whoever writes to the terminal does it through `write`, which erases the status line first and draws it again after.
* All writing happens in the writers' threads: a stopped terminal (Ctrl-S) holds them up, never the one who calls `show`.
* While a line without an end stands there (the engine's own progress bar), no status line is drawn over it.
"""

import os
import threading

_ERASE = b"\r\x1b[K"
_COLUMNS = 80  # of a terminal that does not know its size: a serial console, or one that a tool made


def is_terminal(fd: int, term: str) -> bool:
    """Say whether a status line makes sense there: a terminal whose kind ($TERM) understands escape sequences."""
    return os.isatty(fd) and term not in ("", "dumb")


def controls_us() -> bool:
    """Say whether we have a controlling terminal, wherever our outputs go; the kernel then hangs us up when it ends."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class StatusLine:
    """The status line of the terminal behind `fd` (ours: stderr)."""

    def __init__(self, fd: int) -> None:
        """Begin without a line."""
        self._fd = fd
        self._text = ""
        self._drawn = ""
        self._midline = False
        self._lock = threading.Lock()  # held by writers only, while they write

    @property
    def width(self) -> int:
        """The columns a line may have without wrapping."""
        try:
            columns = os.get_terminal_size(self._fd).columns
        except OSError:
            columns = 0
        return max(1, (columns or _COLUMNS) - 1)

    def show(self, text: str) -> None:
        """Set the line ("" removes it). It is drawn by the next `write`, also of no bytes."""
        self._text = text

    def write(self, fd: int, data: bytes) -> int:
        """Write as os.write does, around the status line; `fd` must be the same terminal. Raises OSError."""
        with self._lock:
            text = self._text
            if self._drawn and (data or text != self._drawn):
                os.write(self._fd, _ERASE)
                self._drawn = ""
            written = os.write(fd, data) if data else 0
            if written:
                self._midline = not data[:written].endswith(b"\n")
            if text and not self._drawn and not self._midline and written == len(data):
                os.write(self._fd, text.encode("utf-8", "replace"))
                self._drawn = text
            return written
