"""The account of each run, folded from the ledger's lines: what became of every id, the counts, what is wrong.

Rules:
* The two registers stand side by side. Outcomes are counted per class, executions per state; nothing adds them.
* A fold is fed records in the order they were written, and remembers in full only ids that are not settled (no outcome
  yet, or an execution that is not final). A settled id costs one bit, so the fold of a ledger of any age fits in memory.
* A run whose first lines are gone (pruned or deleted segments) is `partial`: what cannot be checked is not called wrong.
* A line that contradicts an earlier one counts as a violation and changes nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from vllm_supervisor.core.ledger import Record
from vllm_supervisor.core.proc import ProcessId
from vllm_supervisor.core.words import ExecutionState, Outcome

MAX_VIOLATIONS = 1000  # kept in words; the rest is counted

# What may follow what in the execution register; None is an id of which nothing was said yet.
FOLLOWS: dict[ExecutionState | None, frozenset[ExecutionState]] = {
    None: frozenset(ExecutionState),
    ExecutionState.RUNNING: frozenset(ExecutionState) - {ExecutionState.NOT_STARTED},
    ExecutionState.UNKNOWN: frozenset(
        {ExecutionState.UNKNOWN, ExecutionState.COMPLETED, ExecutionState.CONFIRMED_STOPPED}
    ),
    ExecutionState.NOT_STARTED: frozenset({ExecutionState.NOT_STARTED}),
    ExecutionState.COMPLETED: frozenset({ExecutionState.COMPLETED}),
    ExecutionState.CONFIRMED_STOPPED: frozenset({ExecutionState.CONFIRMED_STOPPED}),
}
FINAL = frozenset({ExecutionState.NOT_STARTED, ExecutionState.COMPLETED, ExecutionState.CONFIRMED_STOPPED})


@dataclass(slots=True)
class IdAccount:
    """One request whose account is not settled. `segment` is the number of the segment that holds its acceptance."""

    id: str
    run: str
    inc: int
    request_class: str
    at: str
    segment: int
    counted: bool = True  # accepted inside the window asked for
    outcome: Outcome | None = None
    execution: ExecutionState | None = None
    evidence: str = ""


@dataclass(slots=True)
class RunAccount:
    """One run of the supervisor. Counters hold only what lies in the window asked for; `open_ids` never do."""

    run: str
    boot: str
    partial: bool
    release: str = ""
    version: str = ""
    name: str = ""
    pid: int = 0
    start: int = 0  # when the supervisor's process started (clock ticks since boot), 0 if not known
    first_at: str = ""
    last_at: str = ""
    inc: int = 0
    accepted: int = 0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)  # (class, outcome)
    why: Counter[str] = field(default_factory=Counter)  # of outcomes that are not plain completions
    streams: Counter[str] = field(default_factory=Counter)  # outcomes of streamed answers
    executions: Counter[str] = field(default_factory=Counter)  # by state, one for each id with a state
    rejected: Counter[tuple[str, str]] = field(default_factory=Counter)  # (class, reason)
    open_ids: dict[str, IdAccount] = field(default_factory=dict)  # not settled
    engine_processes: set[ProcessId] = field(default_factory=set)  # every one that was ever named
    balance: Record | None = None
    lost: int = 0  # lines the writer itself said it could not write
    violations: list[str] = field(default_factory=list)
    violation_count: int = 0
    settled: bytearray = field(default_factory=bytearray, repr=False)  # one bit for each number of RUN-NUMBER
    settled_others: set[str] = field(default_factory=set, repr=False)  # ids of another shape

    def count(self, outcome: Outcome) -> int:
        """How many requests in the window ended as `outcome`."""
        return sum(n for (_, name), n in self.outcomes.items() if name == outcome)

    @property
    def without_outcome(self) -> int:
        """How many ids have no outcome, whatever the window."""
        return sum(1 for account in self.open_ids.values() if account.outcome is None)

    def violate(self, sentence: str) -> None:
        """Note a contradiction."""
        self.violation_count += 1
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(sentence)

    def _number(self, request_id: str) -> int | None:
        run, _, number = request_id.rpartition("-")
        return int(number) if run == self.run and number.isdecimal() and len(number) < 10 else None

    def is_settled(self, request_id: str) -> bool:
        """Whether the account of this id was closed for good."""
        number = self._number(request_id)
        if number is None:
            return request_id in self.settled_others
        byte, bit = divmod(number, 8)
        return byte < len(self.settled) and bool(self.settled[byte] >> bit & 1)

    def settle(self, account: IdAccount) -> None:
        """Forget an id but for the one bit that says it was here."""
        del self.open_ids[account.id]
        number = self._number(account.id)
        if number is None:
            self.settled_others.add(account.id)
            return
        byte, bit = divmod(number, 8)
        if byte >= len(self.settled):
            self.settled.extend(bytes(max(byte + 1 - len(self.settled), len(self.settled), 64)))
        self.settled[byte] |= 1 << bit


class Fold:
    """The accounts of all runs, built line by line."""

    def __init__(self, since: str = "") -> None:
        """`since` is an `at` stamp: requests accepted before it are followed, but not counted."""
        self.runs: dict[str, RunAccount] = {}
        self.unreadable = 0
        self.missing_segments = 0
        self._since = since
        self._segment = 0

    def segment(self, number: int) -> None:
        """Say that the lines of segment `number` follow; a jump means that segments are missing between."""
        if self._segment and number > self._segment + 1:
            self.missing_segments += number - self._segment - 1
            for run in self.runs.values():
                if run.balance is None:
                    run.partial = True
        self._segment = number

    def add(self, record: Record | None) -> None:
        """Take one record; None stands for a line that cannot be read."""
        if record is None:
            self.unreadable += 1
            return
        event, name = record["event"], record["run"]
        run = self.runs.get(name)
        if run is None:
            run = self.runs[name] = RunAccount(name, record["boot"], partial=event != "life", first_at=record["at"])
        run.last_at = record["at"]
        run.inc = max(run.inc, record["inc"])
        step = self._steps.get(event)
        if step is not None:
            step(self, run, record)

    def open_ids(self) -> Iterator[IdAccount]:
        """Every id that is not settled, oldest run first."""
        for run in self.runs.values():
            yield from run.open_ids.values()

    # -- one method a kind of line -----------------------------------------------------------------------------

    def _life(self, run: RunAccount, record: Record) -> None:
        run.release, run.version = str(record.get("release", "")), str(record.get("version", ""))
        run.name, run.pid = str(record.get("name", "")), int(record.get("pid") or 0)
        run.start = int(record.get("start") or 0)

    def _accepted(self, run: RunAccount, record: Record) -> None:
        request_id = str(record.get("id"))
        if request_id in run.open_ids or run.is_settled(request_id):
            run.violate(f"{request_id}: accepted twice")
            return
        counted = record["at"] >= self._since
        run.open_ids[request_id] = IdAccount(
            request_id, run.run, record["inc"], str(record.get("class")), record["at"], self._segment, counted
        )
        run.accepted += counted

    def _find(self, run: RunAccount, record: Record, what: str) -> IdAccount | None:
        request_id = str(record.get("id"))
        account = run.open_ids.get(request_id)
        if account is None and not run.is_settled(request_id) and not run.partial:
            run.violate(f"{request_id}: {what} without an acceptance")
        return account

    def _outcome(self, run: RunAccount, record: Record) -> None:
        account = self._find(run, record, "outcome")
        if account is None:
            if run.is_settled(str(record.get("id"))):
                run.violate(f"{record['id']}: a second outcome")
            return
        if account.outcome is not None:
            run.violate(f"{account.id}: a second outcome")
            return
        try:
            account.outcome = Outcome(str(record.get("outcome")))
        except ValueError:
            run.violate(f"{account.id}: no such outcome as {record.get('outcome')!r}")
            return
        if account.counted:
            run.outcomes[account.request_class, account.outcome] += 1
            if account.outcome is not Outcome.COMPLETED or record.get("why"):
                run.why[str(record.get("why", ""))] += 1
            if record.get("stream"):
                run.streams[account.outcome] += 1
        self._maybe_settle(run, account)

    def _execution(self, run: RunAccount, record: Record) -> None:
        account = self._find(run, record, "execution")
        try:
            state = ExecutionState(str(record.get("state")))
        except ValueError:
            run.violate(f"{record.get('id')}: no such execution state as {record.get('state')!r}")
            return
        if account is None:  # settled: its state is final and not remembered, but an open state must not follow
            if run.is_settled(str(record.get("id"))) and state not in FINAL:
                run.violate(f"{record['id']}: execution {state} after its account was settled")
            return
        if state not in FOLLOWS[account.execution]:
            run.violate(f"{account.id}: execution {state} after {account.execution}")
            return
        if account.counted:
            if account.execution is not None:
                run.executions[account.execution] -= 1
            run.executions[state] += 1
        account.execution, account.evidence = state, str(record.get("evidence", ""))
        self._maybe_settle(run, account)

    @staticmethod
    def _maybe_settle(run: RunAccount, account: IdAccount) -> None:
        if account.outcome is not None and account.execution in FINAL:
            run.settle(account)

    def _rejected(self, run: RunAccount, record: Record) -> None:
        if record["at"] >= self._since:
            number = record.get("n")
            run.rejected[str(record.get("class")), str(record.get("reason"))] += number if type(number) is int else 1

    def _engine(self, run: RunAccount, record: Record) -> None:
        for process in record.get("processes") or ():
            if isinstance(process, dict) and isinstance(process.get("pid"), int):
                run.engine_processes.add(ProcessId(process["pid"], int(process.get("start") or 0)))

    def _balance(self, run: RunAccount, record: Record) -> None:
        run.balance = record

    def _gap(self, run: RunAccount, record: Record) -> None:
        number = record.get("lost")
        run.lost += number if type(number) is int else 1

    _steps: ClassVar[dict[str, Callable[["Fold", RunAccount, Record], None]]] = {
        "life": _life,
        "segment": _life,  # a later segment begins by repeating what the run is
        "accepted": _accepted,
        "outcome": _outcome,
        "execution": _execution,
        "rejected": _rejected,
        "engine": _engine,
        "balance": _balance,
        "gap": _gap,
    }
