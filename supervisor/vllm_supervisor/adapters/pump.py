"""Read what the engine prints, all the time and whatever becomes of our own output.

Rules:
* Reading waits for nothing but the pipes: `forward` and `on_line` are plain calls that return at once.
* Bytes are forwarded unchanged, line by line; a line without an end is handed on once the engine pauses.
* The end is the end of both pipes. Processes that outlive the main one hold the pipes open, so after its death
  `drain_then_close` bounds the wait.
"""

import os
from collections.abc import Callable, Sequence

import trio

from vllm_supervisor.core.lines import LineSplitter, text

_CHUNK = 64 * 1024  # bytes a read
_LAST_CHUNKS = 32  # reads of what is left in a pipe when it is closed: twice what it can hold
_PAUSE_S = 0.2  # after which a line without an end is shown as it is


class Pump:
    """The engine's stdout and stderr; owns and closes both descriptors, which must be non-blocking."""

    def __init__(
        self,
        stdout: int,
        stderr: int,
        *,
        forward: Callable[[Sequence[bytes]], None],
        on_line: Callable[[str], None],
    ) -> None:
        """`forward` gets pieces of bytes to pass on, `on_line` each piece as text without its end, if any is left."""
        self._fds = (stdout, stderr)
        self._forward = forward
        self._on_line = on_line
        self._stop = trio.CancelScope()
        self._done = trio.Event()

    async def run(self) -> None:
        """Pump until both pipes have ended or `drain_then_close` gave up on them."""
        try:
            with self._stop:
                async with trio.open_nursery() as nursery:
                    for fd in self._fds:
                        nursery.start_soon(self._read, fd)
        finally:
            self._done.set()

    async def drain_then_close(self, timeout_s: float) -> None:
        """Wait for the end of both pipes, at most `timeout_s`; then take what is in them and close."""
        with trio.move_on_after(timeout_s):
            await self._done.wait()
        self._stop.cancel()
        await self._done.wait()

    async def _read(self, fd: int) -> None:
        lines = LineSplitter()
        try:
            while True:
                with trio.move_on_after(_PAUSE_S if lines.pending else float("inf")) as pause:
                    await trio.lowlevel.wait_readable(fd)
                if pause.cancelled_caught:
                    self._hand_on(lines.flush())
                elif not self._take(fd, lines):
                    return
        finally:
            for _ in range(_LAST_CHUNKS):
                if not self._take(fd, lines):
                    break
            self._hand_on(lines.flush())
            os.close(fd)

    def _take(self, fd: int, lines: LineSplitter) -> bool:
        """Read once and hand on what it completes; False at the end or when there is nothing."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        self._hand_on(lines.feed(data))
        return bool(data)

    def _hand_on(self, pieces: Sequence[bytes]) -> None:
        if not pieces:
            return
        self._forward(pieces)
        for piece in pieces:
            line = text(piece)
            if line:
                self._on_line(line)
