"""Facts: what has happened, in the past tense, told to the lifecycle by whoever saw it.

A fact is a small frozen value. Nothing here decides; `lifecycle.step` does.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from vllm_supervisor.core.exit_status import ExitEvidence


class Timer(StrEnum):
    """The deadlines the lifecycle sets. Each name has at most one deadline at a time."""

    START = "start"  # the load shows no progress
    DRAIN = "drain"  # the stage of the stop had its time
    EMPTY = "empty"  # requests in flight had their time before a restart somebody ordered
    CUT = "cut"  # cut exchanges should have ended by now
    GRACE = "grace"  # TERM should have ended the main process by now
    BACKOFF = "backoff"  # the next incarnation may start
    EVIDENCE = "evidence"  # the evidence bundle should be written by now
    FAREWELL = "farewell"  # an engine that lost its core should have ended by itself by now


@dataclass(frozen=True, slots=True)
class Began:
    """The front door listens: the first engine may start."""


@dataclass(frozen=True, slots=True)
class SweepDone:
    """No process of an engine of ours is left.

    `evidence` is what the ended incarnation left to read, `requests_lost` how many requests failed with it.
    """

    evidence: ExitEvidence = field(default_factory=ExitEvidence)
    requests_lost: int = 0


@dataclass(frozen=True, slots=True)
class SweepFailed:
    """Processes survived KILL, or may not be removed: `sentence` names them with their pids.

    `refused` tells the second from the first: sweeping is configured off and a person has to remove them.
    """

    sentence: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Spawned:
    """The engine's main process exists."""

    pid: int


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """The engine's command could not be started at all; `sentence` says why and what to do.

    `may_pass`: for want of something that may be there in a moment (memory, descriptors, room), not for what it is.
    """

    sentence: str
    may_pass: bool = False


@dataclass(frozen=True, slots=True)
class LoadProgressed:
    """The load went on: a new line, bytes, growing memory; `cpu_only`: nothing but CPU time was seen."""

    cpu_only: bool = False


@dataclass(frozen=True, slots=True)
class StaysUnready:
    """The loading engine listens, and has answered the ready check badly for a while; `sentence` says how."""

    sentence: str


@dataclass(frozen=True, slots=True)
class BecameReady:
    """The engine accepts, is healthy and has answered its first request; `note` says what could not be asked."""

    note: str = ""


@dataclass(frozen=True, slots=True)
class MemberDied:
    """An EngineCore or Worker of the running incarnation ended while the main process still lives.

    `others` are further ones that were found dead at that moment, "NAME (pid N)": which of them was first is unknown.
    """

    pid: int
    name: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportedDead:
    """The engine said that it is dead, or answers like it, and its main process has not ended."""

    sentence: str


@dataclass(frozen=True, slots=True)
class Condemned:
    """The judgement is that only a restart helps: it hangs, or (`failing`) answers nothing but errors, a probe included."""

    sentence: str
    failing: bool = False


@dataclass(frozen=True, slots=True)
class MemoryBack:
    """There is memory enough for an engine, or nobody guards it here."""


@dataclass(frozen=True, slots=True)
class MemoryShort:
    """Memory did not come back in time; `lost`: there was more before the last engine."""

    sentence: str
    lost: bool


@dataclass(frozen=True, slots=True)
class MemoryFloor:
    """The machine's memory reached the floor, and KILL has gone to the processes of engine `incarnation` already."""

    incarnation: int
    sentence: str


@dataclass(frozen=True, slots=True)
class EvidenceSaved:
    """The evidence bundle is written, or could not be."""


@dataclass(frozen=True, slots=True)
class Exited:
    """The main process ended: negative for a signal, else the exit code."""

    raw: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody wants us to stop: `by` names who, as far as the kernel tells; `signum` is the signal, if it was one."""

    by: str
    signum: int | None = None


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Close admission without a stop; `hook`: a stop will follow, and the time is on the outer limit's clock."""

    by: str
    hook: bool = False


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """Open admission again after `DrainRequested`."""

    by: str


@dataclass(frozen=True, slots=True)
class RestartRequested:
    """A person wants a new engine: drain first, then restart; never counted against the budget."""

    by: str
    reason: str


@dataclass(frozen=True, slots=True)
class LateRequest:
    """A request came after the stop began, and was refused."""


@dataclass(frozen=True, slots=True)
class EngineStopOrdered:
    """The drain is over: TERM once, KILL at `kill_at` (monotonic seconds). Asked again it only moves `kill_at` earlier."""

    kill_at: float


@dataclass(frozen=True, slots=True)
class EngineKillOrdered:
    """The third request to stop: KILL now."""


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing is in flight, and no answered request runs on."""


@dataclass(frozen=True, slots=True)
class CutSettled:
    """What was cut has ended, and the engine has said all it can say of it."""


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A deadline set by an order has passed."""

    timer: Timer


@dataclass(frozen=True, slots=True)
class Documented:
    """What had to be written down has been, or is reported as missing."""


Fact = (
    Began
    | SweepDone
    | SweepFailed
    | Spawned
    | SpawnFailed
    | LoadProgressed
    | StaysUnready
    | BecameReady
    | MemberDied
    | ReportedDead
    | Condemned
    | MemoryBack
    | MemoryShort
    | MemoryFloor
    | EvidenceSaved
    | Exited
    | StopRequested
    | DrainRequested
    | ResumeRequested
    | RestartRequested
    | LateRequest
    | EngineStopOrdered
    | EngineKillOrdered
    | Drained
    | CutSettled
    | TimerFired
    | Documented
)
