"""What the health paths and the refusals show: one small picture of the moment, taken from memory."""

from dataclasses import dataclass

from vllm_supervisor.core.words import EngineState, Phase


@dataclass(frozen=True, slots=True)
class View:
    """The state of the moment as the public address shows it."""

    phase: Phase
    engine: EngineState
    reason: str  # why not ready, one sentence for a person; "" while ready
    ready: bool  # admission is open and the engine is ready
    started: bool  # the engine has been ready once in this run, or is parked
