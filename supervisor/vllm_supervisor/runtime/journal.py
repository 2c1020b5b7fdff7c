"""Both ledgers as the rest of the program sees them: facts in, lines out, counters at hand.

Rules:
* Called from the loop's thread only. Nothing here blocks; only `accepted` waits, for its own line.
* Exactly one outcome for each accepted id; a second one, or one for an id never accepted, raises KeyError: the caller's
  fault, not the ledger's. What is in flight when the run's account is closed has the outcome `open`.
* What `outcome` is told without an `execution` before it: a completed answer is a completed execution, a request no byte
  of which was sent has not started, and anything else still runs until the engine's side says otherwise.
* What the engine's side says arrives through `testimony`, `counts` and `engine_gone`, whoever observes it.
* Refusals are gathered by class, reason and second; `tick` writes those of the seconds that are over.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from vllm_supervisor.core.accounts import FINAL
from vllm_supervisor.core.admission import OpenRequest
from vllm_supervisor.core.audit import Entry, balance_fields
from vllm_supervisor.core.execution import Change, ExecutionRegister
from vllm_supervisor.core.journal import RequestCounts, RequestOutcome
from vllm_supervisor.core.ledger import Clock, LedgerHealth, Lines
from vllm_supervisor.core.proc import ProcessId
from vllm_supervisor.core.samples import RequestEvent
from vllm_supervisor.core.words import EndedBy, Evidence, ExecutionState, Outcome, Phase, RequestClass
from vllm_supervisor.runtime.ledger_writer import LedgerWriter
from vllm_supervisor.runtime.run_identity import RunIdentity

MAX_REASONS = 256  # kinds of refusal gathered within a second


class LedgerJournal:
    """Implements core.journal.Journal and takes everything else that goes into the ledgers."""

    def __init__(self, identity: RunIdentity, clock: Clock, writer: LedgerWriter, *, required: bool = False) -> None:
        """`writer` is started and closed by the caller; `required`: no request goes on without its acceptance."""
        self.identity = identity
        self._required = required
        self.requests = RequestCounts()
        self.inc = 0
        self._clock = clock
        self._writer = writer
        self._lines = Lines(clock, boot=identity.boot, run=identity.run)
        self._register = ExecutionRegister()
        self._open: dict[str, OpenRequest] = {}
        self._incs: dict[str, int] = {}  # incarnation of each id that has no final execution or no outcome yet
        self._held: list[tuple[ExecutionState, Evidence]] = []  # said of the exchange whose outcome comes next
        self._final: set[str] = set()  # ids whose execution is final while their outcome is still to come
        self._rejected: Counter[tuple[RequestClass, str]] = Counter()
        self._rejected_second = 0
        self._last_reading: float | None = None
        self._ended = self._closed = False  # nobody's end is observed any more; nothing is written any more
        self._others_settled = False  # nothing is unsettled in the accounts of earlier runs

    # -- what the front door says (core.journal.Journal) -------------------------------------------------------

    def begin_turn(self) -> None:
        """Give the lines of a turn one stamp and one write."""
        self._lines.begin_turn()
        self._writer.begin_turn()

    def end_turn(self) -> None:
        """Write the lines of the turn, and tell those who wait for that."""
        self._lines.end_turn()
        self._writer.end_turn()

    def accept(self, request: OpenRequest, told: Callable[[bool], None]) -> None:
        """Write the acceptance with the turn if the writer can do so without waiting, and say whether it did."""

        def written(done: bool) -> None:
            if done:
                self._enter(request)
            told(done)

        self._writer.accept(self._lines.accepted(self.inc, request.id, request.request_class), request.id, written)

    async def accepted(self, request: OpenRequest) -> bool:
        """Write the acceptance; returns once it is in the file, or False if that failed and the ledger is required."""
        self._enter(request)
        line = self._lines.accepted(self.inc, request.id, request.request_class)
        written = await self._writer.append_and_wait(line, request.id, required=self._required)
        return written or not self._required

    def _enter(self, request: OpenRequest) -> None:
        self.requests.accepted += 1
        self._open[request.id] = request
        self._incs[request.id] = self.inc
        self._register.begin(request.id, self.inc, request.admitted_at)

    def ended(self, outcome: RequestOutcome, state: ExecutionState, evidence: Evidence) -> None:
        """Write how a request ended. Raises KeyError if it has an outcome already or was never accepted."""
        name = outcome.id
        if (
            not self._ended and state in FINAL and self._register.settle(name, state)
        ):  # as usual: no more is to be learned
            del self._open[name]
            self.requests.count(outcome)
            data = self._lines.ended(self._incs.pop(name), ((state, evidence),), outcome)
            self._append(data, lines=2, settles=name)
        else:
            self.execution(name, state, evidence)
            self.outcome(outcome)

    def outcome(self, outcome: RequestOutcome) -> None:
        """Write the one outcome of a request, after what `execution` said. Raises KeyError as `ended` does."""
        if self._ended:
            return
        request = self._open.pop(outcome.id)
        self.requests.count(outcome)
        self._bind(request)
        changes: list[Change] = []
        if self._register.state(outcome.id) is None and outcome.id not in self._final:
            if outcome.outcome is Outcome.COMPLETED:
                changes += self._register.told(outcome.id, ExecutionState.COMPLETED, Evidence.ANSWER)
            elif request.sent_at is None:
                changes += self._register.told(outcome.id, ExecutionState.NOT_STARTED, Evidence.NONE)
        changes += self._register.ended(outcome.id, self._clock.monotonic())
        held, self._held = self._held, []
        data = self._lines.ended(self._incs[outcome.id], held, outcome)
        settles = ""
        if outcome.id in self._final:
            self._final.discard(outcome.id)
            del self._incs[outcome.id]
            settles = outcome.id
        self._append(data, lines=len(held) + 1, settles=settles)
        self._write(changes)

    def execution(self, request_id: str, state: ExecutionState, evidence: Evidence) -> None:
        """Write what is known of the engine's work for a request; what better evidence contradicts is dropped."""
        changes = self._register.told(request_id, state, evidence)
        if request_id not in self._open:
            self._write(changes)
            return
        for change in changes:  # written with the outcome that follows, in one go
            if change.state in FINAL:
                self._final.add(request_id)
            self._held.append((change.state, change.evidence))

    def rejected(self, request_class: RequestClass, reason: str) -> None:
        """Count a refusal."""
        self.requests.rejected += 1
        self.requests.refused[reason] += 1
        second = int(self._clock.monotonic())
        if second != self._rejected_second or len(self._rejected) >= MAX_REASONS:
            self._write_rejected()
            self._rejected_second = second
        self._rejected[request_class, reason] += 1

    # -- what the engine's side says ---------------------------------------------------------------------------

    def testimony(self, events: Iterable[RequestEvent]) -> None:
        """Take what the engine's scheduler reported of its requests, in order."""
        for request in self._open.values():
            self._bind(request)
        self._write(self._register.testimony(events))

    def testimony_lost(self) -> None:
        """Say that events of the scheduler may have been missed."""
        self._register.testimony_lost()

    def counts(self, reported: int, began: float) -> None:
        """Take a reading: the engine reports `reported` requests running or waiting; it `began` then (monotonic)."""
        known_since, self._last_reading = self._last_reading, began
        vouched = 0
        if known_since is not None:
            vouched = sum(
                1 for r in self._open.values() if r.first_byte_at is not None and r.first_byte_at < known_since
            )
        self._write(self._register.counts(reported, vouched, began))

    def engine_gone(self) -> None:
        """Say that every process of the incarnation of the moment is proven gone."""
        for request in self._open.values():
            self._bind(request)
        self._write(self._register.engine_gone(self.inc))

    # -- the supervisor's own life -----------------------------------------------------------------------------

    def life(self) -> None:
        """Write the first line of the run."""
        self._event("life", self.identity.fields())

    def phase(self, phase: Phase, why: str = "") -> None:
        """Write a change of phase."""
        self._event("phase", {"phase": phase, "why": why})

    def spawned(self, inc: int, main: ProcessId) -> None:
        """Write that incarnation `inc` was started with the main process `main`."""
        self.inc = inc
        self._event("engine", {"what": "spawned", "pid": main.pid, "processes": _processes([main])})

    def engine_processes(self, processes: Iterable[ProcessId]) -> None:
        """Write which processes the engine has, so that a later run can prove them gone."""
        self._event("engine", {"what": "processes", "processes": _processes(processes)})

    def engine(self, what: str, fields: Mapping[str, object]) -> None:
        """Write what else happens to the engine: `ready`, `exited` with pid, raw status and cause."""
        self._event("engine", {"what": what, **fields})

    def append_recovered(self, entries: Iterable[Entry], *, settled: bool) -> None:
        """Write what closes the accounts of lost runs; `settled` says that nothing in them is unsettled then."""
        self._others_settled = settled
        for entry in entries:
            self._append(self._lines.event(entry.inc, entry.event, entry.fields, run=entry.run))

    def tick(self) -> None:
        """Write the refusals of the seconds that are over; call it about once a second."""
        if self._rejected and int(self._clock.monotonic()) != self._rejected_second:
            self._write_rejected()

    async def end(self, limit_s: float, *, clean: bool) -> bool:
        """Close the run's account: what is unsettled becomes `unknown`, then the balance. Waits for the file.

        Returns whether the balance holds and everything is written. What happens later is not observed any more.
        """
        for request in list(self._open.values()):
            self.outcome(_still_open(request, self._clock.monotonic()))
        self._ended = True
        self._write_rejected()
        self._write(self._register.finish())
        health = self._writer.health()
        fields = self.balance(lost=health.lost)
        settled = self._others_settled and not (health.lost or self._register.states[ExecutionState.UNKNOWN])
        self._event("balance", fields | {"clean": clean, "settled": settled})
        self._closed = True
        flushed = await self._writer.flush(limit_s)
        return bool(fields["holds"]) and flushed and not self._writer.health().missing

    # -- what others read --------------------------------------------------------------------------------------

    def balance(self, lost: int = 0) -> dict[str, object]:
        """Build both registers of this run, side by side, as a balance line shows them."""
        counts = {"accepted": self.requests.accepted} | {o.value: n for o, n in self.requests.outcomes.items()}
        states = {state.value: n for state, n in self._register.states.items()}
        return balance_fields(counts, states, rejected=self.requests.rejected, lost=lost)

    @property
    def executions(self) -> dict[ExecutionState, int]:
        """The execution register by state; requests in flight count as `running`."""
        states = {state: self._register.states[state] for state in ExecutionState}
        states[ExecutionState.RUNNING] += self.requests.accepted - sum(self._register.states.values())
        return states

    @property
    def background(self) -> int:
        """How many answered requests still run in the engine; a drain waits for them."""
        return self._register.background

    def in_background(self) -> list[tuple[str, float]]:
        """List those requests: id, and when each was admitted (monotonic seconds)."""
        return self._register.in_background()

    @property
    def following(self) -> int:
        """How many requests have ended while what became of the engine's work is still to be learned."""
        return self._register.following

    def lingering(self, within: float) -> int:
        """How many of those have ended `within` the last seconds."""
        return self._register.lingering(self._clock.monotonic() - within) if self._register.following else 0

    @property
    def unsettled(self) -> list[Change]:
        """Every request whose exchange has ended and whose execution is not final."""
        return self._register.unsettled()

    @property
    def health(self) -> LedgerHealth:
        """How the writing goes."""
        return self._writer.health()

    # -- inside ------------------------------------------------------------------------------------------------

    def _append(self, data: bytes, *, lines: int = 1, settles: str = "") -> None:
        """Write, unless it comes behind the balance, the last line of the account: nothing is missing without it."""
        if not self._closed:
            self._writer.append(data, lines=lines, settles=settles)

    def _bind(self, request: OpenRequest) -> None:
        if request.sent_at is not None and request.engine_id:
            self._write(self._register.sent(request.id, request.engine_id, self.inc))

    def _write(self, changes: Iterable[Change]) -> None:
        for change in changes:
            inc = self._incs.get(change.id, self.inc)
            settles = ""
            if change.state in FINAL or change.state is ExecutionState.UNKNOWN:
                if change.id in self._open:
                    self._final.add(change.id)
                else:
                    settles = change.id
                    self._incs.pop(change.id, None)
            self._append(self._lines.execution(inc, change.id, change.state, change.evidence), settles=settles)

    def _write_rejected(self) -> None:
        for (request_class, reason), n in self._rejected.items():
            self._event("rejected", {"class": request_class, "reason": reason, "n": n})
        self._rejected.clear()

    def _event(self, event: str, fields: Mapping[str, object]) -> None:
        self._append(self._lines.event(self.inc, event, fields))


def _processes(processes: Iterable[ProcessId]) -> list[dict[str, int]]:
    return [{"pid": one.pid, "start": one.start_ticks} for one in processes]


def _still_open(request: OpenRequest, now: float) -> RequestOutcome:
    """Build the outcome of a request that is in flight when nobody will watch it any longer."""
    first = None if request.first_byte_at is None else request.first_byte_at - request.admitted_at
    return RequestOutcome(
        id=request.id,
        request_class=request.request_class,
        outcome=Outcome.OPEN,
        why="observation_ended",
        status=None,
        stream=bool(request.stream),
        ended_by=EndedBy.SUPERVISOR,
        bytes=0,
        first_byte_s=first,
        duration_s=now - request.admitted_at,
        marker="",
    )
