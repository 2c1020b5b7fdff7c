"""Our own output: nobody waits for it, nothing breaks on it."""

import errno
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from vllm_supervisor.adapters.output import Output

LIMIT_S = 20.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Make a pipe and close what is left of it."""
    ends = os.pipe()
    yield ends
    for fd in ends:
        with suppress(OSError):  # closed by the test
            os.close(fd)


def read_until(fd: int, end: bytes) -> bytes:
    """Read until the data ends with `end`."""
    data = b""
    while not data.endswith(end):
        more = os.read(fd, 1 << 16)
        assert more
        data += more
    return data


class Script:
    """A `write` that fails as told, then writes; it says when it was called."""

    def __init__(self, *errors: int) -> None:
        """Fail with each errno of `errors` in turn, then take everything."""
        self.errors = list(errors)
        self.data = b""
        self.arrived = threading.Event()
        self.go = threading.Event()
        self.go.set()

    def __call__(self, _fd: int, data: bytes) -> int:
        """Behave as os.write; take at most five bytes at a time."""
        self.arrived.set()
        assert self.go.wait(LIMIT_S)
        if self.errors:
            code = self.errors.pop(0)
            raise OSError(code, os.strerror(code))
        self.data += data[:5]
        return len(data[:5])


def test_lines_pass_unchanged(pipe: tuple[int, int]) -> None:
    """Bytes come out as they went in, in order."""
    out = Output(pipe[1])
    out.put([b"one\n", b"\xff two\r"])
    out.put([b"three\n"])
    assert read_until(pipe[0], b"three\n") == b"one\n\xff two\rthree\n"
    assert out.close(LIMIT_S)


def test_nobody_reads_and_nobody_waits(pipe: tuple[int, int]) -> None:
    """With a full pipe lines are dropped, and once it flows again one line tells how many."""
    line = b"x" * 999 + b"\n"
    out = Output(pipe[1], limit=100 * len(line))
    for _ in range(1000):
        out.put([line])
    assert out.dropped > 500
    data = b""
    while len(data.splitlines()) < 1000 - out.dropped:
        data += os.read(pipe[0], 1 << 16)
    out.put([b"after\n"])
    data += read_until(pipe[0], b"after\n")
    told = [row for row in data.splitlines(keepends=True) if row not in (line, b"after\n")]
    assert sum(int(row.split()[1]) for row in told) == out.dropped == 1000 - data.count(line)
    assert all(row.endswith(b" lines were dropped here because nobody took them\n") for row in told)
    assert len(told) < 5
    assert out.close(LIMIT_S)


def test_the_notice_never_sticks_to_a_cut_line() -> None:
    """After a line without an end the notice stands on its own line."""
    write = Script()
    write.go.clear()
    out = Output(1, write=write, limit=20)
    out.put([b"0"])
    assert write.arrived.wait(LIMIT_S)
    out.put([b"half a line", b"no room for this\n"])
    write.go.set()
    assert _eventually(out, write, b"half a line")
    out.put([b"next\n"])
    assert out.close(LIMIT_S)
    assert write.data == b"0half a line\nvllm-supervisor: 1 lines were dropped here because nobody took them\nnext\n"


def _eventually(out: Output, write: Script, end: bytes) -> bool:
    """Wait until the writer has written `end`: it takes the next batch only after that."""
    for _ in range(int(LIMIT_S / 0.01)):
        if write.data.endswith(end):
            return True
        threading.Event().wait(0.01)
    return False


def test_once_full_it_takes_lines_again_at_half() -> None:
    """A reader that is a little too slow gets whole stretches with one notice each, not a notice a line."""
    permits = threading.Semaphore(0)
    began: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def write(_fd: int, data: bytes) -> int:
        began.put(data)
        assert permits.acquire(timeout=LIMIT_S)
        return len(data)

    line = b"x" * 65535 + b"\n"  # a batch each
    out = Output(1, write=write, limit=4 * len(line))
    out.put([line])
    began.get(timeout=LIMIT_S)  # the first is with the writer
    out.put([line] * 5)
    assert out.dropped == 1
    for queued in (3, 2):
        permits.release()
        began.get(timeout=LIMIT_S)
        out.put([line])
        assert out.dropped == 1 + 4 - queued
    permits.release()
    began.get(timeout=LIMIT_S)
    out.put([b"again\n"])
    assert out.dropped == 3
    permits.release(3)
    assert out.close(LIMIT_S)
    rest = b"".join(began.get(timeout=LIMIT_S) for _ in range(2))
    assert rest == line + b"vllm-supervisor: 3 lines were dropped here because nobody took them\nagain\n"


@pytest.mark.parametrize("code", [errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EBADF, errno.EINVAL])
def test_an_error_is_survived_without_a_byte_lost(code: int) -> None:
    """Whatever the descriptor says, the rest is tried again after a pause."""
    write = Script(code, code)
    out = Output(1, write=write, pause_s=0.01)
    out.put([b"hello ", b"world\n"])
    assert _eventually(out, write, b"hello world\n")
    assert out.close(LIMIT_S)


def test_a_closed_reader_ends_nothing(pipe: tuple[int, int]) -> None:
    """With the reader gone, lines are taken, kept within the limit, and the end is bounded."""
    os.close(pipe[0])
    out = Output(pipe[1], limit=10_000, pause_s=0.01)
    for _ in range(100):
        out.put([b"y" * 999 + b"\n"])
    assert out.dropped >= 80
    assert not out.close(LIMIT_S)


def test_a_full_nonblocking_descriptor_is_waited_for(pipe: tuple[int, int]) -> None:
    """After EAGAIN the rest goes out as soon as there is room, without the pause of an error."""
    write = Script(errno.EAGAIN, errno.EAGAIN)
    out = Output(pipe[1], write=write, pause_s=3600)
    out.put([b"hello world\n"])
    assert _eventually(out, write, b"hello world\n")
    assert out.close(LIMIT_S)


def test_the_end_does_not_wait_for_a_stuck_reader(pipe: tuple[int, int]) -> None:
    """Closing gives up after its bound when nobody reads."""
    out = Output(pipe[1])
    out.put([b"x" * 9999 + b"\n"] * 50)
    assert not out.close(0.05)
    out.put([b"late\n"])
    assert out.dropped == 1
