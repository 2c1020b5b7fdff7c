"""The journal on a real directory: what the front door and the engine's side say becomes two registers."""

from pathlib import Path

import pytest

from fakes.ledger_kit import TickingClock, outcome, request, run_journal
from vllm_supervisor.adapters import ledger_reader
from vllm_supervisor.core.audit import audit
from vllm_supervisor.core.ledger_parser import Record
from vllm_supervisor.core.samples import EventKind, RequestEvent
from vllm_supervisor.core.words import Evidence, ExecutionState, Outcome, RequestClass
from vllm_supervisor.runtime.journal import LedgerJournal
from vllm_supervisor.runtime.ledger_writer import LedgerWriter


def lines(directory: Path, *events: str) -> list[Record]:
    """Read the lines of those events."""
    return [record for record in ledger_reader.records(directory) if record["event"] in events]


def finished(engine_id: str, status: str) -> RequestEvent:
    """Build the scheduler's word that a request left it."""
    return RequestEvent("0", 1.0, EventKind.FINISHED, engine_id, status, 5)


def test_a_completed_answer_is_two_entries(tmp_path: Path) -> None:
    """A completed request leaves an acceptance, an outcome and a completed execution, and the account balances."""

    async def body(journal: LedgerJournal, _writer: LedgerWriter) -> None:
        await journal.accepted(request("run1-1", sent_at=1.0, engine_id="run1-1"))
        journal.execution("run1-1", ExecutionState.COMPLETED, Evidence.ANSWER)
        journal.outcome(outcome("run1-1"))
        assert await journal.end(5.0, clean=True)

    run_journal(tmp_path, body)
    assert [line["event"] for line in lines(tmp_path, "life", "accepted", "execution", "outcome", "balance")] == [
        "life", "accepted", "execution", "outcome", "balance",
    ]  # fmt: skip
    assert audit(ledger_reader.fold(tmp_path)).holds


@pytest.mark.parametrize("state", ExecutionState)
def test_ended_says_both_in_one_call(tmp_path: Path, state: ExecutionState) -> None:
    """How a request ended leaves the same lines and counts, told at once or as statement and outcome."""
    seen: list[object] = []
    for at_once in (True, False):

        async def body(journal: LedgerJournal, _writer: LedgerWriter, *, at_once: bool = at_once) -> None:
            await journal.accepted(request("run1-1", sent_at=1.0, engine_id="run1-1"))
            if at_once:
                journal.ended(outcome("run1-1"), state, Evidence.ANSWER)
                with pytest.raises(KeyError):
                    journal.ended(outcome("run1-1"), state, Evidence.ANSWER)
            else:
                journal.execution("run1-1", state, Evidence.ANSWER)
                journal.outcome(outcome("run1-1"))
            seen.append((journal.executions, journal.requests, journal.unsettled))
            await journal.end(5.0, clean=True)

        directory = tmp_path / str(at_once)
        run_journal(directory, body)
        written = lines(directory, "accepted", "execution", "outcome")
        seen.append([{key: line[key] for key in line if key not in {"t", "at"}} for line in written])
    assert seen[:2] == seen[2:]


def test_a_second_outcome_is_refused(tmp_path: Path) -> None:
    """An id gets exactly one outcome: another one raises and is not written."""

    async def body(journal: LedgerJournal, _writer: LedgerWriter) -> None:
        await journal.accepted(request("run1-1"))
        journal.outcome(outcome("run1-1"))
        with pytest.raises(KeyError):
            journal.outcome(outcome("run1-1"))
        with pytest.raises(KeyError):
            journal.outcome(outcome("run1-2"))

    run_journal(tmp_path, body)
    assert len(lines(tmp_path, "outcome")) == 1


def test_what_was_never_sent_has_not_started(tmp_path: Path) -> None:
    """A request of which no byte went to the engine is `not_started`, without anybody saying so."""

    async def body(journal: LedgerJournal, _writer: LedgerWriter) -> None:
        await journal.accepted(request("run1-1"))
        journal.outcome(outcome("run1-1", Outcome.CANCELLED))
        assert await journal.end(5.0, clean=True)

    run_journal(tmp_path, body)
    assert [line["state"] for line in lines(tmp_path, "execution")] == ["not_started"]


def test_a_cancelled_request_runs_on_until_the_engine_says_otherwise(tmp_path: Path) -> None:
    """A client that left changes nothing in the execution register; the engine's own word does."""

    async def body(journal: LedgerJournal, _writer: LedgerWriter) -> None:
        await journal.accepted(request("run1-1", sent_at=1.0, engine_id="mine"))
        journal.outcome(outcome("run1-1", Outcome.CANCELLED))
        assert journal.executions["running"] == 1
        assert [change.id for change in journal.unsettled] == ["run1-1"]
        journal.testimony([finished("chatcmpl-mine-0123abcd", "FINISHED_ABORTED")])
        assert journal.executions["confirmed_stopped"] == 1
        assert await journal.end(5.0, clean=True)

    run_journal(tmp_path, body)
    assert [(line["state"], line["evidence"]) for line in lines(tmp_path, "execution")] == [
        ("running", "connection_closed"),
        ("confirmed_stopped", "engine_confirmed"),
    ]


def test_a_background_answer_stays_running(tmp_path: Path) -> None:
    """A request can be complete while its execution runs on; the drain can see that and the engine ends it."""

    async def body(journal: LedgerJournal, _writer: LedgerWriter) -> None:
        made = request("run1-1", RequestClass.RESPONSES, sent_at=1.0, engine_id="mine")
        await journal.accepted(made)
        made.engine_id = "resp_5"
        journal.execution("run1-1", ExecutionState.RUNNING, Evidence.ANSWER)
        journal.outcome(outcome("run1-1"))
        assert journal.background == 1
        journal.testimony([finished("resp_5_0-0123abcd", "FINISHED_STOPPED")])
        assert journal.background == 0
        assert await journal.end(5.0, clean=True)

    run_journal(tmp_path, body)
    assert [line["state"] for line in lines(tmp_path, "execution")] == ["running", "completed"]


def test_a_dead_tree_settles_everything(tmp_path: Path) -> None:
    """Once the engine's processes are proven gone, what was running is confirmed stopped."""

    async def body(journal: LedgerJournal, _writer: LedgerWriter) -> None:
        await journal.accepted(request("run1-1", sent_at=1.0, engine_id="a"))
        await journal.accepted(request("run1-2", sent_at=1.0, engine_id="b"))
        journal.outcome(outcome("run1-1", Outcome.CANCELLED))
        journal.engine_gone()
        journal.outcome(outcome("run1-2", Outcome.FAILED))
        assert await journal.end(5.0, clean=True)

    run_journal(tmp_path, body)
    assert [line["evidence"] for line in lines(tmp_path, "execution") if line["state"] == "confirmed_stopped"] == [
        "process_gone",
        "process_gone",
    ]


def test_what_nobody_knows_is_unknown_at_the_end(tmp_path: Path) -> None:
    """An execution without evidence ends as `unknown`, a request still in flight as `open`, and the account balances."""

    async def body(journal: LedgerJournal, _writer: LedgerWriter) -> None:
        await journal.accepted(request("run1-1", sent_at=1.0, engine_id="a"))
        await journal.accepted(request("run1-2", sent_at=1.0, engine_id="b"))
        journal.outcome(outcome("run1-1", Outcome.CANCELLED))
        assert await journal.end(5.0, clean=False)
        journal.outcome(outcome("run1-2"))

    run_journal(tmp_path, body)
    (balance,) = lines(tmp_path, "balance")
    assert (balance["accepted"], balance["cancelled"], balance["open"], balance["executions"]["unknown"]) == (
        2,
        1,
        1,
        2,
    )
    assert balance["holds"]


def test_counts_settle_only_after_two_readings(tmp_path: Path) -> None:
    """Without the engine's word, two later readings that report no more than our own prove the end."""
    time = TickingClock()

    async def body(journal: LedgerJournal, _writer: LedgerWriter) -> None:
        await journal.accepted(request("run1-1", sent_at=1.0, engine_id="a"))
        await journal.accepted(request("run1-2", sent_at=1.0, engine_id="b", first_byte_at=2.0))
        journal.counts(2, 99.0)
        journal.outcome(outcome("run1-1", Outcome.CANCELLED))
        for began, reported, running in ((101.0, 2, 2), (102.0, 1, 2), (103.0, 1, 1)):
            journal.counts(reported, began)
            assert journal.executions["running"] == running

    run_journal(tmp_path, body, clock=time.clock())
    assert lines(tmp_path, "execution")[-1]["evidence"] == "counts"


def test_refusals_are_one_line_a_class_reason_and_second(tmp_path: Path) -> None:
    """Refusals within a second share a line, the next second begins another."""
    time = TickingClock()

    async def body(journal: LedgerJournal, _writer: LedgerWriter) -> None:
        for _ in range(3):
            journal.rejected(RequestClass.CHAT, "draining")
        journal.rejected(RequestClass.EMBEDDINGS, "draining")
        time.now += 1
        journal.tick()
        journal.rejected(RequestClass.CHAT, "draining")
        assert await journal.end(5.0, clean=True)

    run_journal(tmp_path, body, clock=time.clock())
    assert [(line["class"], line["reason"], line["n"]) for line in lines(tmp_path, "rejected")] == [
        ("chat", "draining", 3),
        ("embeddings", "draining", 1),
        ("chat", "draining", 1),
    ]


def test_what_comes_behind_the_balance_costs_no_evidence(tmp_path: Path) -> None:
    """Refusals and facts come while the last words are written: counted, in no line, and nothing is missing."""
    ticking = TickingClock()

    async def body(journal: LedgerJournal, writer: LedgerWriter) -> None:
        journal.rejected(RequestClass.CHAT, "draining")
        assert await journal.end(5.0, clean=True)
        assert await writer.aclose(5.0)
        for _ in range(3):
            ticking.now += 2.0
            journal.rejected(RequestClass.CHAT, "draining")
            journal.tick()
            journal.engine("exited", {"pid": 1})
        assert journal.requests.rejected == 4
        assert not writer.health().missing

    run_journal(tmp_path, body, clock=ticking.clock())
    assert [line["n"] for line in lines(tmp_path, "rejected")] == [1]
    assert [line["event"] for line in lines(tmp_path, "rejected", "engine", "balance")] == ["rejected", "balance"]
