"""The gate: one plain call decides about a request and registers it, so nothing can slip between asking and acting.

Rules:
* `admit` is not a coroutine. It checks, counts and registers in one go; a request is therefore either in the drain
  count or refused before any backend work, never in between.
* Admission is closed while any `ClosedReason` holds. Reasons are a set, so two causes never overwrite each other;
  the one with the highest precedence (order of the enum) is shown.
* Who would be refused is refused before its body has come (`check`); a place is taken when it is there (`admit`).
* A place is held until `release`, which the front door calls when the exchange has wholly ended; and longer, at most
  `HOLD_S`, where the engine itself tells that it has not let the request go (`hold_for`): else clients who leave and
  come again would load it beyond the limit.
* Cheap requests (model lists, tokenizing: no engine work) are registered by `pass_through`: the drain waits for them,
  but they take no place, belong to no ledger, and come in whenever an engine is up and no stop is under way.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_supervisor.core.words import ClosedReason, Cut, RequestClass

SATURATED = "saturated"
HOLD_S = 30.0  # seconds after the end of an exchange

# The `code` a refused client reads, by the reason admission is closed.
CODES: dict[ClosedReason, str] = {
    ClosedReason.STOPPING: "draining",
    ClosedReason.DRAIN_REQUESTED: "draining",
    ClosedReason.UNKILLABLE: "engine_unkillable",
    ClosedReason.PARKED: "engine_parked",
    ClosedReason.RESTARTING: "engine_restarting",
    ClosedReason.STARTING: "engine_starting",
    ClosedReason.LEDGER: "ledger_unavailable",
    ClosedReason.MEMORY: "memory_pressure",
    ClosedReason.ASLEEP: "engine_asleep",
    ClosedReason.PAUSED: "engine_paused",
}

# Closed on purpose, by calls that only an operator can take back.
OPERATORS_WILL = {ClosedReason.ASLEEP, ClosedReason.PAUSED}

_PRECEDENCE = {reason: rank for rank, reason in enumerate(ClosedReason)}


@dataclass(frozen=True, slots=True)
class Rejection:
    """A refusal is a value: what the client is told before any backend work.

    `status` is the HTTP status, `code` the machine-readable reason, `message` one line for a person.
    """

    status: int
    code: str
    message: str


def _cannot_cut(_cut: Cut) -> bool:
    """Stand in until the exchange has registered how it can be ended."""
    return False


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One admitted request, from admission until its exchange has wholly ended. Times are monotonic seconds."""

    id: str
    request_class: RequestClass
    admitted_at: float
    upgrade: bool = False
    admin: bool = False  # an operator's call that runs on the engine's loop
    stream: bool | None = None
    sent_at: float | None = None  # first byte handed to the engine
    first_byte_at: float | None = None  # first byte of the engine's answer
    last_byte_at: float | None = None  # last byte of the answer that the engine had to work for
    engine_since: float | None = None  # since when the next move is the engine's; None while it is the client's
    engine_id: str | None = None  # the X-Request-Id the engine was given, or the id its answer names
    cut: Callable[[Cut], bool] = field(default=_cannot_cut, repr=False)  # says whether that is what ended it


@dataclass(slots=True)
class Counts:
    """What the gate has decided since the run began."""

    accepted: int = 0
    rejected: int = 0


class Gate:
    """Admission and the account of what is in flight. Not thread-safe: one event loop owns it."""

    def __init__(self, *, limit: int, new_id: Callable[[], str]) -> None:
        """`limit` is the most requests in flight at once; `new_id` gives the ledger id of each accepted one."""
        self.limit = limit
        self.counts = Counts()
        self.open: dict[str, OpenRequest] = {}
        self.passing: dict[str, OpenRequest] = {}
        self._passed = 0
        self._new_id = new_id
        self._closed: set[ClosedReason] = {ClosedReason.STARTING}
        self._sentences: dict[ClosedReason, str] = {}
        self._lingering: Callable[[], int] = int
        self._on_release: list[Callable[[OpenRequest], None]] = []
        self._on_open: list[Callable[[], None]] = []
        self._on_close: list[Callable[[], None]] = []
        self._on_admit: list[Callable[[], None]] = []

    # -- who may come in ---------------------------------------------------------------------------------------

    def close(self, reason: ClosedReason, sentence: str = "") -> None:
        """Close admission for `reason`; `sentence` is what a refused client reads."""
        self._closed.add(reason)
        if sentence:
            self._sentences[reason] = sentence
        for listener in self._on_close:
            listener()

    def reopen(self, reason: ClosedReason) -> None:
        """Take `reason` back; admission opens when no other holds."""
        was_closed = bool(self._closed)
        self._closed.discard(reason)
        self._sentences.pop(reason, None)
        if was_closed and not self._closed:
            for listener in self._on_open:
                listener()

    def on_admit(self, listener: Callable[[], None]) -> None:
        """Call `listener` with each admitted request, before anything else happens to it (a probe is withdrawn)."""
        self._on_admit.append(listener)

    def on_open(self, listener: Callable[[], None]) -> None:
        """Call `listener` each time admission opens (held requests wait for it)."""
        self._on_open.append(listener)

    def on_close(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each `close` (a held request may have nothing to wait for any more)."""
        self._on_close.append(listener)

    def hold_for(self, lingering: Callable[[], int]) -> None:
        """Let `lingering` say how many requests the engine still has although their exchange has ended."""
        self._lingering = lingering

    @property
    def held(self) -> int:
        """How many places are held for such requests."""
        return self._lingering()

    @property
    def reason(self) -> ClosedReason | None:
        """The reason admission is closed for, or None while it is open."""
        return min(self._closed, key=_PRECEDENCE.__getitem__, default=None)

    @property
    def sentence(self) -> str:
        """What a refused client is told just now; empty while admission is open."""
        reason = self.reason
        if reason is None:
            return ""
        return self._sentences.get(reason) or DEFAULT_SENTENCES[reason]

    def check(self, *, admin: bool = False) -> Rejection | None:
        """Say whether a request would be refused just now, without registering one; `admin` as for `admit`."""
        if self._closed and (reason := self.reason) is not None:
            if admin and self._closed <= OPERATORS_WILL:
                return None
            return Rejection(503, CODES[reason], self.sentence)
        taken = len(self.open) + self.held
        if taken >= self.limit:
            return Rejection(
                429, SATURATED, f"{taken} requests are in flight, and {self.limit} is the limit; try again"
            )
        return None

    def admit(self, request_class: RequestClass, now: float, *, admin: bool = False) -> OpenRequest | Rejection:
        """Decide about one request and, if it may come in, register it at once.

        `admin`: a call of an operator, who must be able to wake what is asleep and to resume what is paused.
        """
        rejection = self.check(admin=admin)
        if rejection is not None:
            self.counts.rejected += 1
            return rejection
        for listener in self._on_admit:
            listener()
        request = OpenRequest(self._new_id(), request_class, now, admin=admin)
        self.open[request.id] = request
        self.counts.accepted += 1
        return request

    def check_passing(self) -> Rejection | None:
        """Say whether `pass_through` would refuse just now."""
        if ClosedReason.STOPPING in self._closed:
            return Rejection(503, CODES[ClosedReason.STOPPING], self.sentence)
        return None

    def pass_through(self, now: float) -> OpenRequest | Rejection:
        """Register a cheap request, which only a stop refuses; whether an engine is up is the caller's knowledge."""
        rejection = self.check_passing()
        if rejection is not None:
            return rejection
        self._passed += 1
        request = OpenRequest(f"pass-{self._passed}", RequestClass.OTHER, now)
        self.passing[request.id] = request
        return request

    # -- what is inside ----------------------------------------------------------------------------------------

    def release(self, request: OpenRequest) -> None:
        """Give the place back. Releasing twice is a fault of the caller and raises KeyError."""
        if request.id in self.passing:
            del self.passing[request.id]
        else:
            del self.open[request.id]
        for listener in self._on_release:
            listener(request)

    def on_release(self, listener: Callable[[OpenRequest], None]) -> None:
        """Call `listener` after each release (the drain waits for the last one)."""
        self._on_release.append(listener)

    @property
    def in_flight(self) -> int:
        """How many exchanges a drain waits for: those that hold a place and the cheap ones."""
        return len(self.open) + len(self.passing)

    def oldest(self) -> float | None:
        """When the oldest request in flight was admitted (monotonic seconds), or None."""
        return min((request.admitted_at for request in self.open.values()), default=None)

    def cut_all(self, cut: Cut) -> list[OpenRequest]:
        """End every exchange in flight with an explicit error; return the admitted requests that this has ended."""
        for request in list(self.passing.values()):
            request.cut(cut)
        return [request for request in list(self.open.values()) if request.cut(cut)]


DEFAULT_SENTENCES: dict[ClosedReason, str] = {
    ClosedReason.STOPPING: "the server is shutting down and finishes only what it has accepted",
    ClosedReason.DRAIN_REQUESTED: "the server is draining and finishes only what it has accepted",
    ClosedReason.UNKILLABLE: "a process of the old engine cannot be removed; an operator is needed",
    ClosedReason.PARKED: "the engine is parked after failing to run; an operator is needed",
    ClosedReason.RESTARTING: "the engine is being restarted",
    ClosedReason.STARTING: "the engine is still starting",
    ClosedReason.LEDGER: "the ledger cannot be written, and ledger.required is set",
    ClosedReason.MEMORY: "the machine is low on memory; new work is refused for the moment",
    ClosedReason.ASLEEP: "the engine is asleep",
    ClosedReason.PAUSED: "the engine is paused",
}
