"""The ledger's quick way: the loop writes the usual line itself, and only where that cannot keep it waiting."""

import errno
from pathlib import Path

import pytest
import trio

from fakes.ledger_files import LIMIT_S, FailingOps, line, numbers, run_writer
from vllm_supervisor.core.ledger import LedgerPolicy
from vllm_supervisor.runtime.ledger_writer import LedgerWriter


def accept(writer: LedgerWriter, number: int) -> list[bool]:
    """Append acceptance `number`, and return what was told of it so far."""
    told: list[bool] = []
    writer.accept(line(number), f"r-{number}", told.append)
    return told


def test_a_line_written_now_is_in_the_file(tmp_path: Path) -> None:
    """Without waiting and without a thread's turn, several lines in order."""

    async def body(writer: LedgerWriter) -> None:
        await writer.append_and_wait(line(0), "")
        assert accept(writer, 1) == [True]
        writer.append(line(2) + line(3), lines=2, settles="r-1")
        assert numbers(tmp_path) == [0, 1, 2, 3]
        assert writer.health().written == 4

    run_writer(tmp_path, body)


def test_the_lines_of_a_turn_are_one_write(tmp_path: Path) -> None:
    """In the order of the calls; an acceptance is told of when it is in the file and not before."""
    ops = FailingOps()

    async def body(writer: LedgerWriter) -> None:
        await writer.append_and_wait(line(0), "")
        before = ops.writes
        writer.begin_turn()
        first = accept(writer, 1)
        writer.append(line(2) + line(3), lines=2, settles="r-0")
        second = accept(writer, 4)
        assert (first, second, ops.writes) == ([], [], before)
        assert numbers(tmp_path) == [0]
        writer.end_turn()
        assert (first, second, ops.writes) == ([True], [True], before + 1)
        assert numbers(tmp_path) == [0, 1, 2, 3, 4]
        assert writer.health().written == 5
        assert accept(writer, 5) == [True]  # outside a turn nothing waits

    run_writer(tmp_path, body, ops=ops)


def test_a_turn_that_cannot_be_written_loses_nothing(tmp_path: Path) -> None:
    """Every acceptance in it is refused and comes again; the other lines go to the thread, before those."""
    ops = FailingOps()

    async def body(writer: LedgerWriter) -> None:
        await writer.append_and_wait(line(0), "")
        ops.fail("write", errno.ENOSPC)
        writer.begin_turn()
        first = accept(writer, 2)
        writer.append(line(1), settles="r-0")
        second = accept(writer, 3)
        writer.end_turn()
        assert (first, second) == ([False], [False])
        assert await writer.append_and_wait(line(2), "r-2")
        assert await writer.append_and_wait(line(3), "r-3")
        assert writer.health().lost == 0

    run_writer(tmp_path, body, ops=ops)
    assert numbers(tmp_path) == [0, 1, 2, 3]


def test_who_is_told_may_append(tmp_path: Path) -> None:
    """What follows from an acceptance at once is written behind the turn it was in."""

    async def body(writer: LedgerWriter) -> None:
        await writer.append_and_wait(line(0), "")
        writer.begin_turn()
        writer.accept(line(1), "r-1", lambda _written: writer.append(line(3), settles="r-1"))
        writer.append(line(2))
        writer.end_turn()
        assert numbers(tmp_path) == [0, 1, 2, 3]

    run_writer(tmp_path, body)


def test_nothing_is_written_now_before_what_waits(tmp_path: Path) -> None:
    """A line that follows one in the thread's hands goes the same way, so their order stays."""
    ops = FailingOps()

    async def body(writer: LedgerWriter) -> None:
        await writer.append_and_wait(line(0), "")
        ops.fail("write", errno.ENOSPC)
        writer.append(line(1))  # the loop's try fails, the thread's succeeds
        assert accept(writer, 2) == [False]
        await writer.append_and_wait(line(2), "r-2")

    run_writer(tmp_path, body, ops=ops)
    assert numbers(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize("removed", ["file", "directory"])
def test_a_removed_file_is_left_to_the_thread(tmp_path: Path, removed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop looks whether its file is still there; if not, the thread makes a new one."""
    monkeypatch.setattr("vllm_supervisor.runtime.ledger_quick.LOOK_EVERY_S", 0.0)
    directory = tmp_path / "l"

    async def body(writer: LedgerWriter) -> None:
        await writer.append_and_wait(line(0), "")
        for path in directory.iterdir():
            path.unlink()
        if removed == "directory":
            directory.rmdir()
        assert accept(writer, 1) == [False]
        await writer.append_and_wait(line(1), "r-1")
        assert numbers(directory)[-2:] == [1, "gap"]

    run_writer(directory, body)


def test_a_hanging_sync_takes_the_loop_off_the_file(tmp_path: Path) -> None:
    """While a sync is under way the loop does not touch the file, since its own write could hang too."""
    ops = FailingOps()

    async def body(writer: LedgerWriter) -> None:
        ops.hang = "fsync"
        ops.gate.clear()
        await writer.append_and_wait(line(0), "")
        assert await trio.to_thread.run_sync(ops.hung.wait, LIMIT_S)
        assert accept(writer, 1) == [False]
        await writer.append_and_wait(line(1), "r-1")
        ops.gate.set()

    run_writer(tmp_path, body, ops=ops, policy=LedgerPolicy(sync="interval", interval_s=0.001))
    assert numbers(tmp_path) == [0, 1]


def test_always_leaves_every_line_to_the_thread(tmp_path: Path) -> None:
    """With `sync = "always"` no acceptance is done before its fsync."""

    async def body(writer: LedgerWriter) -> None:
        await writer.append_and_wait(line(0), "")
        assert accept(writer, 1) == [False]

    run_writer(tmp_path, body, policy=LedgerPolicy(sync="always"))


def test_a_full_segment_is_left_to_the_thread(tmp_path: Path) -> None:
    """The loop never opens files: where a segment ends, the thread begins the next."""

    async def body(writer: LedgerWriter) -> None:
        await writer.append_and_wait(line(0), "")
        written = sum(accept(writer, number) == [True] for number in range(1, 100))
        assert 0 < written < 99
        assert writer.health().segment == 1
        await writer.append_and_wait(line(100), "")
        assert writer.health().segment == 2

    run_writer(tmp_path, body, segment_bytes=len(line(0)) * 20)


def test_a_removed_file_is_noticed_by_each_that_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the thread has made a new one no acceptance is told to be in the file that is gone."""
    monkeypatch.setattr("vllm_supervisor.runtime.ledger_quick.LOOK_EVERY_S", 0.0)
    directory = tmp_path / "l"

    async def body(writer: LedgerWriter) -> None:
        await writer.append_and_wait(line(0), "")
        assert accept(writer, 1) == [True]
        for path in directory.iterdir():
            path.unlink()
        monkeypatch.setattr("vllm_supervisor.runtime.ledger_quick.LOOK_EVERY_S", 1000.0)
        assert [accept(writer, 2), accept(writer, 3)] == [[False], [False]]

    run_writer(directory, body)
