"""At a start: close what lost runs left open in the ledgers, once, whatever the crash left behind.

Rules:
* Call it when the leftovers of earlier engines have been swept, so that their death can be proven, and before or after
  the first acceptances of this run: it never touches this run's own account, and reads nothing of it.
* A lost run is read whole, from its first line on: only so can its balance be right. A thread reads, line by line.
* Whoever is killed meanwhile leaves the work to the next start: only when the lines that close an account are in the
  file does any line say that a start need not read from so far back, and only then is anything pruned.
* Damage is no reason not to start: it is told, kept, and counted as missing evidence of the run that it is in.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import trio

from vllm_supervisor.adapters import ledger_reader
from vllm_supervisor.adapters.ledger_reader import Position
from vllm_supervisor.adapters.threads import in_thread
from vllm_supervisor.core.accounts import FINAL, RunAccount
from vllm_supervisor.core.audit import Entry, Fate, recover, unfinished
from vllm_supervisor.runtime.journal import LedgerJournal
from vllm_supervisor.runtime.ledger_writer import LedgerWriter

FLUSH_S = 5.0  # how long to wait for the file before asking again


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was closed: runs, requests without an outcome, executions proven stopped, executions that stay unknown.

    `alive` names runs of supervisors that still live. `damage` names the first lines and segments that cannot be read
    or are missing, `damage_count` is the number of all.
    """

    runs: int
    opened: int
    stopped: int
    unknown: int
    alive: tuple[str, ...]
    damage: tuple[str, ...]
    damage_count: int


@dataclass(frozen=True, slots=True)
class _Found:
    entries: list[Entry]
    homes: dict[str, int]
    read_from: int | None  # the first segment of the runs that a later start has to look at again
    settled: bool
    summary: Recovered


async def recover_ledger(
    directory: Path, journal: LedgerJournal, writer: LedgerWriter, fate: Callable[[RunAccount], Fate]
) -> Recovered:
    """Read the ledger in a thread, append what is missing, allow pruning. Raises OSError if it cannot be listed."""
    found = await in_thread(_read, directory, writer.began, journal.identity.run, fate)
    journal.append_recovered(found.entries, settled=found.settled)
    while not await writer.flush(FLUSH_S):  # noqa: ASYNC110 - the disk decides when, and tells nobody
        await trio.sleep(FLUSH_S)
    writer.recovered(found.homes, found.read_from)
    return found.summary


def _read(directory: Path, until: Position, me: str, fate: Callable[[RunAccount], Fate]) -> _Found:
    fold = ledger_reader.fold(directory, first=ledger_reader.first_needed(directory, until), until=until)
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
        damage=tuple(fold.damage),
        damage_count=fold.damage_count,
    )
    unsettled = [
        run
        for name, known in fates.items()
        if (run := fold.runs[name]) and (known is Fate.ALIVE or (known is Fate.UNPROVEN and _has_unknown(run)))
    ]
    read_from = min((run.first_segment for run in unsettled), default=None)
    return _Found(entries, homes, read_from, not unsettled, summary)


def _has_unknown(run: RunAccount) -> bool:
    """Say whether executions of a run that is closed stay unknown, so that a later start may prove their end."""
    return any(account.execution not in FINAL for account in run.open_ids.values())
