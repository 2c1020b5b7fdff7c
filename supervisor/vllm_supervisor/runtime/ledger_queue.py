"""Lines on their way into the ledger: what one write takes, and what is kept because the disk refused it.

Rules:
* What a disk refuses is kept in order and goes before all later lines, so that no account is torn while there is room.
* No locks and no I/O in here; the writer sees to both.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import trio

_JOINED = 64 * 1024  # bytes: batches that are kept are joined up to this, so that there are few

Told = Callable[[bool], None]


class Turn:
    """The lines of one turn of the loop, for one write. `told` are those who wait to hear of their acceptances."""

    def __init__(self) -> None:
        """Begin with none."""
        self._data: list[bytes] = []
        self._opens: list[str] = []
        self._settles: list[str] = []
        # Data that is no acceptance, its lines, and the id that the last of them settles.
        self._ends: list[tuple[bytes, int, str]] = []
        self.told: list[Told] = []
        self.lines = 0

    def accept(self, line: bytes, opens: str, told: Told) -> None:
        """Take the line that opens an account."""
        self._data.append(line)
        self._opens.append(opens)
        self.told.append(told)
        self.lines += 1

    def append(self, data: bytes, lines: int, settles: str) -> None:
        """Take `lines` lines, the last of which may settle an account."""
        self._data.append(data)
        self._ends.append((data, lines, settles))
        if settles:
            self._settles.append(settles)
        self.lines += lines

    @property
    def data(self) -> bytes:
        """All lines, in order."""
        return b"".join(self._data)

    def settle(self, homes: dict[str, int], segment: int) -> None:
        """Enter into `homes` as `Batch.settle` does."""
        homes.update(dict.fromkeys(self._opens, segment))
        for request_id in self._settles:
            homes.pop(request_id, None)

    def apart(self) -> Iterator[tuple[bytes, str]]:
        """List each line that is no acceptance, and the id it settles."""
        for data, lines, settles in self._ends:
            for position, line in enumerate(data.splitlines(keepends=True), 1):
                yield line, settles if position == lines else ""


@dataclass(slots=True)
class Batch:
    """Lines for one write(2). `written` is set once it is known whether they are in the file, or `refused` so far."""

    lines: list[bytes] = field(default_factory=list)
    holds: list[tuple[str, bool]] = field(default_factory=list)  # (id, opens it or settles it), in order
    size: int = 0
    written: trio.Event | None = None
    refused: bool = False

    def awaited(self) -> trio.Event:
        """Return `written`, which is there only if somebody waits."""
        if self.written is None:
            self.written = trio.Event()
        return self.written

    def settle(self, homes: dict[str, int], segment: int) -> None:
        """Enter into `homes` (id -> segment) what these lines open, now that they are in `segment`; take out the rest."""
        for request_id, opens in self.holds:
            if opens:
                homes[request_id] = segment
            else:
                homes.pop(request_id, None)


class Waiting:
    """The batches that are not in the file yet, the oldest first. `size` in bytes."""

    def __init__(self) -> None:
        """Begin with none."""
        self._batches: deque[Batch] = deque()
        self.size = 0

    def __bool__(self) -> bool:
        """Say whether anything waits."""
        return bool(self._batches)

    def add(self, batch: Batch) -> None:
        """Put `batch` behind the others; its lines may be joined to the last one's."""
        self.size += batch.size
        if self._batches and self._batches[-1].size + batch.size <= _JOINED:
            last = self._batches[-1]
            last.lines += batch.lines
            last.holds += batch.holds
            last.size += batch.size
        else:
            self._batches.append(batch)

    @property
    def first(self) -> Batch:
        """The oldest batch. Raises IndexError if none waits."""
        return self._batches[0]

    def done(self) -> None:
        """Take the oldest batch out."""
        self.size -= self._batches.popleft().size

    def give_up(self) -> int:
        """Let all go; return how many lines they had."""
        lines = sum(len(batch.lines) for batch in self._batches)
        self._batches.clear()
        self.size = 0
        return lines
