"""The life of the engine and of the supervisor as one table: (node, fact) → (next node, orders).

Rules:
* `step` is a function of (state, fact, moment) and does nothing. A pair missing from the table raises `ImpossibleFact`
  and changes nothing; a pair that is harmless has a cell that says so (`stay`).
* What is wanted is kept apart from what is: `why` says why the running incarnation is being ended, `stops` counts how
  often a stop was asked. "Shutting down" is therefore no flag beside the state.
* Every node that waits for something has a deadline, except those that wait for a person (`parked`, `ready`).
* Only `sweeping` leads to another incarnation, and only its proof that nothing of the last one is left does.

The cells stand in `cells`; `nodes` tells the public words (phase, engine state) a node shows as.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vllm_supervisor.core.exit_status import ExitReading
from vllm_supervisor.core.facts import Fact
from vllm_supervisor.core.orders import Order
from vllm_supervisor.core.restart import RestartPolicy, RestartTally
from vllm_supervisor.core.words import EngineState, Phase


class Node(StrEnum):
    """Where the engine's life is, finer than the public `EngineState`."""

    BOOTING = "booting"  # the front door is being opened
    SWEEPING = "sweeping"  # proving that nothing of the last engine is left
    WAITING = "waiting"  # backing off before the next incarnation
    STARTING = "starting"  # loading
    LOSING = "losing"  # the core died during the load; the main process prints why and ends
    READY = "ready"
    EXAMINING = "examining"  # condemned; evidence is being saved before it is touched
    EMPTYING = "emptying"  # admission is closed, what is in flight may finish
    CUTTING = "cutting"  # what did not finish is being ended with an error
    TERMINATING = "terminating"  # TERM is out
    KILLING = "killing"  # KILL is out
    PARKED = "parked"
    UNKILLABLE = "unkillable"
    GONE = "gone"  # no engine any more, writing down how it ended


class Why(StrEnum):
    """Why the incarnation is being ended by us; NONE while nobody wants it to end."""

    NONE = "none"
    STOP = "stop"
    COMMANDED = "commanded"
    HANG = "hang"
    FAILING = "failing"
    START_TIMEOUT = "start_timeout"
    CORE_DIED = "core_died"
    REPORTED_DEAD = "reported_dead"


@dataclass(frozen=True, slots=True)
class Policy:
    """The few settings the lifecycle decides by. Durations in seconds."""

    restart: RestartPolicy
    start_timeout: float
    stop_grace: float
    drain_budget: float
    on_terminal: bool  # somebody looks at our standard error
    has_notify: bool  # a service manager waits for our word
    is_pid1: bool
    load_grace: float = 5.0  # vLLM ignores TERM while it loads, and nothing was accepted then
    short_grace: float = 5.0  # after a second request to stop
    lost_grace: float = 5.0  # for a condemned engine, after TERM
    evidence_takes: float = 15.0  # the evidence bundle has this long, then the engine goes without it
    cut_grace: float = 2.0  # for cut exchanges to tell their clients
    farewell: float = 10.0  # for an engine that lost its core to print why (vLLM needs about 4 s)
    kill_grace: float = 10.0  # from KILL to "it cannot be killed"
    look_again: float = 30.0  # between looks at a process that KILL did not remove


@dataclass(frozen=True, slots=True)
class Moment:
    """Now: monotonic seconds, and a number in [0, 1) to spread backoffs with."""

    now: float
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class Ending:
    """What is known of an incarnation that has ended and is not judged yet."""

    raw: int | None  # None: it could not be spawned
    at: float
    was_ready: bool
    why: Why
    term_sent: bool
    kill_sent: bool
    why_sentence: str = ""
    spawn_problem: str = ""


@dataclass(frozen=True, slots=True)
class LastRestart:
    """The newest restart, for status and events. Times in monotonic seconds."""

    cause: str
    sentence: str
    at: float
    ready_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class State:
    """All the lifecycle remembers. Times are monotonic seconds."""

    node: Node = Node.BOOTING
    phase: Phase = Phase.RUNNING
    incarnation: int = 0
    pid: int | None = None
    why: Why = Why.NONE
    why_sentence: str = ""
    term_sent: bool = False
    kill_sent: bool = False
    stops: int = 0  # how often a stop was asked
    stop_signum: int | None = None
    spawned_at: float | None = None
    ready_at: float | None = None
    load_s: float | None = None  # how long the last load took
    started: bool = False  # has been ready or was parked: what /startupz shows
    first_dead: tuple[str, ...] = ()  # members that ended before the main process
    ending: Ending | None = None
    tally: RestartTally = field(default_factory=RestartTally)
    reading: ExitReading | None = None  # of the last ended incarnation
    restarts: Mapping[str, int] = field(default_factory=dict)  # by cause
    last_restart: LastRestart | None = None
    problem: str = ""  # why we are parked, gave up or cannot go on: one sentence
    give_up_status: int | None = None  # our exit status when giving up ends us
    unkillable: bool = False
    drain_deadline: float | None = None


class ImpossibleFact(Exception):  # noqa: N818 - named for what it tells
    """A fact that cannot happen in this node: a fault of ours; nothing was changed."""


# Each cell takes the one kind of fact it stands under, so the table is typed by its keys.
Cell = Callable[[State, Any, Moment, Policy], tuple[State, list[Order]]]


ENGINE_STATES: dict[Node, EngineState] = {
    Node.BOOTING: EngineState.STARTING,
    Node.SWEEPING: EngineState.DOWN,
    Node.WAITING: EngineState.DOWN,
    Node.STARTING: EngineState.STARTING,
    Node.LOSING: EngineState.STARTING,
    Node.READY: EngineState.READY,
    Node.EXAMINING: EngineState.READY,
    Node.EMPTYING: EngineState.READY,
    Node.CUTTING: EngineState.READY,
    Node.TERMINATING: EngineState.STOPPING,
    Node.KILLING: EngineState.STOPPING,
    Node.PARKED: EngineState.PARKED,
    Node.UNKILLABLE: EngineState.UNKILLABLE,
    Node.GONE: EngineState.DOWN,
}


def engine_state(state: State) -> EngineState:
    """The public word for where the engine is."""
    if state.node is Node.SWEEPING and state.incarnation == 0:
        return EngineState.STARTING
    return ENGINE_STATES[state.node]


def step(
    state: State, fact: Fact, moment: Moment, policy: Policy, table: Mapping[tuple[Node, type], Cell]
) -> tuple[State, list[Order]]:
    """Take one fact; return the next state and what is to be done. Raises ImpossibleFact and changes nothing."""
    try:
        cell = table[state.node, type(fact)]
    except KeyError:
        raise ImpossibleFact(f"{type(fact).__name__} cannot happen while {state.node.value}") from None
    return cell(state, fact, moment, policy)
