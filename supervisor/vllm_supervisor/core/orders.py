"""Orders: what the lifecycle wants done. `runtime/execute` is the only reader; it adds no decision of its own."""

from dataclasses import dataclass
from typing import Any

from vllm_supervisor.core.facts import Timer
from vllm_supervisor.core.words import ClosedReason, Cut, Phase


@dataclass(frozen=True, slots=True)
class Sweep:
    """Remove every process of an engine of ours, prove them gone, clear what they left; answers with a Sweep fact."""


@dataclass(frozen=True, slots=True)
class AwaitMemory:
    """Wait until there is memory enough for an engine, until `until` (monotonic seconds) at most.

    Answers with `MemoryBack` or `MemoryShort`.
    """

    until: float


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start incarnation number `incarnation`."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class SaveEvidence:
    """Write down what can be seen of the engine before it is touched, for `cause`; answers with `EvidenceSaved`."""

    cause: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """TERM to the engine's main process, once."""


@dataclass(frozen=True, slots=True)
class KillTree:
    """KILL to every process of the engine, the main process included."""


@dataclass(frozen=True, slots=True)
class CloseGate:
    """Refuse new work for `reason`; `sentence` is what a refused client reads (empty: the usual one)."""

    reason: ClosedReason
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class OpenGate:
    """Take `reason` back."""

    reason: ClosedReason


@dataclass(frozen=True, slots=True)
class CutInFlight:
    """End every exchange in flight with an explicit error."""

    cut: Cut


@dataclass(frozen=True, slots=True)
class WatchDrain:
    """Answer with `Drained` as soon as nothing is in flight and no answered request runs on (at once, if that is so)."""


@dataclass(frozen=True, slots=True)
class WatchCut:
    """Answer with `CutSettled` as soon as the cut exchanges have ended and the engine has said all it can say of them."""


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Answer with `TimerFired(timer)` at `at` (monotonic seconds); an earlier deadline of that name is replaced."""

    timer: Timer
    at: float


@dataclass(frozen=True, slots=True)
class ClearTimer:
    """Forget the deadline `timer`."""

    timer: Timer


@dataclass(frozen=True, slots=True)
class Record:
    """Say it once: an event for `events`, the log and the ledger. `fields` are plain values."""

    event: str
    sentence: str
    fields: tuple[tuple[str, Any], ...] = ()
    level: str = "info"


@dataclass(frozen=True, slots=True)
class EnterPhase:
    """Say the new public phase."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class Document:
    """Write down how everything ended; answers with `Documented`."""


@dataclass(frozen=True, slots=True)
class End:
    """The loop ends."""


Order = (
    Sweep
    | AwaitMemory
    | Spawn
    | SaveEvidence
    | Terminate
    | KillTree
    | CloseGate
    | OpenGate
    | CutInFlight
    | WatchDrain
    | WatchCut
    | SetTimer
    | ClearTimer
    | Record
    | EnterPhase
    | Document
    | End
)
