"""The books: what lost runs left open is closed at the start, ours at the end, with the drain report."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import trio

from vllm_supervisor.adapters import clock, json_file
from vllm_supervisor.adapters.run_fate import fate
from vllm_supervisor.adapters.threads import in_thread
from vllm_supervisor.core import drain_report
from vllm_supervisor.core.drain_report import CutRequest, DrainFacts
from vllm_supervisor.core.lifecycle import State
from vllm_supervisor.core.own_status import Ending, OwnStatus, own_status
from vllm_supervisor.core.signal_names import SIGNALS
from vllm_supervisor.core.words import ExecutionState
from vllm_supervisor.runtime.journal import LedgerJournal
from vllm_supervisor.runtime.ledger_writer import LedgerWriter
from vllm_supervisor.runtime.recovery import recover_ledger

REPORT = "drain.json"


async def close_lost_runs(directory: Path, journal: LedgerJournal, writer: LedgerWriter) -> tuple[str, str]:
    """Close what lost runs left open; return what to log of it and of damage, "" for nothing. Raises OSError."""
    boot = journal.identity.boot
    found = await recover_ledger(directory, journal, writer, lambda run: fate(run, boot))
    closed = damage = ""
    if found.runs:
        closed = (
            f"closed the books of {found.runs} lost run(s): {found.opened} requests were open, "
            f"{found.stopped} executions proven stopped, {found.unknown} unknown"
        )
    if found.damage:
        more = f", and {found.damage_count - 1} more" if found.damage_count > 1 else ""
        damage = f"evidence of earlier runs is missing: {found.damage[0]}{more}; `ledger audit` lists it"
    return closed, damage


class Books:
    """Closes the account of this run."""

    def __init__(
        self,
        *,
        journal: LedgerJournal,
        writer: LedgerWriter,
        state_dir: Path,
        hold: Callable[[], None],
        reraise: tuple[str, ...],
        is_pid1: bool,
    ) -> None:
        """`hold` raises OSError where `state_dir` is not ours any more; `reraise` are the signals we end by."""
        self._journal = journal
        self._writer = writer
        self._path = state_dir / REPORT
        self._hold = hold
        self._reraise = reraise
        self._is_pid1 = is_pid1
        self.status = OwnStatus(1)

    async def close(self, state: State, cut: Sequence[CutRequest], within_s: float) -> tuple[str, str]:
        """Write the ledgers' ends and the report; return its one line and the line's level. Sets `status`.

        Never raises OSError.

        A disk that hangs gets no more than its share of `within_s`; whatever happens, the line and the status are told.
        """
        self.status = self._own_status(state, cut=len(cut), missing=True)  # until the opposite is proven
        holds = await self._journal.end(within_s * 0.5, clean=state.give_up_status is None)
        unsettled = self._journal.unsettled
        closed = await self._writer.aclose(within_s * 0.2)
        missing = not (holds and closed) or self._journal.health.missing
        self.status = self._own_status(state, cut=len(cut), missing=missing)
        requests = self._journal.requests
        facts = DrainFacts(
            run=self._journal.identity.run,
            release=self._journal.identity.release,
            requests={
                "accepted": requests.accepted,
                "rejected": requests.rejected,
                **{outcome.value: count for outcome, count in requests.outcomes.items()},
            },
            executions={state.value: count for state, count in self._journal.executions.items()},
            cut=cut,
            unsettled=unsettled,
            engine_gone=not state.unkillable,
            balance_holds=holds,
            evidence_missing=missing,
            status=self.status.status,
        )
        report = {"at": clock.stamp(), **drain_report.build(state.drain, facts, clock.monotonic())}
        line, level = drain_report.line(report), drain_report.level(report)
        problem: str | None = "the disk does not answer"
        with trio.move_on_after(within_s * 0.2):
            problem = await in_thread(_write, self._path, report, self._hold)
        if problem:
            line, level = f"{line}; {self._path} cannot be written: {problem}", "warning"
        # The last line on a terminal is the one that is read: it begins with why we gave up.
        return (f"gave up: {state.problem}; {line}" if state.give_up_status else line), level

    def _own_status(self, state: State, *, cut: int, missing: bool) -> OwnStatus:
        signum = state.stop_signum
        ending = Ending(
            by_signal=None if signum is None else SIGNALS.get(signum),
            gave_up=state.give_up_status,
            cut=cut,
            unknown_executions=self._journal.executions[ExecutionState.UNKNOWN],
            unremoved_processes=int(state.unkillable),
            evidence_missing=missing,
        )
        return own_status(ending, reraise=self._reraise, is_pid1=self._is_pid1)


def _write(path: Path, report: dict[str, Any], hold: Callable[[], None]) -> str | None:
    """Replace the file; return what went wrong."""
    try:
        hold()
        json_file.replace(path, report, indent=2)
    except OSError as fault:
        return fault.strerror
    return None
