"""Recovery at a start, on real files: whatever a crash left is closed once, and a second look finds nothing to do."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.hostile_ledger import LINES, READABLE
from fakes.ledger_kit import identity, outcome, request, run_journal
from vllm_supervisor.adapters import ledger_reader
from vllm_supervisor.adapters.ledger_reader import Position
from vllm_supervisor.core.accounts import RunAccount
from vllm_supervisor.core.audit import Fate, audit
from vllm_supervisor.core.ledger import segment_name
from vllm_supervisor.core.words import Evidence, ExecutionState, Outcome
from vllm_supervisor.runtime.journal import LedgerJournal
from vllm_supervisor.runtime.ledger_writer import LedgerWriter
from vllm_supervisor.runtime.recovery import Recovered, recover_ledger


def lose_a_run(
    directory: Path, run: str = "lost", requests: int = 4, segment_bytes: int = 1 << 20, *, recovers: bool = False
) -> None:
    """Leave what a killed supervisor leaves: some requests settled, some half, some not, and no balance.

    `recovers`: it has closed what was lost before it.
    """

    async def body(journal: LedgerJournal, writer: LedgerWriter) -> None:
        if recovers:
            await recover_ledger(directory, journal, writer, lambda _run: Fate.GONE)
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


def test_recovery_reads_whole_runs_and_no_others(tmp_path: Path) -> None:
    """With many segments, only those of runs that are not closed are read, and the result is the same."""
    lose_a_run(tmp_path, requests=200, segment_bytes=2000)
    assert ledger_reader.first_needed(tmp_path) == 0
    start_again(tmp_path, run="second", segment_bytes=2000)
    third = ledger_reader.segments(tmp_path)[-1]
    lose_a_run(tmp_path, "third", requests=40, segment_bytes=2000, recovers=True)
    assert ledger_reader.first_needed(tmp_path) == third > 1
    assert start_again(tmp_path, run="fourth", segment_bytes=2000).opened == 20
    assert audit(ledger_reader.fold(tmp_path)).holds


def test_a_settled_ledger_is_not_read_again(tmp_path: Path) -> None:
    """After a balance that leaves nothing unsettled a start reads one line; after one that does, it reads on."""
    lose_a_run(tmp_path)
    start_again(tmp_path, Fate.UNPROVEN, run="second")
    assert ledger_reader.first_needed(tmp_path) == 1
    start_again(tmp_path, Fate.GONE, run="third")
    assert ledger_reader.first_needed(tmp_path) == 2
    (end,) = [Position(1, path.stat().st_size) for path in tmp_path.iterdir()]
    lose_a_run(tmp_path, "fourth")
    assert ledger_reader.first_needed(tmp_path, end) == 2
    assert ledger_reader.first_needed(tmp_path) == 1
    assert start_again(tmp_path, run="fifth").opened == 2


@pytest.mark.parametrize("segment_bytes", [700, 2000, 16 * 1024])
def test_a_lost_run_of_many_segments_is_closed_whole(tmp_path: Path, segment_bytes: int) -> None:
    """The balance counts every request of the run, not those of its last segment."""
    lose_a_run(tmp_path, requests=400, segment_bytes=segment_bytes)
    assert len(ledger_reader.segments(tmp_path)) > 2
    start_again(tmp_path, segment_bytes=segment_bytes)
    lost = ledger_reader.fold(tmp_path).runs["lost"]
    assert lost.balance is not None
    assert [lost.balance[name] for name in ("accepted", "completed", "cancelled", "open")] == [400, 100, 100, 200]
    assert "partial" not in lost.balance
    assert audit(ledger_reader.fold(tmp_path)).holds


def test_a_run_whose_first_segments_were_pruned_is_partial(tmp_path: Path) -> None:
    """Before the crash or after the recovery: it is judged by what is left, and nothing is called wrong."""
    lose_a_run(tmp_path, requests=60, segment_bytes=2000)
    for number in (1, 2):
        (tmp_path / segment_name(number)).unlink()
    start_again(tmp_path, segment_bytes=2000)
    (tmp_path / segment_name(3)).unlink()
    found = audit(ledger_reader.fold(tmp_path))
    assert (found.holds, found.runs[0].gone) == (True, "its beginning is missing: pruned or removed")


@pytest.mark.parametrize("times", [1, 3])
def test_who_is_killed_before_it_has_recovered_leaves_it_to_the_next(tmp_path: Path, times: int) -> None:
    """Also where it has begun segments of its own: no line of it says that what was before need not be read."""
    for number in range(times + 1):
        lose_a_run(tmp_path, f"lost{number}", requests=40, segment_bytes=2000)
    assert start_again(tmp_path, segment_bytes=2000).opened == 20 * (times + 1)
    assert audit(ledger_reader.fold(tmp_path)).holds


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(min_value=0, max_value=12_000))
def test_who_is_killed_in_the_middle_of_recovering_leaves_the_rest(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    """Wherever the lines of a recovery end, over however many segments, the next start adds what is missing."""
    directory = tmp_path_factory.mktemp("killed")
    lose_a_run(directory, requests=40, segment_bytes=2000)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    lose_a_run(directory, "second", requests=8, segment_bytes=2000, recovers=True)
    written = b"".join(
        path.read_bytes().removeprefix(before.get(path.name, b"")) for path in sorted(directory.iterdir())
    )
    left = len(written) - min(cut, len(written))
    for path in sorted(directory.iterdir()):
        kept = len(before.get(path.name, b""))
        size = kept + min(left, path.stat().st_size - kept)
        left -= size - kept
        if size or path.name in before:
            path.write_bytes(path.read_bytes()[:size])
        else:
            path.unlink()
    start_again(directory, run="third", segment_bytes=2000)
    found = audit(ledger_reader.fold(directory))
    assert found.holds, found
    assert not any(run.gone for run in found.runs)


def test_an_unproven_run_is_read_again_from_its_beginning(tmp_path: Path) -> None:
    """Segments begun after a recovery without proof lead a later start, which has it, to the run."""
    lose_a_run(tmp_path, requests=40, segment_bytes=2000)

    async def body(journal: LedgerJournal, writer: LedgerWriter) -> None:
        await recover_ledger(tmp_path, journal, writer, lambda _run: Fate.UNPROVEN)
        for number in range(1, 41):
            await journal.accepted(request(f"second-{number}", sent_at=1.0, engine_id=f"second-{number}"))

    run_journal(tmp_path, body, who=identity("second"), segment_bytes=2000)
    assert start_again(tmp_path, Fate.GONE, run="third", segment_bytes=2000).stopped == 30 + 40
    assert audit(ledger_reader.fold(tmp_path)).holds


def test_a_crash_between_a_new_segment_and_its_first_line(tmp_path: Path) -> None:
    """The empty file is used by the next start, and no segment is missed."""
    lose_a_run(tmp_path, requests=40, segment_bytes=2000)
    newest = ledger_reader.segments(tmp_path)[-1]
    (tmp_path / segment_name(newest + 1)).touch(0o600)
    assert start_again(tmp_path, segment_bytes=2000).opened == 20
    found = audit(ledger_reader.fold(tmp_path))
    assert found.holds, found


def test_deleted_segments_are_missing_evidence(tmp_path: Path) -> None:
    """A hole in the segments is reported, blamed on nobody, and recovery still closes the rest."""
    lose_a_run(tmp_path, requests=60, segment_bytes=2000)
    (tmp_path / segment_name(2)).unlink()
    assert start_again(tmp_path, segment_bytes=2000).damage == ("segment 2 is missing",)
    found = audit(ledger_reader.fold(tmp_path))
    assert [run for run in found.runs if not run.holds] == []
    assert found.evidence == ("segment 2 is missing",)


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


def by_a_directory(path: Path) -> None:
    """Put a directory in its place."""
    path.unlink()
    path.mkdir()


def by_a_pipe(path: Path) -> None:
    """Put a pipe in its place that nobody writes to."""
    path.unlink()
    os.mkfifo(path)


def by_a_link(path: Path) -> None:
    """Put a link to its content in its place."""
    path.rename(path.with_name("content"))
    path.symlink_to("content")


def by_zeros(path: Path) -> None:
    """End it with zero bytes, as a file system may after power loss."""
    with path.open("ab") as file:
        file.write(bytes(3_000_000))


def by_a_long_line(path: Path) -> None:
    """Put a line of 3 MB before its last one."""
    *lines, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, b"x" * 3_000_000 + b"\n", last]))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "deleted": (Path.unlink, "segment 3 is missing"),
    "empty": (lambda path: path.write_bytes(b"") and None, "segment 3 is unreadable: it is empty"),
    "directory": (by_a_directory, "segment 3 is unreadable: it is no regular file"),
    "pipe": (by_a_pipe, "segment 3 is unreadable: it is no regular file"),
    "link": (by_a_link, "segment 3 is unreadable: it is a symbolic link"),
    "zeros": (by_zeros, "segment 3 line 13 is unreadable: it is longer than 1 MiB"),
    "long line": (by_a_long_line, "segment 3 line 12 is unreadable: it is longer than 1 MiB"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_in_the_middle_of_a_lost_run_is_told_and_counted(tmp_path: Path, kind: str) -> None:
    """A start closes what there is, names the damage, and the audit fails for nothing else; nothing waits."""
    do, told = DAMAGE[kind]
    lose_a_run(tmp_path, requests=60, segment_bytes=2000)
    do(tmp_path / segment_name(3))
    closed = start_again(tmp_path, segment_bytes=2000)
    assert (closed.runs, closed.damage) == (1, (told,))
    found = audit(ledger_reader.fold(tmp_path))
    assert found.evidence == (told,)
    assert found.runs[0].gone == "lines of it are missing"
    assert found.runs[0].violations == (("1 of its lines cannot be read",) if " line " in told else ())
    assert start_again(tmp_path, run="after", segment_bytes=2000).runs == 0


@pytest.mark.parametrize("name", LINES)
def test_a_line_that_cannot_be_read_stops_no_start(tmp_path: Path, name: str) -> None:
    """It is told, the run it is in is closed as one that does not hold, and a further start has nothing to do."""
    line, reason = LINES[name]
    lose_a_run(tmp_path, "run1")
    path = tmp_path / segment_name(1)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], line, *lines[3:]]))
    closed = start_again(tmp_path)
    assert (closed.runs, closed.damage) == (1, (f"segment 1 line 4 is unreadable: {reason}",))
    run = ledger_reader.fold(tmp_path).runs["run1"]
    assert run.balance is not None
    assert [run.balance[name] for name in ("partial", "lost", "holds")] == [True, 1, False]
    assert start_again(tmp_path, run="after").runs == 0


@pytest.mark.parametrize("name", READABLE)
def test_whatever_can_be_read_can_be_closed(tmp_path: Path, name: str) -> None:
    """Lines of no run of ours are closed like ours, in lines that can be read again."""
    lose_a_run(tmp_path, "run1")
    with (tmp_path / segment_name(1)).open("ab") as file:
        file.write(READABLE[name])
    assert start_again(tmp_path).damage == ()
    assert start_again(tmp_path, run="after").runs == 0
    assert ledger_reader.fold(tmp_path).damage == []


@pytest.mark.parametrize("kind", ["directory", "pipe", "link"])
def test_a_newest_segment_that_is_no_file_of_ours_stays_and_the_next_begins(tmp_path: Path, kind: str) -> None:
    """The start writes into the number after it, and leaves it as it was found."""
    lose_a_run(tmp_path, requests=60, segment_bytes=2000)
    newest = ledger_reader.segments(tmp_path)[-1]
    DAMAGE[kind][0](tmp_path / segment_name(newest))
    mode = (tmp_path / segment_name(newest)).lstat().st_mode
    closed = start_again(tmp_path, segment_bytes=1 << 20)
    assert closed.damage[0].startswith(f"segment {newest} is unreadable: ")
    assert (tmp_path / segment_name(newest)).lstat().st_mode == mode
    assert ledger_reader.segments(tmp_path)[-1] == newest + 1
    assert not audit(ledger_reader.fold(tmp_path)).holds
