"""What the health paths and the refusals show: one small picture of the moment, taken from memory."""

from dataclasses import dataclass

from vllm_supervisor.core.admission import Gate
from vllm_supervisor.core.lifecycle import State, engine_state
from vllm_supervisor.core.words import EngineState, Phase, Verdict


@dataclass(frozen=True, slots=True)
class View:
    """The state of the moment as the public address shows it."""

    phase: Phase
    engine: EngineState
    reason: str  # why not ready, one sentence for a person; "" while ready
    ready: bool  # admission is open and the engine is ready
    started: bool  # the engine has been ready once in this run, or is parked


def verdict(state: State, gate: Gate) -> tuple[Verdict, str]:
    """What we can say of the engine's health from its life and our own account."""
    match engine_state(state):
        case EngineState.READY if gate.in_flight:
            return Verdict.BUSY, f"ready, {gate.in_flight} requests in flight"
        case EngineState.READY:
            return Verdict.IDLE, "ready, nothing in flight"
        case EngineState.STARTING:
            return Verdict.STARTING, "the engine is starting"
        case EngineState.STOPPING:
            return Verdict.UNREACHABLE, "the engine is being stopped"
        case _:
            return Verdict.DEAD, state.problem or "no engine runs"
