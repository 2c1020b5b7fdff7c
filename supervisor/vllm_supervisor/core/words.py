"""The words everything else is written in: phases, states, reasons, classes, outcomes.

Each is public (status, ledgers, metrics and messages show these strings), so a value never changes its spelling.
"""

from enum import StrEnum


class Word(StrEnum):
    """A word that is its own spelling, also as a key: it hashes as the string it equals, and as fast."""

    __hash__ = str.__hash__


class Phase(Word):
    """Where the supervisor is in its own life; it only moves forward, and only by a stop."""

    RUNNING = "running"
    ADMISSION_STOP = "admission_stop"
    DRAINING = "draining"
    DOCUMENTING = "documenting"
    ENDED = "ended"


class EngineState(Word):
    """Where the engine is; `down` is between two incarnations, `parked` is given up but alive to tell."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    DOWN = "down"
    PARKED = "parked"
    UNKILLABLE = "unkillable"


class ClosedReason(Word):
    """Why admission is closed. The order is the order of precedence: the first that holds is the one shown."""

    STOPPING = "stopping"
    UNKILLABLE = "unkillable"
    PARKED = "parked"
    RESTARTING = "restarting"
    STARTING = "starting"
    DRAIN_REQUESTED = "drain_requested"
    LEDGER = "ledger"  # only with ledger.required
    MEMORY = "memory"
    ASLEEP = "asleep"
    PAUSED = "paused"


class Verdict(Word):
    """What the health classifier says of the engine."""

    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"
    SUSPECT = "suspect"
    STUCK = "stuck"
    FAILING = "failing"
    DEGRADED = "degraded"
    ASLEEP = "asleep"
    PAUSED = "paused"
    UNREACHABLE = "unreachable"
    UNJUDGEABLE = "unjudgeable"
    DEAD = "dead"


def verdict_line(verdict: str, sentence: str, held: str = "") -> str:
    """Say a verdict, how long it has held ("" or "for 5 s") and its sentence, the verdict only once.

    Some sentences begin with their verdict, since they also stand alone ("busy and healthy: 3 running").
    """
    since = f"{verdict} {held}" if held else verdict
    rest = sentence.removeprefix(verdict)
    if not sentence or (rest.startswith((":", " ")) and rest != sentence):
        return since + rest
    return f"{since}: {sentence}"


class RequestClass(Word):
    """The fixed, small set of request classes: the only thing about a request's content that is ever written."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"
    POOLING = "pooling"
    AUDIO = "audio"
    REALTIME = "realtime"
    GENERATE = "generate"
    OTHER = "other"


class Outcome(Word):
    """How a request ended for its client: exactly one for each accepted request."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    OPEN = "open"


class EndedBy(Word):
    """Which side ended an exchange first."""

    ENGINE = "engine"
    CLIENT = "client"
    SUPERVISOR = "supervisor"


class ExecutionState(Word):
    """What is known of the engine's work for a request; never added to the outcomes."""

    NOT_STARTED = "not_started"
    RUNNING = "running"
    COMPLETED = "completed"
    CONFIRMED_STOPPED = "confirmed_stopped"
    UNKNOWN = "unknown"


class Evidence(Word):
    """What an execution state rests on."""

    ANSWER = "answer"
    ABORT_REQUESTED = "abort_requested"
    CONNECTION_CLOSED = "connection_closed"
    ENGINE_CONFIRMED = "engine_confirmed"
    COUNTS = "counts"
    PROCESS_GONE = "process_gone"
    NONE = "none"


class Cut(Word):
    """Why we end an exchange ourselves; also the `code` of the error the client reads."""

    DRAIN_DEADLINE = "drain_deadline"
    ENGINE_FAILED = "engine_failed"
