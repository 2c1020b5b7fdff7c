"""Segments on a real directory: how an end is mended, and what a reader makes of files that change under it."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.hostile_ledger import GOOD
from vllm_supervisor.adapters import ledger_reader
from vllm_supervisor.adapters.ledger_file import FileOps, LedgerFile
from vllm_supervisor.adapters.ledger_reader import Position
from vllm_supervisor.core.ledger import segment_name

MANY = 40 * 1024 * 1024


class CountingOps(FileOps):
    """Counts the bytes that are read."""

    read = 0

    def read_at(self, fd: int, size: int, offset: int) -> bytes:  # type: ignore[override]
        """Read, and count."""
        self.read += size
        return os.pread(fd, size, offset)


@pytest.mark.parametrize(
    ("tail", "kept", "told"),
    [
        (b"", b"", []),
        (GOOD[:-1], GOOD, []),
        (GOOD[:70], b"", []),
        (b"[" * 100_000, b"", []),
        (bytes(5000), b"", []),
        (bytes(MANY), b"", []),
        (GOOD[:70] + bytes(MANY), b"", []),
        (GOOD[:-1] + bytes(5000), GOOD, []),
        (b"\n" + bytes(MANY), b"\n", ["segment 1 line 2 is unreadable: it is empty"]),
        (
            b"x" * 3_000_000 + bytes(MANY),
            b"x" * 3_000_000 + b"\n",
            ["segment 1 line 2 is unreadable: it is longer than 1 MiB"],
        ),
    ],
    ids=[
        "none",
        "no newline",
        "half",
        "brackets",
        "zeros",
        "many zeros",
        "half, zeros",
        "whole, zeros",
        "empty",
        "long",
    ],
)
def test_an_end_is_mended_in_linear_time(tmp_path: Path, tail: bytes, kept: bytes, told: list[str]) -> None:
    """What nobody was told of goes; what is longer than any line of ours is kept and told; each byte is read once."""
    path = tmp_path / segment_name(1)
    path.write_bytes(GOOD + tail)
    before = ledger_reader.fold(tmp_path)
    assert (before.damage, before.runs["run1"].accepted) == (told, 1)
    ops = CountingOps()
    file = LedgerFile(tmp_path, 1 << 30, ops=ops)
    assert file.ready()
    assert ops.read <= len(tail) + (1 << 20) + 200_000
    assert path.read_bytes() == GOOD + kept
    assert file.size == len(GOOD + kept)
    assert ledger_reader.fold(tmp_path).damage == told
    file.close()


def lines(directory: Path, *numbers: int) -> None:
    """Write segments of two lines each."""
    for number in numbers:
        (directory / segment_name(number)).write_bytes(GOOD.replace(b"accepted", b"weather") * 2)


def test_segments_that_are_pruned_while_they_are_read_are_no_damage(tmp_path: Path) -> None:
    """All that stood before them went too; one that went alone is damage."""
    lines(tmp_path, 1, 2, 3, 4, 5)
    reading = ledger_reader.read(tmp_path)
    assert next(reading).segment == 1
    for number in (1, 2, 3):
        (tmp_path / segment_name(number)).unlink()
    rest = [(line.segment, line.number, line.problem) for line in reading]
    assert rest == [(1, 2, ""), (2, 0, ""), (3, 0, ""), (4, 1, ""), (4, 2, ""), (5, 1, ""), (5, 2, "")]

    lines(tmp_path, 1, 2, 3)
    reading = ledger_reader.read(tmp_path)
    next(reading)
    (tmp_path / segment_name(3)).unlink()
    assert (3, 0, "it is gone") in [(line.segment, line.number, line.problem) for line in reading]


def test_a_pruned_segment_leaves_runs_partial_and_the_ledger_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is called missing that was removed in order."""
    lines(tmp_path, 1, 2, 3, 4)
    listed = ledger_reader.segments(tmp_path)
    for number in (1, 2):
        (tmp_path / segment_name(number)).unlink()
    answers: Iterator[list[int]] = iter([listed, [3, 4], [3, 4]])
    monkeypatch.setattr(ledger_reader, "segments", lambda _directory: next(answers))
    fold = ledger_reader.fold(tmp_path)
    assert (fold.damage, fold.runs["run1"].partial) == ([], True)


def test_a_disk_that_fails_in_the_middle_is_told_with_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read before it counts, and the next segment is read."""
    lines(tmp_path, 1, 2)
    whole = ledger_reader._lines
    broken = [True]

    def failing(*arguments: object, newest: bool) -> Iterator[tuple[int, bytes, str]]:
        for line in whole(*arguments, newest=newest):  # type: ignore[arg-type]
            yield line
            if broken.pop() if broken else False:
                raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(ledger_reader, "_lines", failing)
    found = [(line.segment, line.number, line.problem) for line in ledger_reader.read(tmp_path)]
    assert found == [(1, 1, ""), (1, 0, "Input/output error, behind line 1"), (2, 1, ""), (2, 2, "")]


def test_nothing_behind_a_place_is_read(tmp_path: Path) -> None:
    """Neither lines nor segments: they are of the run that reads."""
    lines(tmp_path, 1, 2, 3)
    size = (tmp_path / segment_name(2)).stat().st_size
    for until, count in ((Position(2, size // 2), 3), (Position(2, size), 4), (Position(2, 0), 2), (Position(9, 0), 6)):
        assert sum(1 for _ in ledger_reader.read(tmp_path, 0, until)) == count


@pytest.mark.parametrize("name", ["ledger-99999999999999999999.jsonl", "ledger-0000000\u0661.jsonl", "ledger-.jsonl"])
def test_a_name_of_no_segment_is_passed_over(tmp_path: Path, name: str) -> None:
    """Numbers that we would never reach, digits of other scripts and none at all are other people's files."""
    lines(tmp_path, 1)
    (tmp_path / name).write_bytes(b"x")
    assert ledger_reader.segments(tmp_path) == [1]
    file = LedgerFile(tmp_path, 1)
    file.ready()
    assert file.number == 2
    file.close()


def test_pruning_removes_files_alone(tmp_path: Path) -> None:
    """A directory or a link of such a name stays, and stops nothing."""
    lines(tmp_path, 3, 4)
    (tmp_path / segment_name(1)).mkdir()
    (tmp_path / segment_name(2)).symlink_to(segment_name(4))
    file = LedgerFile(tmp_path, 1 << 20)
    file.ready()
    assert file.prune(oldest_needed=4, now=0.0, keep_s=1e9, max_bytes=0) == [3]
    assert (tmp_path / segment_name(1)).is_dir()
    assert (tmp_path / segment_name(2)).is_symlink()
    file.close()
