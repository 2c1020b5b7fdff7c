"""Lines of an event stream (`text/event-stream`), whole again however the bytes were cut.

Rules:
* Lines end with LF or CRLF; a lone CR is not taken as an end (no engine sends one).
* At most MAX_LINE bytes of an unfinished line are kept; a longer one is skipped to its end, unread.
"""

MAX_LINE = 256 * 1024


def only_comments(data: bytes) -> bool:
    """Say whether a piece of an event stream is nothing but comments, which vLLM sends while its engine hangs."""
    return data.startswith(b":") and all(line.startswith(b":") for line in data.splitlines() if line)


class EventLines:
    """Base of the judges of event streams; a subclass reads `event_line` and `data_line`, or a whole `block`."""

    def __init__(self) -> None:
        """Begin at the beginning of a line."""
        self._held: list[bytes] = []
        self._held_size = 0
        self._skipping = False
        self._inside = False  # the last bytes ended inside a line: some are held, or skipped

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the stream."""
        if data.endswith(b"\n"):
            if not self._inside and len(data) <= MAX_LINE:
                self.block(data)  # whole lines, as they usually come
                return
            self._inside = False
        else:
            self._inside = True
        end = data.rfind(b"\n") + 1
        if end == 0:
            self._hold(data)
            return
        lines = data[:end]
        if self._skipping:
            self._skipping = False
            lines = lines[lines.index(b"\n") + 1 :]
        elif self._held:
            self._held.append(lines)
            lines = b"".join(self._held)
            self._held.clear()
            self._held_size = 0
        if len(lines) > MAX_LINE:
            lines = b"".join(line for line in lines.splitlines(keepends=True) if len(line) <= MAX_LINE)
        if lines:
            self.block(lines)
        if end < len(data):
            self._hold(data[end:])

    def _hold(self, part: bytes) -> None:
        if self._skipping:
            return
        self._held.append(part)
        self._held_size += len(part)
        if self._held_size >= MAX_LINE:
            self._held.clear()
            self._held_size = 0
            self._skipping = True

    def block(self, lines: bytes) -> None:
        """Read one or more complete lines, each with its end."""
        for line in lines.split(b"\n"):
            if line.startswith(b"data:"):
                self.data_line(line[5:].strip())
            elif line.startswith(b"event:"):
                self.event_line(line[6:].strip())

    def event_line(self, name: bytes) -> None:
        """Read the value of an `event:` line."""

    def data_line(self, payload: bytes) -> None:
        """Read the value of a `data:` line."""
