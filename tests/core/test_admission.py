"""The gate's places: who takes one, and until when."""

from vllm_supervisor.core.admission import Gate, OpenRequest, Rejection
from vllm_supervisor.core.words import ClosedReason, RequestClass


def opened(limit: int) -> Gate:
    """Give an open gate."""
    names = iter(range(100))
    gate = Gate(limit=limit, new_id=lambda: str(next(names)))
    gate.reopen(ClosedReason.STARTING)
    return gate


def test_a_request_the_engine_still_has_keeps_its_place() -> None:
    """Ended exchanges count against the limit while the engine has their requests, and not a moment longer."""
    gate, lingering = opened(2), 0
    gate.hold_for(lambda: lingering)
    first, second = (gate.admit(RequestClass.CHAT, 0.0) for _ in range(2))
    assert isinstance(first, OpenRequest)
    assert isinstance(second, OpenRequest)
    gate.release(first)
    lingering = 1
    refused = gate.admit(RequestClass.CHAT, 1.0)
    assert isinstance(refused, Rejection)
    assert (refused.status, refused.code) == (429, "saturated")
    assert refused.message == "2 requests are in flight, and 2 is the limit; try again"
    assert (gate.in_flight, gate.held) == (1, 1)
    lingering = 0
    assert isinstance(gate.admit(RequestClass.CHAT, 2.0), OpenRequest)
