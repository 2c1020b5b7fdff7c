"""How an exchange can end, and what each end means in the request ledger."""

from dataclasses import dataclass
from enum import Enum, auto

from vllm_supervisor.core.front_door_settings import FrontDoorSettings
from vllm_supervisor.core.words import Cut, EndedBy, Outcome


class Ending(Enum):
    """What ended an exchange."""

    ANSWERED = auto()  # the engine's answer ended cleanly and went out whole; the judge has the last word
    ENGINE_FAILED = auto()  # the engine broke off, broke the protocol, could not be reached, or was declared failed
    CLIENT_LEFT = auto()
    CLIENT_STALLED = auto()  # took no byte of its answer for too long
    BODY_BROKEN = auto()
    BODY_TOO_LARGE = auto()
    BODY_TOO_SLOW = auto()
    DEADLINE = auto()  # the caller's own time limit
    DRAIN_DEADLINE = auto()
    LEDGER = auto()  # its acceptance could not be written, and ledger.required is set
    STOPPED = auto()  # the front door itself was taken down with the exchange open

    __hash__ = object.__hash__  # members are singletons; the default hashes the name, slowly


@dataclass(frozen=True, slots=True)
class Meaning:
    """What the ledger says, and what a client reads that has had no answer yet (status 0: nothing is sent)."""

    outcome: Outcome
    why: str
    ended_by: EndedBy
    status: int = 0
    message: str = ""


# A mistake of the client's ends its request as cancelled: only the engine and we can make one fail.
MEANINGS: dict[Ending, Meaning] = {
    Ending.ANSWERED: Meaning(Outcome.COMPLETED, "", EndedBy.ENGINE),
    Ending.ENGINE_FAILED: Meaning(
        Outcome.FAILED, "engine_failed", EndedBy.ENGINE, 502, "the engine broke off before its answer was complete"
    ),
    Ending.CLIENT_LEFT: Meaning(Outcome.CANCELLED, "client_left", EndedBy.CLIENT),
    Ending.CLIENT_STALLED: Meaning(Outcome.CANCELLED, "client_stalled", EndedBy.SUPERVISOR),
    Ending.BODY_BROKEN: Meaning(
        Outcome.CANCELLED, "bad_request", EndedBy.SUPERVISOR, 400, "the body breaks the chunked coding"
    ),
    Ending.BODY_TOO_LARGE: Meaning(
        Outcome.CANCELLED, "body_too_large", EndedBy.SUPERVISOR, 413, "the body is larger than the limit"
    ),
    Ending.BODY_TOO_SLOW: Meaning(
        Outcome.CANCELLED, "body_too_slow", EndedBy.SUPERVISOR, 408, "the body did not arrive in time"
    ),
    Ending.DEADLINE: Meaning(
        Outcome.CANCELLED, "deadline", EndedBy.SUPERVISOR, 504, "the request's time limit has passed"
    ),
    Ending.DRAIN_DEADLINE: Meaning(
        Outcome.CANCELLED,
        "drain_deadline",
        EndedBy.SUPERVISOR,
        503,
        "the time to finish accepted requests is over",
    ),
    Ending.LEDGER: Meaning(
        Outcome.FAILED,
        "ledger_unavailable",
        EndedBy.SUPERVISOR,
        503,
        "the ledger cannot be written, and ledger.required is set",
    ),
    Ending.STOPPED: Meaning(Outcome.CANCELLED, "stopped", EndedBy.SUPERVISOR),
}

CUTS: dict[Cut, Ending] = {Cut.DRAIN_DEADLINE: Ending.DRAIN_DEADLINE, Cut.ENGINE_FAILED: Ending.ENGINE_FAILED}


@dataclass(slots=True)
class BodyProgress:
    """How a request body arrives: since when it is waited for, when its last byte came (monotonic seconds), its bytes.

    Time in which we did not read, because the engine takes no more, is not the client's.
    """

    began: float
    last_at: float
    received: int = 0
    stopped_at: float | None = None  # not read since then

    def came(self, size: int, now: float) -> None:
        """Note that `size` bytes have come."""
        self.received += size
        self.last_at = now

    def stop(self, now: float) -> None:
        """Note that the body is not read any more."""
        if self.stopped_at is None:
            self.stopped_at = now

    def go_on(self, now: float) -> None:
        """Note that it is read again."""
        if self.stopped_at is not None:
            self.began += now - self.stopped_at
            self.last_at = now
            self.stopped_at = None

    def too_slow(self, limits: FrontDoorSettings, now: float) -> bool:
        """Say whether it pauses for too long, or comes more slowly than at the least rate."""
        if self.stopped_at is not None:
            return False
        if now - self.last_at >= limits.body_timeout:
            return True
        if not limits.body_deadline or not limits.body_min_rate:
            return False
        return now - self.began >= limits.body_deadline + self.received / limits.body_min_rate


def overdue(
    limits: FrontDoorSettings,
    now: float,
    *,
    deadline: float | None,
    blocked_since: float | None,
    body: BodyProgress | None,
) -> Ending | None:
    """Say what has taken too long, if anything has. Times are monotonic seconds, None where nothing is waited for.

    `deadline` is the caller's own; `blocked_since`: the client takes nothing of its answer since then, and who does
    that is not asked for the rest of its body; `body` is still coming.
    """
    if deadline is not None and now >= deadline:
        return Ending.DEADLINE
    if blocked_since is not None:
        return Ending.CLIENT_STALLED if now - blocked_since >= limits.client_stall_timeout else None
    if body is not None and body.too_slow(limits, now):
        return Ending.BODY_TOO_SLOW
    return None
