"""Recovery at a start, on real files: whatever a crash left is closed once, and a second look finds nothing to do."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.ledger_kit import identity, outcome, request, run_journal
from vllm_supervisor.adapters import ledger_reader
from vllm_supervisor.core.accounts import RunAccount
from vllm_supervisor.core.audit import Fate, audit
from vllm_supervisor.core.ledger import segment_name
from vllm_supervisor.core.words import Evidence, ExecutionState, Outcome
from vllm_supervisor.runtime.journal import LedgerJournal
from vllm_supervisor.runtime.ledger_writer import LedgerWriter
from vllm_supervisor.runtime.recovery import Recovered, recover_ledger


def lose_a_run(directory: Path, run: str = "lost", requests: int = 4, segment_bytes: int = 1 << 20) -> None:
    """Leave what a killed supervisor leaves: some requests settled, some half, some not, and no balance."""

    async def body(journal: LedgerJournal, writer: LedgerWriter) -> None:
        for number in range(1, requests + 1):
            request_id = f"{run}-{number}"
            await journal.accepted(request(request_id, sent_at=1.0, engine_id=request_id))
            if number % 4 == 1:
                journal.execution(request_id, ExecutionState.COMPLETED, Evidence.ANSWER)
                journal.outcome(outcome(request_id))
            elif number % 4 == 2:
                journal.outcome(outcome(request_id, Outcome.CANCELLED))
            elif number % 4 == 3:
                journal.execution(request_id, ExecutionState.RUNNING, Evidence.ABORT_REQUESTED)
        assert await writer.flush(5.0)

    run_journal(directory, body, who=identity(run), segment_bytes=segment_bytes)


def start_again(directory: Path, fate: Fate = Fate.GONE, run: str = "next", **options: int) -> Recovered:
    """Start a run that recovers and ends clean; return what it closed."""
    closed: list[Recovered] = []

    async def body(journal: LedgerJournal, writer: LedgerWriter) -> None:
        def judge(_run: RunAccount) -> Fate:
            return fate

        closed.append(await recover_ledger(directory, journal, writer, judge))
        assert await journal.end(5.0, clean=True)

    run_journal(directory, body, who=identity(run), **options)
    return closed[0]


@pytest.mark.parametrize(("fate", "stopped", "unknown"), [(Fate.GONE, 3, 0), (Fate.UNPROVEN, 0, 3)])
def test_a_lost_run_is_closed(tmp_path: Path, fate: Fate, stopped: int, unknown: int) -> None:
    """Requests without an outcome become `open`, executions `confirmed_stopped` only with proof; the audit is clean."""
    lose_a_run(tmp_path)
    closed = start_again(tmp_path, fate)
    assert (closed.runs, closed.opened, closed.stopped, closed.unknown) == (1, 2, stopped, unknown)
    found = audit(ledger_reader.fold(tmp_path))
    assert found.holds, found
    lost = ledger_reader.fold(tmp_path).runs["lost"]
    assert (lost.accepted, lost.count(Outcome.COMPLETED), lost.count(Outcome.CANCELLED), lost.count(Outcome.OPEN)) == (
        4, 1, 1, 2,
    )  # fmt: skip


def test_recovery_is_done_once(tmp_path: Path) -> None:
    """A further start finds nothing left to close."""
    lose_a_run(tmp_path)
    start_again(tmp_path, run="second")
    assert start_again(tmp_path, run="third").runs == 0


def test_a_later_proof_settles_what_was_unknown(tmp_path: Path) -> None:
    """What one start could not prove, a later one with the proof settles; nothing else changes."""
    lose_a_run(tmp_path)
    start_again(tmp_path, Fate.UNPROVEN, run="second")
    closed = start_again(tmp_path, Fate.GONE, run="third")
    assert (closed.opened, closed.stopped) == (0, 3)
    assert audit(ledger_reader.fold(tmp_path)).holds


def test_a_living_run_is_left_alone(tmp_path: Path) -> None:
    """The account of a supervisor that still lives is not closed by another."""
    lose_a_run(tmp_path)
    closed = start_again(tmp_path, Fate.ALIVE)
    assert (closed.runs, closed.alive) == (0, ("lost",))


def test_two_crashes_in_a_row(tmp_path: Path) -> None:
    """Runs lost one after another are closed together, each in its own account."""
    for run in ("first", "second"):
        lose_a_run(tmp_path, run)
    assert start_again(tmp_path).runs == 2
    assert audit(ledger_reader.fold(tmp_path)).holds


def test_recovery_reads_from_the_oldest_open_segment(tmp_path: Path) -> None:
    """With many segments, only those from the oldest open id on are read, and the result is the same."""
    lose_a_run(tmp_path, requests=200, segment_bytes=2000)
    assert ledger_reader.first_needed(tmp_path) == 1
    start_again(tmp_path, run="second", segment_bytes=2000)
    lose_a_run(tmp_path, "third", requests=40, segment_bytes=2000)
    assert ledger_reader.first_needed(tmp_path) > 1
    assert start_again(tmp_path, run="fourth", segment_bytes=2000).opened == 20
    assert audit(ledger_reader.fold(tmp_path)).holds


def test_a_settled_ledger_is_not_read_again(tmp_path: Path) -> None:
    """After a balance that leaves nothing unsettled a start reads one line; after one that does, it reads on."""
    lose_a_run(tmp_path)
    start_again(tmp_path, Fate.UNPROVEN, run="second")
    assert ledger_reader.first_needed(tmp_path) == 1
    start_again(tmp_path, Fate.GONE, run="third")
    assert ledger_reader.first_needed(tmp_path) == 2
    lose_a_run(tmp_path, "fourth")
    assert ledger_reader.first_needed(tmp_path, "fourth") == 2
    assert ledger_reader.first_needed(tmp_path) == 1
    assert start_again(tmp_path, run="fifth").opened == 2


def test_deleted_segments_are_missing_evidence(tmp_path: Path) -> None:
    """A hole in the segments is reported, blamed on nobody, and recovery still closes the rest."""
    lose_a_run(tmp_path, requests=60, segment_bytes=2000)
    (tmp_path / segment_name(2)).unlink()
    assert start_again(tmp_path, segment_bytes=2000).missing == 1
    found = audit(ledger_reader.fold(tmp_path))
    assert [run for run in found.runs if not run.holds] == []
    assert found.evidence == ("1 segments are missing between others",)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(min_value=1, max_value=2000), second_cut=st.integers(min_value=0, max_value=3000))
def test_any_cut_recovers(tmp_path_factory: pytest.TempPathFactory, cut: int, second_cut: int) -> None:
    """However a crash cut the file, and however a second one cut the recovery, the audit is clean after the next start."""
    directory = tmp_path_factory.mktemp("cut")
    lose_a_run(directory)
    path = directory / segment_name(1)
    path.write_bytes(path.read_bytes()[:-cut])
    start_again(directory, run="second")
    if second_cut:
        whole = path.read_bytes()
        path.write_bytes(whole[: max(len(whole) - second_cut, 0)])
    start_again(directory, run="third")
    found = audit(ledger_reader.fold(directory))
    assert found.holds, found
    assert start_again(directory, run="fourth").runs == 0
