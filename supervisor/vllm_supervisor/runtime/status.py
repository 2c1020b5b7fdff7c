"""`GET /status`: one picture of the moment, put together from memory and one look at /proc; it decides nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_supervisor.adapters.processes import Member
from vllm_supervisor.core.admission import Gate
from vllm_supervisor.core.lifecycle import Node, Policy, State, engine_state
from vllm_supervisor.core.words import ClosedReason, EngineState, Verdict


@dataclass(frozen=True, slots=True)
class Identity:
    """What does not change in a run."""

    version: str
    name: str
    run: str
    pid: int
    began: float  # monotonic seconds
    listeners: tuple[str, ...]


def drain_picture(state: State, gate: Gate, policy: Policy, now: float) -> dict[str, Any] | None:
    """The drain as it stands, or None while nothing drains. Durations in seconds."""
    oldest = gate.oldest()
    draining = gate.reason in (ClosedReason.STOPPING, ClosedReason.DRAIN_REQUESTED) or state.node is Node.EMPTYING
    if not draining:
        return None
    deadline = state.drain_deadline
    return {
        "budget_s": policy.drain_budget,
        "elapsed_s": None if deadline is None else round(policy.drain_budget - (deadline - now), 3),
        "remaining_s": None if deadline is None else round(max(deadline - now, 0.0), 3),
        "in_flight": gate.in_flight,
        "oldest_s": None if oldest is None else round(now - oldest, 3),
    }
