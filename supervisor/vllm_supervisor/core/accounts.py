"""The account of each run, folded from the ledger's lines: what became of every id, the counts, what is wrong.

Rules:
* The two registers stand side by side. Outcomes are counted per class, executions per state; nothing adds them.
* A fold is fed records in the order they were written, and remembers in full only ids that are not settled (no outcome
  yet, or an execution that is not final). A settled id costs one bit, so the fold of a ledger of any age fits in memory.
* A run of which lines are gone (segments pruned or deleted, a line that cannot be read) is `partial`: what cannot be
  checked is not called wrong, the damage itself is.
* A line that contradicts an earlier one counts as a violation and changes nothing.
* Whatever the lines hold, the memory is bounded: what is more than any supervisor leaves behind is not followed, and said.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from vllm_supervisor.core.ledger_parser import Record
from vllm_supervisor.core.plain_text import one_line
from vllm_supervisor.core.proc import ProcessId
from vllm_supervisor.core.words import ExecutionState, Outcome

_K = TypeVar("_K")

MAX_VIOLATIONS = 1000  # of a run, kept in words; the rest is counted
MAX_DAMAGE = 20  # of a ledger, kept in words
MAX_RUNS = 100_000
MAX_OPEN = 1_000_000  # ids that are not settled, of all runs
MAX_KINDS = 1_000  # of each counter's keys; what comes beyond them counts as `other`
MAX_PROCESSES = 65_536  # of a run's engines
_OTHER = "other"
_SHOWN = 300  # characters of a sentence
_PAGE = 1024  # settled ids a page

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
    after: int = 0  # how many pieces of damage stand before its acceptance
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
    first_segment: int = 0  # the one that holds its first line
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
    unreadable: int = 0  # lines among its own that cannot be read
    hole: int = 0  # ids accepted after fewer pieces of damage may have lines among those that are gone
    seen: int = field(default=0, repr=False)  # pieces of damage before its last line
    settled: dict[int, int] = field(default_factory=dict, repr=False)  # page: one bit for each number of RUN-NUMBER
    settled_others: set[int] = field(default_factory=set, repr=False)  # hashes of ids of another shape

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
            self.violations.append(one_line(sentence, _SHOWN))

    def _number(self, request_id: str) -> int | None:
        run, _, number = request_id.rpartition("-")
        return int(number) if run == self.run and number.isdecimal() and len(number) < 10 else None

    def is_settled(self, request_id: str) -> bool:
        """Whether the account of this id was closed for good."""
        number = self._number(request_id)
        if number is None:
            return hash(request_id) in self.settled_others
        page, bit = divmod(number, _PAGE)
        return bool(self.settled.get(page, 0) >> bit & 1)

    def settle(self, account: IdAccount) -> None:
        """Forget an id but for the one bit that says it was here."""
        del self.open_ids[account.id]
        number = self._number(account.id)
        if number is None:
            self.settled_others.add(hash(account.id))
            return
        page, bit = divmod(number, _PAGE)
        self.settled[page] = self.settled.get(page, 0) | 1 << bit


class Fold:
    """The accounts of all runs, built line by line."""

    def __init__(self, since: str = "") -> None:
        """`since` is an `at` stamp: requests accepted before it are followed, but not counted."""
        self.runs: dict[str, RunAccount] = {}
        self.unreadable = 0  # lines
        self.unreadable_segments = 0
        self.missing_segments = 0
        self.damage: list[str] = []  # the first pieces, in words
        self.damaged_since = False  # whether a piece of damage may lie inside the window
        self._since = since
        self._segment = 0
        self._pieces = 0  # of what is gone: damage, and what was pruned meanwhile
        self._damages = 0
        self._unplaced = False  # there is damage behind the last line
        self._open = 0
        self._writer: RunAccount | None = None  # whose lines stand here

    def segment(self, number: int) -> None:
        """Say that the lines of segment `number` follow; a jump means that segments are missing between."""
        first, last = self._segment + 1, number - 1
        if self._segment and first <= last:
            self.missing_segments += last - first + 1
            which = f"segment {first} is" if first == last else f"segments {first} to {last} are"
            self._damage(f"{which} missing")
        self._segment = number

    def pruned(self, number: int) -> None:
        """Say that segment `number` went while this was read, as did all before it: that is no damage."""
        self._segment = number
        self._pieces += 1

    def unreadable_segment(self, number: int, reason: str) -> None:
        """Say that nothing can be read of segment `number`, or nothing from some place on."""
        self.unreadable_segments += 1
        self._damage(f"segment {number} is unreadable: {reason}")

    def unreadable_line(self, segment: int, line: int, reason: str) -> None:
        """Say that line `line` (from 1) of a segment is none."""
        self.unreadable += 1
        if self._writer is not None and self._writer.balance is None:
            self._writer.unreadable += 1
        self._damage(f"segment {segment} line {line} is unreadable: {reason}")

    @property
    def damage_count(self) -> int:
        """How many pieces of damage there are; `damage` has the first of them."""
        return self._damages

    def add(self, record: Record) -> str:
        """Take one record; return "", or why it is none of a ledger's that we follow."""
        event, name = record["event"], record["run"]
        foreign = "by" in record
        run = self.runs.get(name)
        if run is None:
            if len(self.runs) >= MAX_RUNS:
                return f"it is of one run more than {MAX_RUNS}"
            boot = "" if foreign else record["boot"]
            run = self.runs[name] = RunAccount(name, boot, partial=event != "life", first_at=record["at"])
            run.first_segment, run.seen = self._segment, self._pieces
        elif run.seen != self._pieces:
            self._notice(run)
        if not foreign:
            run.boot = run.boot or record["boot"]
            if record["boot"] != run.boot:
                return f"it is of another boot than its run {name}"
            self._writer = run
        if self._unplaced:
            self._unplaced = False
            self.damaged_since = self.damaged_since or record["at"] >= self._since
        run.last_at = record["at"]
        run.inc = max(run.inc, record["inc"])
        step = self._steps.get(event)
        if step is not None:
            step(self, run, record)
        return ""

    def end(self) -> None:
        """Say that this was all."""
        self.damaged_since = self.damaged_since or self._unplaced
        for run in self.runs.values():
            if run.seen != self._pieces:
                self._notice(run)

    def _damage(self, sentence: str) -> None:
        self._pieces += 1
        self._damages += 1
        self._unplaced = True
        if len(self.damage) < MAX_DAMAGE:
            self.damage.append(sentence)

    def _notice(self, run: RunAccount) -> None:
        """Take into a run's account that lines may be gone since its last one."""
        run.seen = self._pieces
        if run.balance is None:
            run.partial, run.hole = True, self._pieces

    def open_ids(self) -> Iterator[IdAccount]:
        """Every id that is not settled, oldest run first."""
        for run in self.runs.values():
            yield from run.open_ids.values()

    # -- one method a kind of line -----------------------------------------------------------------------------

    def _life(self, run: RunAccount, record: Record) -> None:
        run.release, run.version = record.get("release", ""), record.get("version", "")
        run.name, run.pid, run.start = record.get("name", ""), record.get("pid", 0), record.get("start", 0)

    def _accepted(self, run: RunAccount, record: Record) -> None:
        request_id = record["id"]
        if request_id in run.open_ids or run.is_settled(request_id):
            run.violate(f"{request_id}: accepted twice")
            return
        if self._open >= MAX_OPEN:
            run.violate(f"{request_id}: one open request more than {MAX_OPEN}: not followed")
            return
        self._open += 1
        counted = record["at"] >= self._since
        run.open_ids[request_id] = IdAccount(
            request_id,
            run.run,
            record["inc"],
            record.get("class", _OTHER),
            record["at"],
            self._segment,
            counted,
            self._pieces,
        )
        run.accepted += counted

    def _find(self, run: RunAccount, record: Record, what: str) -> IdAccount | None:
        request_id = record["id"]
        account = run.open_ids.get(request_id)
        if account is None and not run.is_settled(request_id) and not run.partial:
            run.violate(f"{request_id}: {what} without an acceptance")
        return account

    def _outcome(self, run: RunAccount, record: Record) -> None:
        account = self._find(run, record, "outcome")
        if account is None:
            if run.is_settled(record["id"]):
                run.violate(f"{record['id']}: a second outcome")
            return
        if account.outcome is not None:
            run.violate(f"{account.id}: a second outcome")
            return
        try:
            account.outcome = Outcome(record["outcome"])
        except ValueError:
            run.violate(f"{account.id}: no such outcome as {record['outcome']!r}")
            return
        if account.counted:
            _count(run.outcomes, (account.request_class, account.outcome), (_OTHER, account.outcome))
            if account.outcome is not Outcome.COMPLETED or record.get("why"):
                _count(run.why, record.get("why", ""), _OTHER)
            if record.get("stream"):
                run.streams[account.outcome] += 1
        self._maybe_settle(run, account)

    def _execution(self, run: RunAccount, record: Record) -> None:
        account = self._find(run, record, "execution")
        try:
            state = ExecutionState(record["state"])
        except ValueError:
            run.violate(f"{record['id']}: no such execution state as {record['state']!r}")
            return
        if account is None:  # settled: its state is final and not remembered, but an open state must not follow
            if run.is_settled(record["id"]) and state not in FINAL:
                run.violate(f"{record['id']}: execution {state} after its account was settled")
            return
        if state not in FOLLOWS[account.execution]:
            run.violate(f"{account.id}: execution {state} after {account.execution}")
            return
        if account.counted:
            if account.execution is not None:
                run.executions[account.execution] -= 1
            run.executions[state] += 1
        account.execution, account.evidence = state, record.get("evidence", "")
        self._maybe_settle(run, account)

    def _maybe_settle(self, run: RunAccount, account: IdAccount) -> None:
        if account.outcome is not None and account.execution in FINAL:
            self._open -= 1
            run.settle(account)

    def _rejected(self, run: RunAccount, record: Record) -> None:
        if record["at"] >= self._since:
            key = record.get("class", _OTHER), record.get("reason", _OTHER)
            _count(run.rejected, key, (_OTHER, _OTHER), record.get("n", 1))

    def _engine(self, run: RunAccount, record: Record) -> None:
        for process in record.get("processes", ()):
            if len(run.engine_processes) < MAX_PROCESSES:
                run.engine_processes.add(ProcessId(process["pid"], process.get("start", 0)))

    def _balance(self, run: RunAccount, record: Record) -> None:
        run.balance = record

    def _gap(self, run: RunAccount, record: Record) -> None:
        run.lost += record.get("lost", 1)

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


def _count(counter: Counter[_K], key: _K, other: _K, number: int = 1) -> None:
    counter[key if key in counter or len(counter) < MAX_KINDS else other] += number
