"""Does the ledger balance: the checks of each run, and what a crash left to be closed.

Rules:
* Per run: accepted = completed + failed + cancelled + open; one outcome an id; every accepted id has an execution
  state; a run that has ended has none `running`. Numbers of the two registers are never compared or added.
* The youngest run without a `balance` line may still live: what it has open is not a violation.
* Where lines are gone (a run is `partial`) counts are not compared, and ids whose lines may be among them are not called
  wrong. Damage itself, a line or a segment that cannot be read or is missing, always breaks the audit.
* Recovery is a function from what the lines say to the lines that are missing, so doing it twice adds nothing, and a
  crash in the middle of it is mended by the next one.
* An execution counts as stopped after a crash only when the engine's processes are proven gone; else it is `unknown`,
  and a later start that has the proof settles it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from vllm_supervisor.core.accounts import FINAL, Fold, IdAccount, RunAccount
from vllm_supervisor.core.plain_text import one_line
from vllm_supervisor.core.words import EndedBy, Evidence, ExecutionState, Outcome

SUPERVISOR_LOST = "supervisor_lost"
EVIDENCE_MISSING = "evidence_missing"  # the run did end, but lines of it are gone


@dataclass(frozen=True, slots=True)
class RunAudit:
    """What the audit says of one run; `live` means it may still be writing."""

    run: str
    release: str
    live: bool
    gone: str  # what is missing of its lines, "" for nothing
    violations: tuple[str, ...]

    @property
    def partial(self) -> bool:
        """Whether lines of it are missing, so that not everything could be checked."""
        return bool(self.gone)

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        return not self.violations


@dataclass(frozen=True, slots=True)
class Audit:
    """The audit of a whole ledger. `evidence` names what is missing and belongs to no single run."""

    runs: tuple[RunAudit, ...]
    evidence: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether every run balances and no evidence is missing."""
        return not self.evidence and all(run.holds for run in self.runs)


def audit(fold: Fold) -> Audit:
    """Check every run of a fold that had no window."""
    last = next(reversed(fold.runs), None)
    runs = tuple(_audit_run(run, live=name == last and run.balance is None) for name, run in fold.runs.items())
    evidence = list(fold.damage)
    if fold.damage_count > len(evidence):
        evidence.append(f"and {fold.damage_count - len(evidence)} more")
    return Audit(runs, tuple(evidence))


def _audit_run(run: RunAccount, *, live: bool) -> RunAudit:
    found = list(run.violations)
    if run.violation_count > len(found):
        found.append(f"and {run.violation_count - len(found)} more")
    if run.lost:
        found.append(f"{run.lost} lines could not be written")
    if run.unreadable:
        found.append(f"{run.unreadable} of its lines cannot be read")
    if not live:
        accounts = [account for account in run.open_ids.values() if account.after >= run.hole]
        _note(found, [a.id for a in accounts if a.outcome is None], "accepted, but without an outcome")
        _note(found, [a.id for a in accounts if a.execution is None], "without an execution state")
        _note(
            found,
            [a.id for a in accounts if a.execution is ExecutionState.RUNNING],
            "still running in the execution register of a run that has ended",
        )
    counts_are_partial = run.partial or (run.balance is not None and run.balance.get("partial") is True)
    if run.balance is not None and not counts_are_partial:
        for name, counted in _request_counts(run).items():
            if run.balance.get(name) != counted:
                found.append(f"the balance line says {name} {run.balance.get(name)}, the lines say {counted}")
    return RunAudit(run.run, run.release, live, _gone(run), tuple(found))


def _gone(run: RunAccount) -> str:
    if run.hole:
        return "lines of it are missing"
    if run.partial:
        return "its beginning is missing: pruned or removed"
    if run.balance is not None and run.balance.get("partial") is True:
        return "closed from a part of its lines"
    return ""


def _note(found: list[str], ids: list[str], what: str) -> None:
    if ids:
        more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
        found.append(f"{len(ids)} {what}: {one_line(', '.join(ids[:3]), 300)}{more}")


def _request_counts(run: RunAccount) -> dict[str, int]:
    return {"accepted": run.accepted} | {outcome.value: run.count(outcome) for outcome in Outcome}


def balance_fields(
    requests: Mapping[str, int], executions: Mapping[str, int], *, rejected: int, lost: int
) -> dict[str, object]:
    """Build the fields of a `balance` line from counts by name: both registers, side by side, and whether they hold."""
    outcomes = {outcome.value: requests.get(outcome, 0) for outcome in Outcome}
    accepted = requests.get("accepted", 0)
    states = {state.value: executions.get(state, 0) for state in ExecutionState}
    every_id_has_a_state = sum(states.values()) == accepted
    return {
        "accepted": accepted,
        **outcomes,
        "rejected": rejected,
        "executions": states,
        "lost": lost,
        "holds": accepted == sum(outcomes.values())
        and every_id_has_a_state
        and states[ExecutionState.RUNNING] == 0
        and lost == 0,
    }


class Fate(StrEnum):
    """What is known of a run that left something open."""

    ALIVE = "alive"  # its supervisor still runs: its account is not ours to close
    GONE = "gone"  # supervisor and every process of its engine are proven gone
    UNPROVEN = "unproven"  # the supervisor is gone, of the engine nobody can say


@dataclass(frozen=True, slots=True)
class Entry:
    """One line to append to the account of `run`."""

    run: str
    inc: int
    event: str
    fields: dict[str, object]


def unfinished(fold: Fold, me: str) -> list[RunAccount]:
    """List the runs, but for `me`, that need a look: something is not settled, or no balance was written."""
    return [run for name, run in fold.runs.items() if name != me and (run.open_ids or run.balance is None)]


def recover(fold: Fold, fates: Mapping[str, Fate], me: str) -> list[Entry]:
    """Say which lines close what lost runs left open. A run without a fate is left alone.

    A ledger to which these lines were added needs none: `recover` of its fold with the same fates is empty.
    """
    entries: list[Entry] = []
    for run in unfinished(fold, me):
        fate = fates.get(run.run, Fate.ALIVE)
        if fate is Fate.ALIVE:
            continue
        outcomes, executions = dict(_request_counts(run)), dict(run.executions)
        for account in run.open_ids.values():
            if account.outcome is None:
                entries.append(_outcome_entry(account, SUPERVISOR_LOST if run.balance is None else EVIDENCE_MISSING))
                outcomes[Outcome.OPEN] += 1
            state, evidence = _settle(fate)
            if account.execution not in FINAL and state is not account.execution:
                entries.append(
                    Entry(run.run, account.inc, "execution", {"id": account.id, "state": state, "evidence": evidence})
                )
                if account.execution is not None:
                    executions[account.execution] -= 1
                executions[state] = executions.get(state, 0) + 1
        if run.balance is None:
            fields = balance_fields(
                outcomes, executions, rejected=sum(run.rejected.values()), lost=run.lost + run.unreadable
            )
            if run.partial:
                fields["partial"] = True
            entries.append(Entry(run.run, run.inc, "balance", fields | {"clean": False}))
    return entries


def _outcome_entry(account: IdAccount, why: str) -> Entry:
    return Entry(
        account.run,
        account.inc,
        "outcome",
        {
            "id": account.id,
            "outcome": Outcome.OPEN,
            "why": why,
            "status": None,
            "stream": False,
            "ended_by": EndedBy.SUPERVISOR,
            "bytes": 0,
            "first_byte_s": None,
            "duration_s": None,
            "marker": "",
        },
    )


def _settle(fate: Fate) -> tuple[ExecutionState, Evidence]:
    """Decide an execution of a lost run that is not final."""
    if fate is Fate.GONE:
        return ExecutionState.CONFIRMED_STOPPED, Evidence.PROCESS_GONE
    return ExecutionState.UNKNOWN, Evidence.NONE
