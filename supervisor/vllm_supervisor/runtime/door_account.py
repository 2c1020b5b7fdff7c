"""The front door's own account of the engine, for the judgement: a journal that counts and passes everything on."""

from collections import deque
from collections.abc import Callable

from vllm_supervisor.core.admission import Gate, OpenRequest
from vllm_supervisor.core.journal import Journal, RequestOutcome
from vllm_supervisor.core.samples import DoorSample
from vllm_supervisor.core.words import Cut, EndedBy, Evidence, ExecutionState, Outcome, RequestClass

LOST_KEPT = 10_000  # times of failures: more than are in flight at once


class DoorAccount:
    """Stands between front door and ledgers; what it counts begins anew with each incarnation."""

    def __init__(
        self,
        journal: Journal,
        gate: Gate,
        now: Callable[[], float],
        *,
        late: Callable[[], None],
        ledger_failed: Callable[[], None],
    ) -> None:
        """`late` is called for each refusal; it decides what of that came after a stop.

        `ledger_failed` is called when an acceptance that must be on record is not.
        """
        self._journal = journal
        self._gate = gate
        self._now = now
        self._late = late
        self._lost: deque[float] = deque(maxlen=LOST_KEPT)
        self._ledger_failed = ledger_failed
        # Nothing is counted at these, so they are the ledgers' own.
        self.begin_turn, self.end_turn, self.accept = journal.begin_turn, journal.end_turn, journal.accept
        self.begin()

    def begin(self) -> None:
        """Forget the last incarnation."""
        self._completions = self._served = 0
        self._errors = 0
        self._errors_since: float | None = None
        self._success_at: float | None = None

    # -- core.journal.Journal ----------------------------------------------------------------------------------------

    async def accepted(self, request: OpenRequest) -> bool:
        """Pass on, and say at once that the ledger fails."""
        on_record = await self._journal.accepted(request)
        if not on_record:
            self._ledger_failed()
        return on_record

    def ended(self, outcome: RequestOutcome, state: ExecutionState, evidence: Evidence) -> None:
        """Count successes, and errors of the engine in a row; a client's mistake and an operator's call are neither."""
        self._journal.ended(outcome, state, evidence)
        result = outcome.outcome
        request = self._gate.open.get(outcome.id)
        admin = request is not None and request.admin
        if result is Outcome.COMPLETED:
            if not admin and outcome.status is not None and outcome.status < 300:
                self._completions += 1
                self._served += request is not None and request.request_class is not RequestClass.OTHER
                self._errors, self._errors_since = 0, None
                # The engine's last byte, not the client's: a slow reader of an old answer says nothing of the engine.
                last = None if request is None else request.last_byte_at
                self._success_at = self._now() if last is None else last
        elif result is Outcome.FAILED or outcome.why == Cut.DRAIN_DEADLINE:
            self._lost.append(self._now())
            if result is Outcome.FAILED and outcome.ended_by is EndedBy.ENGINE and not admin:
                self._errors += 1
                self._errors_since = self._now() if self._errors_since is None else self._errors_since

    def rejected(self, request_class: RequestClass, reason: str) -> None:
        """Pass on, and say that somebody came late."""
        self._journal.rejected(request_class, reason)
        self._late()

    def lost_since(self, at: float) -> int:
        """How many requests have failed, or were cut by a drain, since `at` (monotonic seconds)."""
        return sum(one >= at for one in self._lost)

    # -- for the judgement -------------------------------------------------------------------------------------------

    def sample(self) -> DoorSample:
        """What the account says at this moment; costs one look at each open request."""
        work = [one for one in self._gate.open.values() if not one.upgrade and not one.admin]
        silences = [max(one.engine_since, one.last_byte_at or 0.0) for one in work if one.engine_since is not None]
        moments = [self._success_at, *(one.last_byte_at for one in work)]
        return DoorSample(
            in_flight=self._gate.in_flight,
            at_engine=len(silences),
            silent_since=min(silences, default=None),
            last_byte_at=max((moment for moment in moments if moment is not None), default=None),
            completions=self._completions,
            served=self._served,
            engine_5xx=self._errors,
            engine_5xx_since=self._errors_since,
            last_success_at=self._success_at,
            admin_calls=sum(one.admin for one in self._gate.open.values()),
        )
