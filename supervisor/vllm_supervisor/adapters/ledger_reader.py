"""Reads ledger segments line by line, also while they are being written, in memory that does not grow with them.

Rules:
* The unfinished last line of the newest segment is not there yet: its writer may be in the middle of it.
* Any other line that is no whole record is yielded as None, so that the caller counts it.
* A segment that is pruned between the listing and its turn is passed over.
"""

from collections.abc import Iterator
from pathlib import Path

from vllm_supervisor.core.accounts import Fold
from vllm_supervisor.core.ledger import Record, parse, segment_name, segment_number

_BUFFER = 1 << 20  # bytes read at once
_TAIL = 16 * 1024  # the last lines of a run are in it
_LONGEST_LINE = 1 << 20  # more without a newline is garbage, read in pieces


def segments(directory: Path) -> list[int]:
    """List the numbers of the segments, oldest first; none if there is no such directory."""
    try:
        return sorted(number for path in directory.iterdir() if (number := segment_number(path.name)))
    except (FileNotFoundError, NotADirectoryError):
        return []


def records(directory: Path, first: int = 0) -> Iterator[tuple[int, bytes, Record | None]]:
    """Yield (segment, line, record) for each line, from segment `first` on. Raises OSError."""
    numbers = [number for number in segments(directory) if number >= first]
    for number in numbers:
        try:
            file = (directory / segment_name(number)).open("rb", buffering=_BUFFER)
        except FileNotFoundError:
            continue
        with file:
            while line := file.readline(_LONGEST_LINE):
                if number == numbers[-1] and not line.endswith(b"\n"):
                    break
                yield number, line, parse(line)


def fold(directory: Path, *, first: int = 0, since: str = "") -> Fold:
    """Fold a ledger from segment `first` on; `since` is an `at` stamp (see core.accounts). Raises OSError."""
    accounts = Fold(since)
    current = 0
    for number, _line, record in records(directory, first):
        if number != current:
            accounts.segment(number)
            current = number
        accounts.add(record)
    return accounts


def last_record(directory: Path, number: int, me: str) -> Record | None:
    """Read the last whole line of a segment that the run `me` has not written; None if it is not near the end."""
    try:
        with (directory / segment_name(number)).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        record = parse(line)
        if record is None or record["run"] != me:
            return record
    return None


def first_needed(directory: Path, me: str = "") -> int:
    """Find the segment from which on a fold knows every id that is still open; 0 for an empty ledger.

    Each further segment begins with a line that names it; only the newest such line counts. A ledger that ends with a
    balance after which nothing is unsettled needs none: the number after the newest. What the run `me` has written since does not count.
    """
    numbers = segments(directory)
    last = last_record(directory, numbers[-1], me) if numbers else None
    if last is not None and last["event"] == "balance" and last.get("settled") is True:
        return numbers[-1] + 1
    for number in reversed(numbers):
        try:
            with (directory / segment_name(number)).open("rb") as file:
                head = parse(file.readline(_LONGEST_LINE))
        except FileNotFoundError:
            continue
        if head is not None and head["event"] == "segment" and isinstance(head.get("oldest_needed"), int):
            return min(int(head["oldest_needed"]), number)
    return numbers[0] if numbers else 0
