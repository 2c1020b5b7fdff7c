"""Write to a descriptor that may block, break or be read by nobody, without anyone ever waiting for it.

Rules:
* `put` never blocks: beyond the limit lines are dropped and counted, and the count is told in one line when it flows again.
* One daemon thread writes; the descriptor's flags stay as they are (its open file may be shared with a shell).
* An error of the descriptor (EPIPE, EIO, ENOSPC, EBADF …) costs a pause, then the rest is tried again; it ends nothing.
* `close` is bounded: what nobody takes in time is left.
"""

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterable

_BATCH = 64 * 1024  # bytes a write


class Output:
    """A bounded queue of byte lines in front of one descriptor."""

    def __init__(
        self, fd: int, *, write: Callable[[int, bytes], int] = os.write, limit: int = 1 << 20, pause_s: float = 1.0
    ) -> None:
        """Write to `fd` by `write` (as os.write: may block, may raise OSError); hold at most `limit` bytes."""
        self._fd = fd
        self._write = write
        self._limit = limit
        self._pause_s = pause_s
        self._queue: deque[bytes] = deque()
        self._queued = 0
        self._dropped = 0
        self._untold = 0
        self._midline = False
        self._closed = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"output-{fd}", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """How many lines found no room so far."""
        return self._dropped

    def put(self, lines: Iterable[bytes]) -> None:
        """Queue lines, each with its own end; an empty one only calls `write` (a status line redraws)."""
        with self._change:
            for line in lines:
                # Once full, it takes lines again at half: one notice for a gap, not one for each line that fits.
                room = (self._limit // 2 if self._untold else self._limit) - self._queued
                if self._closed or len(line) > room:
                    self._dropped += 1
                    self._untold += 1
                    continue
                if self._untold and line:
                    self._append(self._notice())
                self._append(line)
            self._change.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Take nothing more and wait for what is queued, at most `timeout_s`; True if nothing was left behind."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and not self._queue

    def _append(self, line: bytes) -> None:
        self._queue.append(line)
        self._queued += len(line)
        if line:
            self._midline = not line.endswith(b"\n")

    def _notice(self) -> bytes:
        told, self._untold = self._untold, 0
        return b"%svllm-supervisor: %d lines were dropped here because nobody took them\n" % (
            b"\n" if self._midline else b"",
            told,
        )

    def _take(self) -> bytes | None:
        """Wait for lines and return a batch, or None at the end."""
        with self._change:
            self._change.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                return None
            lines = [self._queue.popleft()]
            size = len(lines[0])
            while self._queue and size + len(self._queue[0]) <= _BATCH:
                lines.append(self._queue.popleft())
                size += len(lines[-1])
            self._queued -= size
        return b"".join(lines)

    def _run(self) -> None:
        while (batch := self._take()) is not None:
            view = batch
            while True:
                try:
                    view = view[self._write(self._fd, view) :]
                except BlockingIOError:
                    select.select((), (self._fd,), (), self._pause_s)
                except OSError:
                    with self._change:
                        self._change.wait_for(lambda: self._closed, self._pause_s)
                        if self._closed:
                            self._queue.append(view)  # left behind: nobody will take it
                            return
                if not view:
                    break


def fill_standard_descriptors() -> None:
    """Open /dev/null where 0, 1 or 2 is closed, so that no file of ours comes to lie where output is written."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
