"""Reads ledger segments line by line, also while they are being written, in memory that does not grow with them.

Rules:
* The unfinished last line of the newest segment is not there yet: its writer may be in the middle of it. Nor are zero
  bytes at its end, as a file system leaves them after power loss.
* Whatever else is no line, or no file of ours (a link, a pipe, a directory), is yielded with the reason, for the caller
  to count. Nothing is followed, nothing waits, and a line of any length is read in pieces, once.
* Segments that are pruned between the listing and their turn are passed over.
"""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from vllm_supervisor.core.accounts import Fold
from vllm_supervisor.core.ledger import segment_name, segment_number
from vllm_supervisor.core.ledger_parser import LONGEST_LINE, TOO_LONG, Record, parse, read_line

_BUFFER = 256 * 1024  # bytes read at once
_TAIL = 16 * 1024  # the last lines of a run are in it


class Position(NamedTuple):
    """A place between two lines: `size` bytes into a segment."""

    segment: int
    size: int


class Line(NamedTuple):
    """One line: where it stands (`number` from 1), its bytes and its record; or, without a record, what is wrong.

    `number` 0 means the whole segment, and `problem` "" then that it was pruned meanwhile.
    """

    segment: int
    number: int
    data: bytes
    record: Record | None
    problem: str = ""


def segments(directory: Path) -> list[int]:
    """List the numbers of the segments, oldest first; none if there is no such directory. Raises OSError."""
    try:
        return sorted(number for path in directory.iterdir() if (number := segment_number(path.name)))
    except (FileNotFoundError, NotADirectoryError):
        return []


def read(directory: Path, first: int = 0, until: Position | None = None) -> Iterator[Line]:
    """Yield every line from segment `first` on, up to `until`. Raises OSError if the directory cannot be listed."""
    numbers = [number for number in segments(directory) if number >= first and (not until or number <= until.segment)]
    for number in numbers:
        newest = number == numbers[-1]
        limit = until.size if until and number == until.segment else None
        if newest and limit == 0:
            continue
        at = 0
        try:
            with _open(directory / segment_name(number)) as file:
                for at, data, problem in _lines(file, limit, newest=newest):
                    found = problem or read_line(data)
                    if isinstance(found, str):
                        yield Line(number, at, data, None, found)
                    else:
                        yield Line(number, at, data, found)
            if not at and not newest:
                yield Line(number, 0, b"", None, "it is empty")
        except FileNotFoundError:
            pruned = not any(other < number for other in segments(directory))
            yield Line(number, 0, b"", None, "" if pruned else "it is gone")
        except OSError as error:
            reason = _why(error)
            yield Line(number, 0, b"", None, f"{reason}, behind line {at}" if at else reason)


def records(directory: Path) -> Iterator[Record]:
    """Yield what can be read. Raises OSError if the directory cannot be listed."""
    for line in read(directory):
        if line.record is not None:
            yield line.record


def fold(directory: Path, *, first: int = 0, until: Position | None = None, since: str = "") -> Fold:
    """Fold a ledger from segment `first` on; `since` is an `at` stamp (see core.accounts). Raises OSError."""
    accounts = Fold(since)
    current = 0
    for number, at, _data, record, problem in read(directory, first, until):
        if not at and not problem:
            accounts.pruned(number)
            continue
        if number != current:
            accounts.segment(number)
            current = number
        if record is not None:
            problem = accounts.add(record)  # noqa: PLW2901 - the same: what is wrong with this line
        if not at:
            accounts.unreadable_segment(number, problem)
        elif problem:
            accounts.unreadable_line(number, at, problem)
    accounts.end()
    return accounts


def first_needed(directory: Path, until: Position | None = None) -> int:
    """Find the segment from which on a fold knows every run whose account is not closed; 0 for an empty ledger.

    Each further segment begins with a line that names it, and the newest such line counts. A ledger that ends with a
    balance behind which nothing is unsettled needs none: the number after the newest. `until` is where to look from.
    """
    numbers = [number for number in segments(directory) if not until or number <= until.segment]
    if until and numbers[-1:] == [until.segment] and not until.size:
        numbers.pop()
    if not numbers:
        return 0
    newest = numbers[-1]
    last = _last_record(directory / segment_name(newest), until.size if until and until.segment == newest else None)
    if last is not None and last["event"] == "balance" and last.get("settled") is True:
        return newest + 1
    for number in reversed(numbers):
        try:
            with _open(directory / segment_name(number)) as file:
                head = parse(file.readline(LONGEST_LINE))
        except OSError:
            continue
        if head is not None and head["event"] == "segment" and "read_from" in head:
            return min(int(head["read_from"]), number)
    return numbers[0]


def _last_record(path: Path, size: int | None) -> Record | None:
    """Read the last whole line of a segment's first `size` bytes (None: all); None if it is none of ours."""
    try:
        with _open(path) as file:
            end = file.seek(0, os.SEEK_END) if size is None else size
            begin = file.seek(max(0, end - _TAIL))
            lines = file.read(end - begin).split(b"\n")
    except OSError:
        return None
    return parse(lines[-2]) if len(lines) > 1 else None


def _open(path: Path) -> IO[bytes]:
    """Open a segment. Raises OSError, also where it is no regular file; nothing is followed and nothing waits."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file")
    return os.fdopen(fd, "rb", buffering=_BUFFER)


def _why(error: OSError) -> str:
    return "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror or str(error)


def _lines(file: IO[bytes], limit: int | None, *, newest: bool) -> Iterator[tuple[int, bytes, str]]:
    """Yield (number, line, what is wrong with its length) of a segment's first `limit` bytes."""
    number = done = 0
    while (limit is None or done < limit) and (line := file.readline(LONGEST_LINE + 1)):
        number += 1
        done += len(line)
        problem = ""
        whole, zeros = line.endswith(b"\n"), False
        if not whole and len(line) > LONGEST_LINE:  # read on to its end, and keep nothing of it
            problem, zeros = TOO_LONG, line.endswith(b"\0")
            while not whole and (more := file.readline(LONGEST_LINE)):
                done += len(more)
                whole, zeros = more.endswith(b"\n"), zeros and not more.strip(b"\0")
            line = b""
        if newest and not whole and (zeros or not problem):
            return
        yield number, line, problem
