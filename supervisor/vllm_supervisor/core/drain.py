"""The drain as one table: (stage, fact) → (next stage, orders). What each stage does, what moves it on, its deadline.

| stage        | phase          | what it does                                       | moves on                              | deadline      |
|--------------|----------------|----------------------------------------------------|---------------------------------------|---------------|
| open         | running        | admits; `drain` closes admission without a stop    | a stop                                | none          |
| propagating  | admission_stop | refuses, readiness off, routes notice; work goes on | deadline                              | propagation   |
| finishing    | draining       | lets accepted work end                             | nothing in flight, deadline           | drain         |
| stopping     | draining       | ends what is left with an error, stops the engine  | the engine is gone or cannot be       | engine stop   |
| documenting  | documenting    | writes the ledgers' ends and the report            | documented, deadline                  | documentation |
| ended        | ended          | nothing                                            | nothing                               | none          |

Rules:
* Only forward. A stop that is asked again goes one rung down: the second ends the drain and stops the engine with its
  short budget, the third kills. It never restarts a budget. Asked again within `SAME_WISH_S` it is the same wish: managers
  send TERM by a command of the unit and by themselves, wrappers add an INT to it.
* Refusal begins with the first order of `propagating`; no later stage changes it.
* A pair that is harmless has a cell that says so; a pair that is missing raises KeyError and changes nothing.
* The hook's time comes off the plan only when the hook's drain is still in force as the stop arrives.
* Times are monotonic seconds. Nothing here knows what a request or an engine is.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from vllm_supervisor.core.timeouts import NO_PLAN, Budget, Limits, plan
from vllm_supervisor.core.words import Phase

SAME_WISH_S = 1.0  # counted from the last request to stop that counted
SHORT_STOP_S = 5.0  # the engine's budget after a second request to stop


class Stage(StrEnum):
    """Where the drain is, finer than the public phase."""

    OPEN = "open"
    PROPAGATING = "propagating"
    FINISHING = "finishing"
    STOPPING = "stopping"
    DOCUMENTING = "documenting"
    ENDED = "ended"


PHASES: dict[Stage, Phase] = {
    Stage.OPEN: Phase.RUNNING,
    Stage.PROPAGATING: Phase.ADMISSION_STOP,
    Stage.FINISHING: Phase.DRAINING,
    Stage.STOPPING: Phase.DRAINING,
    Stage.DOCUMENTING: Phase.DOCUMENTING,
    Stage.ENDED: Phase.ENDED,
}


# -- facts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StopAsked:
    """A signal or a command asked for the end; each one counts."""


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Close admission without a stop; `hook`: a stop will follow, and this time is on the outer limit's clock."""

    hook: bool = False


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    """Open admission again."""


@dataclass(frozen=True, slots=True)
class Emptied:
    """Nothing is in flight and no answered request runs on in the engine."""


@dataclass(frozen=True, slots=True)
class LateRequest:
    """A request arrived while admission was closed, and was refused."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The deadline of the stage has passed."""


@dataclass(frozen=True, slots=True)
class EngineGone:
    """The engine's processes are proven gone, or it is certain that they cannot be removed."""


@dataclass(frozen=True, slots=True)
class Written:
    """What had to be documented has been, or is reported as missing."""


DrainFact = StopAsked | DrainAsked | ResumeAsked | Emptied | LateRequest | DeadlinePassed | EngineGone | Written


# -- orders ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CloseAdmission:
    """Refuse from now on; `stopping` tells the stop from a maintenance drain."""

    stopping: bool


@dataclass(frozen=True, slots=True)
class OpenAdmission:
    """Take a maintenance drain back."""


@dataclass(frozen=True, slots=True)
class EnterPhase:
    """Say the new public phase."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class SetDeadline:
    """Tell `DeadlinePassed` at `at`, or never; it replaces the last one."""

    at: float | None


@dataclass(frozen=True, slots=True)
class WatchEmpty:
    """Tell `Emptied` as soon as it holds, at once if it does."""


@dataclass(frozen=True, slots=True)
class CutAll:
    """End every exchange in flight with the drain's error, before the engine hears of the stop."""


@dataclass(frozen=True, slots=True)
class StopEngine:
    """TERM once, KILL at `kill_at`; asked again it only moves `kill_at` to an earlier time."""

    kill_at: float


@dataclass(frozen=True, slots=True)
class KillEngine:
    """KILL now."""


@dataclass(frozen=True, slots=True)
class WriteReport:
    """Close the ledgers and write the drain report, until `until`."""

    until: float


@dataclass(frozen=True, slots=True)
class Leave:
    """End the process."""


DrainOrder = (
    CloseAdmission | OpenAdmission | EnterPhase | SetDeadline | WatchEmpty | CutAll | StopEngine | KillEngine
    | WriteReport | Leave
)  # fmt: skip


# -- the machine -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DrainState:
    """All the drain remembers. `entered` holds when each stage began; `budget` is the plan of the stop."""

    stage: Stage = Stage.OPEN
    deadline: float | None = None
    stops: int = 0
    asked_at: float = 0.0  # when the last of them came
    drain_since: float | None = None  # a drain without a stop is in force since then
    drain_is_hook: bool = False
    stop_at: float = 0.0
    withdrawn_at: float | None = None  # requests are refused since then: by the drain in force, else by the stop
    entered: dict[Stage, float] = field(default_factory=dict)
    budget: Budget = NO_PLAN
    late_requests: int = 0
    last_late_s: float | None = None  # the last refused request came so long after the withdrawal

    @property
    def phase(self) -> Phase:
        """The public phase."""
        return PHASES[self.stage]


Step = tuple[DrainState, list[DrainOrder]]
Cell = Callable[[DrainState, float, Limits], Step]


def step(state: DrainState, fact: DrainFact, now: float, limits: Limits) -> Step:
    """Take one fact at `now`; return the next state and what is to be done. Raises KeyError for an impossible pair."""
    if isinstance(fact, DrainAsked):
        return _drain_asked(state, now, hook=fact.hook)
    if isinstance(fact, StopAsked):
        if same_wish(state, now):
            return state, []
        state = replace(state, asked_at=now)
    return TABLE[state.stage, type(fact)](state, now, limits)


def same_wish(state: DrainState, now: float) -> bool:
    """Return whether a request to stop at `now` repeats the one before it and counts once with it."""
    return state.stops > 0 and now - state.asked_at < SAME_WISH_S


def _stay(state: DrainState, _now: float, _limits: Limits) -> Step:
    return state, []


def _drain_asked(state: DrainState, now: float, *, hook: bool) -> Step:
    """Close admission; asked again it only learns that a hook did it. In a stop it changes nothing."""
    if state.stage is not Stage.OPEN:
        return state, []
    if state.drain_since is not None and not (hook and not state.drain_is_hook):
        return state, []
    withdrawn_at = now if state.withdrawn_at is None else state.withdrawn_at
    state = replace(state, drain_since=now, drain_is_hook=hook, withdrawn_at=withdrawn_at)
    return state, [CloseAdmission(stopping=False)]


def _resume(state: DrainState, _now: float, _limits: Limits) -> Step:
    """Open again; what came late belongs to the withdrawal that is over."""
    state = replace(state, drain_since=None, drain_is_hook=False, withdrawn_at=None, late_requests=0, last_late_s=None)
    return state, [OpenAdmission()]


def _enter(state: DrainState, stage: Stage, now: float, deadline: float | None) -> Step:
    """Go forward to `stage`; the phase is said when it changes."""
    orders: list[DrainOrder] = [] if PHASES[stage] is state.phase else [EnterPhase(PHASES[stage])]
    entered = state.entered | {stage: now}
    return replace(state, stage=stage, deadline=deadline, entered=entered), [*orders, SetDeadline(deadline)]


def _stop(state: DrainState, now: float, limits: Limits) -> Step:
    """Begin: refusal first, then the plan, with what a hook has used already taken off."""
    hook = now - state.drain_since if state.drain_is_hook and state.drain_since is not None else 0.0
    budget = plan(limits, hook)
    withdrawn_at = now if state.withdrawn_at is None else state.withdrawn_at
    state = replace(state, stops=1, stop_at=now, budget=budget, withdrawn_at=withdrawn_at)
    state, orders = _enter(state, Stage.PROPAGATING, now, now + budget.propagation)
    orders = [CloseAdmission(stopping=True), *orders]
    if budget.propagation > 0:
        return state, orders
    state, more = _finish(state, now, limits)
    return state, orders + more


def _finish(state: DrainState, now: float, _limits: Limits) -> Step:
    state, orders = _enter(state, Stage.FINISHING, now, now + state.budget.drain)
    return state, [*orders, WatchEmpty()]


def _stop_engine(state: DrainState, now: float, _limits: Limits) -> Step:
    """Cut what is left (nothing, if it emptied), then TERM; the stage's own limit is the engine's."""
    grace = state.budget.engine_stop if state.stops < 2 else min(SHORT_STOP_S, state.budget.engine_stop)
    state, orders = _enter(state, Stage.STOPPING, now, None)
    return state, [*orders, CutAll(), StopEngine(kill_at=now + grace)]


def _hurry(state: DrainState, now: float, limits: Limits) -> Step:
    """Asked again before the engine was told: the drain ends now."""
    return _stop_engine(replace(state, stops=state.stops + 1), now, limits)


def _hurry_engine(state: DrainState, now: float, _limits: Limits) -> Step:
    """Asked again while the engine stops: its short budget, then KILL."""
    state = replace(state, stops=state.stops + 1)
    if state.stops > 2:
        return state, [KillEngine()]
    return state, [StopEngine(kill_at=now + min(SHORT_STOP_S, state.budget.engine_stop))]


def _document(state: DrainState, now: float, _limits: Limits) -> Step:
    """Write down what is known: with the engine gone there will be no more."""
    until = now + state.budget.documentation
    state, orders = _enter(state, Stage.DOCUMENTING, now, until)
    return state, [*orders, WriteReport(until)]


def _engine_gone_early(state: DrainState, now: float, limits: Limits) -> Step:
    """Give up the drain of an engine that ended by itself: nothing can finish any more."""
    state, orders = _enter(state, Stage.STOPPING, now, None)
    state, more = _document(state, now, limits)
    return state, [*orders, CutAll(), *more]


def _end(state: DrainState, now: float, _limits: Limits) -> Step:
    state, orders = _enter(state, Stage.ENDED, now, None)
    return state, [*orders, Leave()]


def _late(state: DrainState, now: float, _limits: Limits) -> Step:
    """Measure how long routes still send: what people set drain.propagation from."""
    if state.withdrawn_at is None:
        return state, []  # refused for another reason
    return replace(state, late_requests=state.late_requests + 1, last_late_s=now - state.withdrawn_at), []


def _count(state: DrainState, _now: float, _limits: Limits) -> Step:
    return replace(state, stops=state.stops + 1), []


TABLE: dict[tuple[Stage, type], Cell] = {
    (Stage.OPEN, StopAsked): _stop,
    (Stage.OPEN, ResumeAsked): _resume,
    (Stage.OPEN, Emptied): _stay,
    (Stage.OPEN, LateRequest): _late,  # during a drain without a stop
    (Stage.OPEN, DeadlinePassed): _stay,
    (Stage.OPEN, EngineGone): _stay,  # a restart
    (Stage.PROPAGATING, StopAsked): _hurry,
    (Stage.PROPAGATING, ResumeAsked): _stay,  # a stop is not taken back
    (Stage.PROPAGATING, Emptied): _stay,  # routes may still send; they shall be refused, not find nobody
    (Stage.PROPAGATING, LateRequest): _late,
    (Stage.PROPAGATING, DeadlinePassed): _finish,
    (Stage.PROPAGATING, EngineGone): _engine_gone_early,
    (Stage.FINISHING, StopAsked): _hurry,
    (Stage.FINISHING, ResumeAsked): _stay,
    (Stage.FINISHING, Emptied): _stop_engine,
    (Stage.FINISHING, LateRequest): _late,
    (Stage.FINISHING, DeadlinePassed): _stop_engine,
    (Stage.FINISHING, EngineGone): _engine_gone_early,
    (Stage.STOPPING, StopAsked): _hurry_engine,
    (Stage.STOPPING, ResumeAsked): _stay,
    (Stage.STOPPING, Emptied): _stay,
    (Stage.STOPPING, LateRequest): _late,
    (Stage.STOPPING, DeadlinePassed): _stay,  # of the stage before, on its way
    (Stage.STOPPING, EngineGone): _document,
    (Stage.DOCUMENTING, StopAsked): _count,
    (Stage.DOCUMENTING, ResumeAsked): _stay,
    (Stage.DOCUMENTING, Emptied): _stay,
    (Stage.DOCUMENTING, LateRequest): _late,
    (Stage.DOCUMENTING, DeadlinePassed): _end,
    (Stage.DOCUMENTING, EngineGone): _stay,
    (Stage.DOCUMENTING, Written): _end,
    (Stage.ENDED, StopAsked): _stay,
    (Stage.ENDED, ResumeAsked): _stay,
    (Stage.ENDED, Emptied): _stay,
    (Stage.ENDED, LateRequest): _stay,
    (Stage.ENDED, DeadlinePassed): _stay,
    (Stage.ENDED, EngineGone): _stay,
    (Stage.ENDED, Written): _stay,
}
