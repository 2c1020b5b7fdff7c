"""At a start: close what lost runs left open in the ledgers, once, whatever the crash left behind.

Call it when the leftovers of earlier engines have been swept, so that their death can be proven, and before or after
the first acceptances of this run: it never touches this run's own account.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from vllm_supervisor.adapters import ledger_reader
from vllm_supervisor.core.accounts import RunAccount
from vllm_supervisor.core.audit import Entry, Fate, recover, unfinished
from vllm_supervisor.core.words import ExecutionState
from vllm_supervisor.runtime.journal import LedgerJournal
from vllm_supervisor.runtime.ledger_writer import LedgerWriter


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was closed: runs, requests without an outcome, executions proven stopped, executions that stay unknown.

    `alive` names runs of supervisors that still live; `unreadable` counts lines, `missing` whole segments.
    """

    runs: int
    opened: int
    stopped: int
    unknown: int
    alive: tuple[str, ...]
    unreadable: int
    missing: int


@dataclass(frozen=True, slots=True)
class _Found:
    entries: list[Entry]
    homes: dict[str, int]
    settled: bool
    summary: Recovered


async def recover_ledger(
    directory: Path, journal: LedgerJournal, writer: LedgerWriter, fate: Callable[[RunAccount], Fate]
) -> Recovered:
    """Read the ledger in a thread, append what is missing, allow pruning. Raises OSError if it cannot be read."""
    found = await trio.to_thread.run_sync(partial(_read, directory, journal.identity.run, fate))
    journal.append_recovered(found.entries, settled=found.settled)
    writer.recovered(found.homes)
    return found.summary


def _read(directory: Path, me: str, fate: Callable[[RunAccount], Fate]) -> _Found:
    fold = ledger_reader.fold(directory, first=ledger_reader.first_needed(directory, me))
    fates = {run.run: fate(run) for run in unfinished(fold, me)}
    alive = tuple(run for run, known in fates.items() if known is Fate.ALIVE)
    homes = {account.id: account.segment for run in alive for account in fold.runs[run].open_ids.values()}
    entries = recover(fold, fates, me)
    states = [entry.fields["state"] for entry in entries if entry.event == "execution"]
    summary = Recovered(
        runs=len({entry.run for entry in entries}),
        opened=sum(entry.event == "outcome" for entry in entries),
        stopped=states.count("confirmed_stopped"),
        unknown=states.count("unknown"),
        alive=alive,
        unreadable=fold.unreadable,
        missing=fold.missing_segments,
    )
    still_unknown = any(
        account.execution is ExecutionState.UNKNOWN for run in fold.runs.values() for account in run.open_ids.values()
    )
    settled = not alive and not summary.unknown and (not still_unknown or Fate.UNPROVEN not in fates.values())
    return _Found(entries, homes, settled, summary)
