"""The ledger's writer on a file system that fails by name: no request waits for ever, every gap is counted."""

import errno
import os
from pathlib import Path

import pytest
import trio

from fakes.ledger_files import LIMIT_S, FailingOps, line, numbers, run_writer
from fakes.ledger_kit import outcome, request, run_journal
from vllm_supervisor.adapters import ledger_reader
from vllm_supervisor.core.audit import audit
from vllm_supervisor.core.errors import SetupError
from vllm_supervisor.core.ledger import LedgerPolicy, segment_name
from vllm_supervisor.core.words import Outcome
from vllm_supervisor.runtime import ledger_writer
from vllm_supervisor.runtime.journal import LedgerJournal
from vllm_supervisor.runtime.ledger_writer import LedgerWriter


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_short_failure_loses_nothing(tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails a few times is repeated, whole, and no evidence is missing."""
    monkeypatch.setattr(ledger_writer, "RETRIES_S", (0.0, 0.0, 0.0))
    ops = FailingOps()

    async def body(writer: LedgerWriter) -> None:
        await writer.append_and_wait(line(0), "")
        ops.short_writes = True
        ops.fail("write", error, times=3)
        await writer.append_and_wait(line(1), "")
        assert not writer.health().failed
        assert not writer.health().missing
        assert writer.health().error == os.strerror(error)

    run_writer(tmp_path, body, ops=ops)
    assert numbers(tmp_path) == [0, 1]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_lasting_failure_is_counted_and_requests_go_on(
    tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the disk fails, waits return and lines count as late; after it they stand in the file, before later ones."""
    monkeypatch.setattr(ledger_writer, "RETRIES_S", (0.0, 0.0, 0.0))
    ops = FailingOps()

    async def body(writer: LedgerWriter) -> None:
        await writer.append_and_wait(line(0), "")
        ops.fail("write", error, times=1_000_000)
        await writer.append_and_wait(line(1), "")
        await writer.append_and_wait(line(2), "")
        assert (writer.health().failed, writer.health().lost, writer.health().late) == (True, 0, 2)
        ops.errors.clear()
        await writer.append_and_wait(line(3), "")
        assert (writer.health().failed, writer.health().missing) == (False, True)

    run_writer(tmp_path, body, ops=ops)
    assert numbers(tmp_path) == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_lasting_failure_tears_no_account(tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a request on record, and of one that was not yet, everything is written once the disk works again."""
    monkeypatch.setattr(ledger_writer, "RETRIES_S", ())
    ops = FailingOps()

    async def body(journal: LedgerJournal, writer: LedgerWriter) -> None:
        await journal.accepted(request("run1-1"))
        ops.fail("write", error, times=1_000_000)
        journal.outcome(outcome("run1-1"))
        await journal.accepted(request("run1-2"))
        journal.outcome(outcome("run1-2"))
        assert not await writer.flush(LIMIT_S)
        ops.errors.clear()
        assert not await journal.end(LIMIT_S, clean=True)  # one request went on before its line was written
        assert (journal.health.lost, journal.health.late) == (0, 1)

    run_journal(tmp_path, body, ops=ops)
    (run,) = ledger_reader.fold(tmp_path).runs.values()
    assert (run.accepted, run.count(Outcome.COMPLETED), run.without_outcome, run.lost) == (2, 2, 0, 0)
    assert audit(ledger_reader.fold(tmp_path)).holds


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_retry_finds_out_that_the_disk_works_again(
    tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing new to write, a retry writes what is kept and the failure is over; while it fails nothing is lost."""
    monkeypatch.setattr(ledger_writer, "RETRIES_S", ())
    ops = FailingOps()

    async def retried(writer: LedgerWriter, *, failed: bool) -> None:
        before = ops.writes
        writer.retry()
        while ops.writes == before or writer.health().failed is not failed:  # noqa: ASYNC110 - another thread decides
            await trio.sleep(0.001)

    async def body(writer: LedgerWriter) -> None:
        ops.fail("write", error, times=1_000_000)
        assert not await writer.append_and_wait(line(0), "", required=True)
        await retried(writer, failed=True)
        ops.errors.clear()
        await retried(writer, failed=False)
        assert not writer.health().missing

    run_writer(tmp_path, body, ops=ops)
    assert numbers(tmp_path) == [0]


def test_a_sync_that_failed_is_tried_again_without_new_lines(tmp_path: Path) -> None:
    """A failed fsync puts lines at risk for good, but the failure itself ends with the next fsync that works."""
    ops = FailingOps()

    async def body(writer: LedgerWriter) -> None:
        ops.fail("fsync", errno.EIO, times=2)  # the new file's directory, whose failure is none, and the file
        await writer.append_and_wait(line(0), "")
        while not writer.health().at_risk or writer.health().failed:  # noqa: ASYNC110 - another thread decides
            await trio.sleep(0.001)
        assert writer.health().at_risk == 1

    run_writer(tmp_path, body, ops=ops, policy=LedgerPolicy(sync="interval", interval_s=0.001))


def test_half_a_line_that_cannot_be_cut_is_mended_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a write that could neither be finished nor cut is cut when the file is opened again."""
    monkeypatch.setattr(ledger_writer, "RETRIES_S", (0.0,))
    ops = FailingOps()

    async def body(writer: LedgerWriter) -> None:
        await writer.append_and_wait(line(0), "")
        ops.short_writes = True
        ops.fail("write", errno.ENOSPC)
        ops.fail("truncate", errno.EIO)
        await writer.append_and_wait(line(1), "")

    run_writer(tmp_path, body, ops=ops)
    assert numbers(tmp_path) == [0, 1]


def test_a_removed_directory_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory removed under a running writer comes back, and what was in it counts as lost."""
    monkeypatch.setattr(ledger_writer, "RETRIES_S", (0.0, 0.0))
    directory = tmp_path / "ledger"

    async def body(writer: LedgerWriter) -> None:
        for number in range(3):
            await writer.append_and_wait(line(number), "")
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
        await writer.append_and_wait(line(3), "")
        assert writer.health().lost == 3

    run_writer(directory, body)
    assert numbers(directory) == ["segment", 3, "gap"]


def test_a_slow_fsync_stalls_nobody(tmp_path: Path) -> None:
    """While an interval fsync hangs, acceptances are written and return."""
    ops = FailingOps()

    async def body(writer: LedgerWriter) -> None:
        ops.hang = "fsync"
        ops.gate.clear()
        await writer.append_and_wait(line(0), "")
        assert await trio.to_thread.run_sync(ops.hung.wait, LIMIT_S)
        for number in range(1, 20):
            await writer.append_and_wait(line(number), "")
        assert not writer.health().failed
        ops.gate.set()

    run_writer(tmp_path, body, ops=ops, policy=LedgerPolicy(sync="interval", interval_s=0.001))
    assert numbers(tmp_path) == list(range(20))


def test_a_failed_fsync_is_evidence_at_risk(tmp_path: Path) -> None:
    """Lines whose fsync failed count as missing evidence, although they were written."""
    ops = FailingOps()

    async def body(writer: LedgerWriter) -> None:
        ops.fail("fsync", errno.EIO, times=1)
        await writer.append_and_wait(line(0), "")
        health = writer.health()
        assert (health.at_risk, health.missing, health.failed) == (1, True, True)
        await writer.append_and_wait(line(1), "")
        assert not writer.health().failed

    (tmp_path / segment_name(1)).write_bytes(line(-1))
    run_writer(tmp_path, body, ops=ops, policy=LedgerPolicy(sync="always"))


def test_a_hung_disk_lets_requests_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An acceptance waits for a hung disk only so long, later ones not anew; both are counted as late."""
    monkeypatch.setattr(ledger_writer, "ACCEPT_LIMIT_S", 0.05)
    ops = FailingOps()

    async def body(writer: LedgerWriter) -> None:
        ops.hang = "write"
        ops.gate.clear()
        await writer.append_and_wait(line(0), "")
        await writer.append_and_wait(line(1), "")
        assert (writer.health().failed, writer.health().late) == (True, 2)
        ops.gate.set()

    run_writer(tmp_path, body, ops=ops)
    assert numbers(tmp_path) == [0, 1]


def test_the_queue_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines beyond the queue's bound are counted as lost instead of filling the memory."""
    monkeypatch.setattr(ledger_writer, "QUEUE_LIMIT", 2000)
    ops = FailingOps()

    async def body(writer: LedgerWriter) -> None:
        ops.hang = "write"
        ops.gate.clear()
        writer.append(line(0))
        assert await trio.to_thread.run_sync(ops.hung.wait, LIMIT_S)
        for number in range(1, 101):
            writer.append(line(number))
        health = writer.health()
        assert 0 < health.lost < 100
        assert health.queued <= 2200
        ops.gate.set()

    run_writer(tmp_path, body, ops=ops)


def test_what_a_failing_disk_leaves_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines beyond the bound are lost while the disk fails; those within it are written later, then the count of the rest."""
    monkeypatch.setattr(ledger_writer, "RETRIES_S", ())
    monkeypatch.setattr(ledger_writer, "QUEUE_LIMIT", 3 * len(line(0)))
    ops = FailingOps()

    async def body(writer: LedgerWriter) -> None:
        await writer.append_and_wait(line(0), "")
        ops.fail("write", errno.ENOSPC, times=1_000_000)
        for number in range(1, 6):
            assert not await writer.append_and_wait(line(number), "", required=True)
        health = writer.health()
        assert (health.lost, health.queued) == (2, 3 * len(line(0)))
        ops.errors.clear()
        writer.retry()
        while writer.health().failed:  # noqa: ASYNC110 - another thread decides
            await trio.sleep(0.001)
        assert writer.health().queued == 0
        assert await writer.append_and_wait(line(6), "")

    run_writer(tmp_path, body, ops=ops)
    assert numbers(tmp_path) == [0, 1, 2, 3, "gap", 6]


def test_what_is_kept_until_the_end_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails until the run is over costs the lines that were kept, and they are counted."""
    monkeypatch.setattr(ledger_writer, "RETRIES_S", ())
    ops = FailingOps()

    async def body(writer: LedgerWriter) -> None:
        await writer.append_and_wait(line(0), "")
        ops.fail("write", errno.ENOSPC, times=1_000_000)
        writer.append(line(1) + line(2), lines=2)
        assert not await writer.flush(LIMIT_S)

    writer = run_writer(tmp_path, body, ops=ops)
    assert (writer.health().lost, writer.health().queued) == (2, 0)
    assert numbers(tmp_path) == [0]


def test_kept_lines_are_written_even_at_the_very_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing tries once more what the disk refused, whole and in order, also into further segments."""
    monkeypatch.setattr(ledger_writer, "RETRIES_S", ())
    ops = FailingOps()

    async def body(writer: LedgerWriter) -> None:
        await writer.append_and_wait(line(0), "")
        ops.fail("write", errno.ENOSPC, times=1_000_000)
        for number in range(1, 6):
            assert not await writer.append_and_wait(line(number, 40_000), "", required=True)
        ops.errors.clear()

    writer = run_writer(tmp_path, body, ops=ops, segment_bytes=50_000)
    assert not writer.health().missing
    assert [one for one in numbers(tmp_path) if one != "segment"] == list(range(6))


def test_a_place_that_cannot_be_written_is_said_at_start(tmp_path: Path) -> None:
    """A ledger that cannot be opened at the start is an error of the environment, with the mend."""
    (tmp_path / "file").write_text("")

    async def body(_writer: LedgerWriter) -> None:
        pytest.fail("must not start")

    with pytest.raises(SetupError, match="state_dir"):
        run_writer(tmp_path / "file" / "ledger", body)


class TornOps(FailingOps):
    """Writes one line and a part of the next, once, when `armed`; what follows finds a full disk."""

    armed = False

    def write(self, fd: int, data: memoryview) -> int:  # type: ignore[override]
        """Write, as far as it is let."""
        if self.armed:
            self.armed = False
            self.fail("write", errno.ENOSPC)
            return os.write(fd, data[: bytes(data).index(b"\n") + 5])
        return super().write(fd, data)


def test_whole_lines_of_a_write_that_failed_are_not_there_twice(tmp_path: Path) -> None:
    """They cannot be cut off at once either; the next open does, before they are written again."""
    ops = TornOps()

    async def body(writer: LedgerWriter) -> None:
        await writer.append_and_wait(line(0), "")
        ops.armed = True
        ops.fail("truncate", errno.EIO)
        told: list[bool] = []
        writer.begin_turn()
        writer.append(line(1))
        writer.accept(line(2), "r-2", told.append)
        writer.end_turn()
        assert told == [False]
        await writer.append_and_wait(line(2), "r-2")

    run_writer(tmp_path, body, ops=ops)
    assert numbers(tmp_path) == [0, 1, 2]
