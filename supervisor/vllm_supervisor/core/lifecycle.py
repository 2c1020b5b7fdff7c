"""The life of the engine and of the supervisor as one table: (node, fact) → (next node, orders).

Rules:
* `step` is a function of (state, fact, moment) and does nothing. A pair missing from the table raises `ImpossibleFact`
  and changes nothing; a pair that is harmless has a cell that says so (`stay`).
* Two machines, one step: `drain` is our own way out (its table stands in that file), the cells here are the engine's
  life. The drain orders the engine to stop, and hears when it is gone; neither reads the other's mind.
* What is wanted is kept apart from what is: `why` says why the running incarnation is being ended.
* Every node that waits for something has a deadline, except those that wait for a person (`parked`, `ready`).
* Only `sweeping` leads to another incarnation, and only its proof that nothing of the last one is left does; where CPU
  and GPU share one memory, every start waits in `gating` until that memory is back. The deadline of that wait travels
  in its order, because its end is told with numbers.

The cells stand in `cells`; `nodes` tells the public words (phase, engine state) a node shows as.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from vllm_supervisor.core import drain, facts, orders
from vllm_supervisor.core.drain import DrainState, Stage
from vllm_supervisor.core.drain_report import stop_does
from vllm_supervisor.core.exit_status import ExitReading
from vllm_supervisor.core.facts import Fact, Timer
from vllm_supervisor.core.orders import Order
from vllm_supervisor.core.restart import RestartPolicy, RestartTally
from vllm_supervisor.core.signal_names import NUMBERS
from vllm_supervisor.core.timeouts import Limits
from vllm_supervisor.core.words import ClosedReason, Cut, EngineState, Phase


class Node(StrEnum):
    """Where the engine's life is, finer than the public `EngineState`."""

    BOOTING = "booting"  # the front door is being opened
    SWEEPING = "sweeping"  # proving that nothing of the last engine is left
    WAITING = "waiting"  # backing off before the next incarnation
    GATING = "gating"  # waiting for the last engine's memory to come back
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
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Policy:
    """The few settings the lifecycle decides by. Durations in seconds."""

    restart: RestartPolicy
    limits: Limits  # of a stop
    start_timeout: float
    stop_grace: float
    on_terminal: bool  # somebody looks at our standard error
    has_notify: bool  # a service manager waits for our word
    is_pid1: bool
    headless: bool = False  # the engine has no HTTP front; it follows another node's
    memory_gate: bool = False  # a start waits for memory, where it is shared with the GPU
    gate_timeout: float = 300.0
    load_grace: float = 5.0  # vLLM ignores TERM while it loads, and nothing was accepted then
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
    spawn_may_pass: bool = False


@dataclass(frozen=True, slots=True)
class LastRestart:
    """The newest restart, for status and events. `at` is when the old engine ended, in monotonic seconds.

    `given_up`: no start followed that became ready; whatever is started later is no part of it.
    """

    cause: str
    sentence: str
    at: float
    requests_lost: int = 0
    ready_after_s: float | None = None
    given_up: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """All the lifecycle remembers. Times are monotonic seconds."""

    node: Node = Node.BOOTING
    drain: DrainState = field(default_factory=DrainState)
    incarnation: int = 0
    pid: int | None = None
    why: Why = Why.NONE
    why_sentence: str = ""
    term_sent: bool = False
    kill_sent: bool = False
    kill_at: float | None = None  # when TERM, or the end it comes to by itself, has to have worked
    stop_signum: int | None = None
    spawned_at: float | None = None
    ready_at: float | None = None
    load_s: float | None = None  # how long the last load took
    load_seen_at: float | None = None  # when the load last showed more than CPU time
    load_cpu: bool = False  # CPU time has been seen since
    started: bool = False  # has been ready or was parked: what /startupz shows
    first_dead: tuple[str, ...] = ()  # members that ended before the main process
    ending: Ending | None = None
    tally: RestartTally = field(default_factory=RestartTally)
    reading: ExitReading | None = None  # of the last ended incarnation
    restarts: Mapping[str, int] = field(default_factory=dict)  # by cause
    last_restart: LastRestart | None = None
    problem: str = ""  # why we are parked, gave up or cannot go on: one sentence
    public_problem: str = ""  # the same for clients: class and remedy, and nothing that the engine printed
    give_up_status: int | None = None  # our exit status when giving up ends us
    unkillable: bool = False
    measure_now: bool = False  # a person asked for the next start: the memory of now is its measure

    @property
    def phase(self) -> Phase:
        """Where we are in our own life."""
        return self.drain.phase

    @property
    def leaving(self) -> bool:
        """Whether a stop has begun: no further incarnation starts."""
        return self.drain.stage is not Stage.OPEN


class ImpossibleFact(Exception):  # noqa: N818 - named for what it tells
    """A fact that cannot happen in this node: a fault of ours; nothing was changed."""


# Each cell takes the one kind of fact it stands under, so the table is typed by its keys.
Cell = Callable[[State, Any, Moment, Policy], tuple[State, list[Order]]]


ENGINE_STATES: dict[Node, EngineState] = {
    Node.BOOTING: EngineState.STARTING,
    Node.SWEEPING: EngineState.DOWN,
    Node.WAITING: EngineState.DOWN,
    Node.GATING: EngineState.DOWN,
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
    if state.node in (Node.SWEEPING, Node.GATING) and state.incarnation == 0:
        return EngineState.STARTING
    return ENGINE_STATES[state.node]


def step(
    state: State, fact: Fact, moment: Moment, policy: Policy, table: Mapping[tuple[Node, type], Cell]
) -> tuple[State, list[Order]]:
    """Take one fact; return the next state and what is to be done. Raises ImpossibleFact and changes nothing."""
    drain_fact = _for_drain(state, fact)
    if isinstance(fact, facts.StopRequested) and not state.leaving:
        state = replace(state, stop_signum=fact.signum)
    if drain_fact is None:
        return _engine_step(state, fact, moment, policy, table)
    said = _words(state, fact, moment, policy)
    state, given = _drain_step(state, drain_fact, moment, policy, table)
    more: list[Order] = []
    if isinstance(fact, facts.StopRequested):
        state, more = _engine_step(state, fact, moment, policy, table)
    return state, [*said, *given, *more]


def _engine_step(
    state: State, fact: Fact, moment: Moment, policy: Policy, table: Mapping[tuple[Node, type], Cell]
) -> tuple[State, list[Order]]:
    """Take a fact of the engine's life; if that leaves no engine for good, the drain hears of it."""
    try:
        cell = table[state.node, type(fact)]
    except KeyError:
        raise ImpossibleFact(f"{type(fact).__name__} cannot happen while {state.node.value}") from None
    before = state.node
    state, given = cell(state, fact, moment, policy)
    if state.node is Node.GONE and before is not Node.GONE:
        if not state.leaving:  # giving up is a way out, too
            state, more = _drain_step(state, drain.StopAsked(), moment, policy, table)
            given += more
        state, more = _drain_step(state, drain.EngineGone(), moment, policy, table)
        given += more
    return state, given


def _drain_step(
    state: State, fact: drain.DrainFact, moment: Moment, policy: Policy, table: Mapping[tuple[Node, type], Cell]
) -> tuple[State, list[Order]]:
    """Take a fact of the drain, and carry what it orders into our own words."""
    try:
        after, wanted = drain.step(state.drain, fact, moment.now, policy.limits)
    except KeyError:
        raise ImpossibleFact(f"{type(fact).__name__} cannot happen while {state.drain.stage.value}") from None
    state = replace(state, drain=after)
    given: list[Order] = []
    for order in wanted:
        match order:
            case drain.StopEngine(kill_at=kill_at):
                state, more = _engine_step(state, facts.EngineStopOrdered(kill_at), moment, policy, table)
                given += more
            case drain.KillEngine():
                state, more = _engine_step(state, facts.EngineKillOrdered(), moment, policy, table)
                given += more
            case _:
                given.append(_translated(order))
    return state, given


def _translated(order: drain.DrainOrder) -> Order:
    match order:
        case drain.CloseAdmission(stopping=stopping):
            return orders.CloseGate(ClosedReason.STOPPING if stopping else ClosedReason.DRAIN_REQUESTED)
        case drain.OpenAdmission():
            return orders.OpenGate(ClosedReason.DRAIN_REQUESTED)
        case drain.EnterPhase(phase=phase):
            return orders.EnterPhase(phase)
        case drain.SetDeadline(at=at):
            return orders.ClearTimer(Timer.DRAIN) if at is None else orders.SetTimer(Timer.DRAIN, at)
        case drain.WatchEmpty():
            return orders.WatchDrain()
        case drain.CutAll():
            return orders.CutInFlight(Cut.DRAIN_DEADLINE)
        case drain.WriteReport():
            return orders.Document()
        case drain.Leave():
            return orders.End()
        case _:
            raise AssertionError(f"{order} is carried out by the engine's table")


def _for_drain(state: State, fact: Fact) -> drain.DrainFact | None:
    """What a fact means to the drain; None: nothing."""
    match fact:
        case facts.StopRequested():
            return drain.StopAsked()
        case facts.DrainRequested(hook=hook):
            return drain.DrainAsked(hook)
        case facts.ResumeRequested():
            return drain.ResumeAsked()
        case facts.LateRequest():
            return drain.LateRequest()
        case facts.Documented():
            return drain.Written()
        case facts.TimerFired(timer=Timer.DRAIN):
            return drain.DeadlinePassed()
        case facts.Drained() if state.drain.stage in (Stage.PROPAGATING, Stage.FINISHING):
            return drain.Emptied()
        case _:
            return None


def _words(state: State, fact: Fact, moment: Moment, policy: Policy) -> list[Order]:
    """Say who asked for what, and that a budget is spent; to whom has pressed Ctrl-C, what a second one does."""
    match fact:
        case facts.StopRequested(by=by, signum=signum) if not state.leaving:
            pressed = policy.on_terminal and signum == NUMBERS["SIGINT"]
            more = "; again: cut what is open" if pressed else ""
            return [orders.Record("stop_requested", f"stop requested by {by}{more}")]
        case facts.StopRequested(by=by):
            return [
                orders.Record("stop_requested", f"stop requested again by {by}: {stop_does(state.drain, moment.now)}")
            ]
        case facts.DrainRequested(by=by):
            return [orders.Record("drain_requested", f"admission closed by {by}")]
        case facts.ResumeRequested(by=by):
            return [orders.Record("resumed", f"admission opened by {by}")]
        case facts.TimerFired() if state.drain.stage is Stage.FINISHING:
            sentence = f"the drain budget of {state.drain.budget.drain:g} s is spent; what is still open is cut"
            return [orders.Record("drain_deadline", sentence, level="warning")]
        case _:
            return []
