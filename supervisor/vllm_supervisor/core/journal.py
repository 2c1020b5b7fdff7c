"""What the front door tells the ledgers, and the contract of whoever listens."""

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


class Journal(Protocol):
    """Both ledgers as the front door sees them."""

    def accepted_now(self, request: OpenRequest) -> bool:
        """Write the acceptance if that takes no waiting; False: nothing was done, so await `accepted`."""

    async def accepted(self, request: OpenRequest) -> bool:
        """Write the acceptance; returns once write(2) has, so no byte may go to the engine before.

        False: it could not be written, and the request must not go on without it.
        """

    def outcome(self, outcome: RequestOutcome) -> None:
        """Write the one outcome of a request."""

    def execution(self, request_id: str, state: ExecutionState, evidence: Evidence) -> None:
        """Write what is now known of the engine's work for a request."""

    def rejected(self, request_class: RequestClass, reason: str) -> None:
        """Count a refusal (one line a class, reason and second)."""
