"""What the front door tells the ledgers, and the contract of whoever listens."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from vllm_supervisor.core.admission import OpenRequest
from vllm_supervisor.core.words import EndedBy, Evidence, ExecutionState, Outcome, RequestClass


class RequestOutcome(NamedTuple):
    """How one accepted request ended. Durations in seconds, `bytes` of answer body sent to the client."""

    id: str
    request_class: RequestClass
    outcome: Outcome
    why: str  # "" for a plain completion, else one word: client_error, client_left, drain_deadline, engine_failed …
    status: int | None  # of the answer head that went to the client, None when none went out
    stream: bool
    ended_by: EndedBy
    bytes: int
    first_byte_s: float | None
    duration_s: float
    marker: str  # the end that was seen: "[DONE]", "response.completed", "message_stop", "" …


@dataclass(slots=True)
class RequestCounts:
    """The request register of this run, as status shows it. `open` outcomes are written only when a run ends."""

    accepted: int = 0
    rejected: int = 0
    by_class: Counter[tuple[RequestClass, Outcome]] = field(default_factory=Counter)
    why: Counter[str] = field(default_factory=Counter)  # a small fixed set of words
    refused: Counter[str] = field(default_factory=Counter)  # by the code a refused client reads

    @property
    def outcomes(self) -> Counter[Outcome]:
        """Count by outcome alone."""
        outcomes: Counter[Outcome] = Counter()
        for (_, outcome), n in self.by_class.items():
            outcomes[outcome] += n
        return outcomes

    def count(self, outcome: RequestOutcome) -> None:
        """Count an accepted request that has ended."""
        self.by_class[outcome.request_class, outcome.outcome] += 1
        self.why[outcome.why] += 1


class Journal(Protocol):
    """Both ledgers as the front door sees them."""

    def begin_turn(self) -> None:
        """Say that several calls follow that wait for nothing: what they write may be written together."""

    def end_turn(self) -> None:
        """Say that the turn is over: what is left is written now."""

    def accept(self, request: OpenRequest, told: Callable[[bool], None]) -> None:
        """Write the acceptance, now or with others at the end of the turn, and say so: no byte may go to the engine before.

        `told(False)`: it could not be written without waiting and nothing was done about it, so await `accepted`.
        """

    async def accepted(self, request: OpenRequest) -> bool:
        """Write the acceptance; returns once write(2) has.

        False: it could not be written, and the request must not go on without it.
        """

    def ended(self, outcome: RequestOutcome, state: ExecutionState, evidence: Evidence) -> None:
        """Write the one outcome of a request, and what is known of the engine's work for it now."""

    def rejected(self, request_class: RequestClass, reason: str) -> None:
        """Count a refusal (one line a class, reason and second)."""
