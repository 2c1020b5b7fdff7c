"""A status line that never spoils the lines beside it."""

import os
import pty
import struct
import termios
from collections.abc import Iterator
from fcntl import ioctl

import pytest

from vllm_supervisor.adapters.output import Output
from vllm_supervisor.adapters.terminal import StatusLine, is_terminal


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Open a pseudo-terminal of 40 columns that changes no byte."""
    ours, theirs = pty.openpty()
    mode = termios.tcgetattr(theirs)
    mode[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, mode)
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 40, 0, 0))
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def shown(data: bytes) -> list[str]:
    """Return the rows of a screen that took `data`: only what the status line uses is understood."""
    rows = [""]
    for part in data.decode().replace("\r\x1b[K", "\f"):
        if part == "\f":
            rows[-1] = ""
        elif part == "\n":
            rows.append("")
        else:
            rows[-1] += part
    return rows


def take(fd: int, count: int) -> bytes:
    """Read exactly so many bytes."""
    data = b""
    while len(data) < count:
        data += os.read(fd, count - len(data))
    return data


def test_lines_stand_above_the_status_line(terminal: tuple[int, int]) -> None:
    """Each line stays whole, and the status line stands below the last."""
    ours, theirs = terminal
    status = StatusLine(theirs)
    status.show("starting 0:01")
    assert status.write(theirs, b"") == 0
    assert status.write(theirs, b"one\n") == 4
    status.show("starting 0:02")
    assert status.write(theirs, b"two\nthree\n") == 10
    status.show("")
    assert status.write(theirs, b"") == 0
    status.write(theirs, b"end\n")
    data = b""
    while not data.endswith(b"end\n"):
        data += os.read(ours, 1000)
    assert shown(data) == ["one", "two", "three", "end", ""]
    assert data.index(b"starting 0:01") < data.index(b"one") < data.index(b"starting 0:02", data.index(b"three"))


def test_a_line_without_end_is_left_alone(terminal: tuple[int, int]) -> None:
    """While the engine draws a progress bar no status line is drawn over it."""
    ours, theirs = terminal
    status = StatusLine(theirs)
    status.write(theirs, b"\rLoading 50%")
    status.show("starting")
    status.write(theirs, b"")
    status.write(theirs, b"\rLoading 100%\n")
    expected = b"\rLoading 50%\rLoading 100%\nstarting"
    assert take(ours, len(expected)) == expected


def test_an_unchanged_line_is_not_drawn_again(terminal: tuple[int, int]) -> None:
    """Showing the same text twice writes nothing."""
    ours, theirs = terminal
    status = StatusLine(theirs)
    for _ in range(3):
        status.show("same")
        status.write(theirs, b"")
    status.write(theirs, b"x\n")
    expected = b"same\r\x1b[Kx\nsame"
    assert take(ours, len(expected)) == expected


def test_the_width_is_the_terminals(terminal: tuple[int, int]) -> None:
    """One column stays free, so that no terminal wraps; without a terminal, or without a size, 79 are assumed."""
    assert StatusLine(terminal[1]).width == 39
    ioctl(terminal[1], termios.TIOCSWINSZ, struct.pack("4H", 0, 0, 0, 0))
    assert StatusLine(terminal[1]).width == 79
    read, write = os.pipe()
    assert StatusLine(write).width == 79
    assert is_terminal(terminal[1], "xterm")
    assert not is_terminal(terminal[1], "dumb")
    assert not is_terminal(write, "xterm")
    os.close(read)
    os.close(write)


def test_two_outputs_share_a_terminal(terminal: tuple[int, int]) -> None:
    """The writers of stdout and stderr take turns, and a status line set by a third is drawn by them."""
    ours, theirs = terminal
    status = StatusLine(theirs)
    second = os.dup(theirs)
    out, err = Output(theirs, write=status.write), Output(second, write=status.write)
    status.show("busy")
    for number in range(100):
        out.put([b"out %d\n" % number])
        err.put([b"err %d\n" % number])
    data = b""
    while data.count(b"\n") < 200:
        data += os.read(ours, 4096)
    assert out.close(10)
    assert err.close(10)
    data += os.read(ours, 4096) if not data.endswith(b"busy") else b""
    rows = shown(data)
    assert sorted(rows[:-1]) == sorted([f"out {n}" for n in range(100)] + [f"err {n}" for n in range(100)])
    assert rows[-1] == "busy"
    os.close(second)
