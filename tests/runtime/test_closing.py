"""The end of a run's books: the status, the report, and a disk that does not answer."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fakes.ledger_files import FailingOps
from fakes.ledger_kit import outcome, request, run_journal
from vllm_supervisor.core.drain import DrainState, Stage
from vllm_supervisor.core.drain_report import CutRequest
from vllm_supervisor.core.ledger import LedgerPolicy
from vllm_supervisor.core.lifecycle import State
from vllm_supervisor.core.words import Outcome, RequestClass
from vllm_supervisor.runtime.closing import REPORT, Books
from vllm_supervisor.runtime.journal import LedgerJournal
from vllm_supervisor.runtime.ledger_writer import LedgerWriter

STATE = State(drain=DrainState(stage=Stage.DOCUMENTING, stops=1, entered={Stage.DOCUMENTING: 0.0}))


def books(tmp_path: Path, journal: LedgerJournal, writer: LedgerWriter) -> Books:
    """Build the books of a run."""
    return Books(journal=journal, writer=writer, state_dir=tmp_path, hold=lambda: None, reraise=(), is_pid1=False)


@pytest.mark.parametrize(("cut", "status"), [(0, 0), (1, 80)])
def test_the_report_is_written_with_the_status(tmp_path: Path, cut: int, status: int) -> None:
    """A clean end is 0, a cut request makes it 80; the report and the log's line say the same, a cut as a warning."""

    async def body(journal: LedgerJournal, writer: LedgerWriter) -> None:
        await journal.accepted(request("run1-1"))
        journal.outcome(outcome("run1-1", Outcome.COMPLETED))
        one = books(tmp_path, journal, writer)
        line, level = await one.close(STATE, [CutRequest("run1-1", RequestClass.CHAT, 1.0)] * cut, 5.0)
        assert one.status.status == status
        assert (line.endswith(f"; status {status}"), "; cut 1 (chat 1, oldest 1.0 s)" in line) == (True, bool(cut))
        assert level == ("warning" if cut else "info")

    run_journal(tmp_path / "ledger", body)
    report = json.loads((tmp_path / REPORT).read_text())
    assert (report["status"], report["cut"]["n"], report["requests"]["accepted"]) == (status, cut, 1)


def test_the_last_line_of_giving_up_begins_with_the_reason(tmp_path: Path) -> None:
    """And it ends with the status, as every last line does."""
    gave_up = replace(STATE, problem="the start fails each time", give_up_status=78)

    async def body(journal: LedgerJournal, writer: LedgerWriter) -> None:
        line, _ = await books(tmp_path, journal, writer).close(gave_up, [], 5.0)
        assert line.startswith("gave up: the start fails each time; requests: accepted 0")
        assert line.endswith("; status 78")

    run_journal(tmp_path / "ledger", body)


@pytest.mark.parametrize("hangs", ["write", "fsync"])
def test_a_disk_that_hangs_costs_evidence_and_not_the_end(tmp_path: Path, hangs: str) -> None:
    """The books are closed within their time, the status is 82, and the report that can be written says so."""
    ops = FailingOps()

    async def body(journal: LedgerJournal, writer: LedgerWriter) -> None:
        ops.hang = hangs
        ops.gate.clear()
        one = books(tmp_path, journal, writer)
        try:
            line, level = await one.close(STATE, [], 0.5)
        finally:
            ops.gate.set()
        assert one.status.status == 82
        assert "evidence is MISSING" in line
        assert (line.endswith("; status 82"), level) == (True, "warning")

    run_journal(tmp_path / "ledger", body, ops=ops, policy=LedgerPolicy(sync="interval", interval_s=0.001))
    assert json.loads((tmp_path / REPORT).read_text())["evidence_missing"]
