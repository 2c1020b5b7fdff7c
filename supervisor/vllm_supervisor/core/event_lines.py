"""Events of an event stream (`text/event-stream`), whole again however the bytes were cut.

Rules:
* Lines end with LF, CRLF or CR. An event ends with an empty line, and its `data:` lines are joined by LF (HTML standard,
  9.2.6). At the end of the stream an event without its empty line counts too: vLLM's clients take it.
* At most MAX_LINE bytes of an unfinished line are kept; a longer one is skipped to its end, unread. So is an event whose
  data is longer.
"""

MAX_LINE = 256 * 1024


def only_comments(data: bytes) -> bool:
    """Say whether a piece of an event stream is nothing but comments, which vLLM sends while its engine hangs."""
    return data.startswith(b":") and all(line.startswith(b":") for line in data.splitlines() if line)


class EventLines:
    """Base of the judges of event streams: a subclass reads `event_line` and `event_data`, or tells what is `usual`."""

    # What begins so stands here, once, not in every judge.
    _held_size = 0
    _skipping = False
    _inside = False  # the last bytes ended inside a line: some are held, or skipped
    _after_cr = False  # a LF that comes next belongs to the line before
    _begun = False  # an event has begun and is not ended
    _open = False  # any of these: what comes next cannot be read for itself
    _data_size = 0

    def __init__(self) -> None:
        """Begin at the beginning of a line."""
        self._held: list[bytes] = []
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the stream."""
        if data.endswith(b"\n\n") and not self._open and self.usual(data):
            return
        self._read(self._with_lf(data))
        self._open = self._inside or self._begun or self._after_cr

    def _read(self, data: bytes) -> None:
        self._inside = not data.endswith(b"\n") and (self._inside or bool(data))
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
            self._block(lines)
        if end < len(data):
            self._hold(data[end:])

    def end(self) -> None:
        """Read what the end of the stream leaves: a line or an event that is not ended."""
        if self._inside and not self._skipping:
            self._block(b"".join(self._held) + b"\n")
            self._held.clear()
        self._inside = False
        if self._begun:
            self._dispatch()

    def _with_lf(self, data: bytes) -> bytes:
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
        self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _hold(self, part: bytes) -> None:
        if self._skipping:
            return
        self._held.append(part)
        self._held_size += len(part)
        if self._held_size >= MAX_LINE:
            self._held.clear()
            self._held_size = 0
            self._skipping = True

    def _block(self, lines: bytes) -> None:
        """Read one or more complete lines, each with its end."""
        for line in lines.split(b"\n")[:-1]:
            if line.startswith(b"data:"):
                self._begun = True
                self._data_size += len(line)
                if self._data_size <= MAX_LINE:
                    self._data.append(line[5:].strip())
            elif line.startswith(b"event:"):
                self.event_line(line[6:].strip())
            elif not line and self._begun:
                self._dispatch()

    def _dispatch(self) -> None:
        data = self._data
        if self._data_size <= MAX_LINE:
            self.event_data(data[0] if len(data) == 1 else b"\n".join(data))
        data.clear()
        self._data_size = 0
        self._begun = False

    def usual(self, events: bytes) -> bool:  # noqa: ARG002
        """Whether whole events need not be read one by one, and neither does any part of them; takes what they tell."""
        return False

    def event_line(self, name: bytes) -> None:
        """Read the value of an `event:` line."""

    def event_data(self, payload: bytes) -> None:
        """Read the data of an event."""
