"""Cells between two incarnations: what ended, whether and when the next one starts, and giving up."""

from dataclasses import replace

from vllm_supervisor.core import facts, orders, restart
from vllm_supervisor.core.ends import judge
from vllm_supervisor.core.exit_status import GAVE_UP_OUTSIDE, GAVE_UP_REPEATS
from vllm_supervisor.core.facts import Fact, Timer
from vllm_supervisor.core.lifecycle import Moment, Node, Policy, State
from vllm_supervisor.core.moves import gone, launch, spawn
from vllm_supervisor.core.restart import GiveUp, GiveUpKind, Restart
from vllm_supervisor.core.table import Step, on
from vllm_supervisor.core.words import ClosedReason

NO_MEMORY = "the engine cannot start: too little memory is free"
WHERE_TO_LOOK = "see `vllm-supervisor status`"  # where the engine's own words are shown
# Whoever meets a parked engine, by whichever door, reads how to leave that.
WAY_OUT = "once mended: vllm-supervisor restart --reason TEXT; if the command line was wrong: stop and start anew"


@on(Node.SWEEPING, fact=facts.SweepDone, to=(Node.STARTING, Node.GATING, Node.WAITING, Node.PARKED, Node.GONE))
def swept(state: State, fact: facts.SweepDone, moment: Moment, policy: Policy) -> Step:
    """Nothing is left. Say what ended, then decide what comes next."""
    said: list[orders.Order] = [orders.OpenGate(ClosedReason.UNKILLABLE)]
    decision: Restart | GiveUp | None = None
    if state.ending is not None:
        state, decision, more = judge(state, state.ending, fact, moment, policy)
        said += more
    if state.leaving:
        state, more = gone(state)
    elif decision is None:
        state, more = launch(state, moment, policy)
    elif isinstance(decision, Restart):
        state, more = wait(state, decision.at, moment, policy)
    else:
        state, more = give_up(state, decision, moment, policy)
    return state, said + more


def wait(state: State, at: float, moment: Moment, policy: Policy) -> Step:
    """Back off; without a backoff the next incarnation starts at once."""
    if at <= moment.now:
        return launch(state, moment, policy)
    sentence = f"the next engine starts in {at - moment.now:.1f} s"
    return replace(state, node=Node.WAITING), [
        orders.SetTimer(Timer.BACKOFF, at),
        orders.Record("backing_off", sentence),
    ]


@on(Node.WAITING, fact=facts.TimerFired, to=(Node.STARTING, Node.GATING, Node.WAITING))
def backoff_over(state: State, _fact: Fact, moment: Moment, policy: Policy) -> Step:
    """The backoff has passed; while we are leaving nothing starts."""
    return (state, []) if state.leaving else launch(state, moment, policy)


@on(Node.GATING, fact=facts.MemoryBack, to=(Node.STARTING,))
def memory_back(state: State, _fact: facts.MemoryBack, moment: Moment, policy: Policy) -> Step:
    """There is room for an engine."""
    return spawn(state, moment, policy)


@on(Node.GATING, fact=facts.MemoryShort, to=(Node.PARKED, Node.GONE))
def memory_short(state: State, fact: facts.MemoryShort, moment: Moment, policy: Policy) -> Step:
    """A start without the memory for it would wedge the machine: nothing is tried any more."""
    status = GAVE_UP_OUTSIDE if fact.lost else GAVE_UP_REPEATS
    return give_up(state, GiveUp(GiveUpKind.MEMORY, fact.sentence, status, NO_MEMORY), moment, policy)


def give_up(state: State, decision: GiveUp, moment: Moment, policy: Policy) -> Step:
    """Park or end, as configured: nothing is tried any more."""
    sentence = decision.sentence
    mode = restart.give_up_mode(
        policy.restart,
        ever_ready=state.tally.ever_ready,
        on_terminal=policy.on_terminal,
        has_notify=policy.has_notify,
        is_pid1=policy.is_pid1,
    )
    if mode == "exit":
        state = replace(state, problem=sentence, public_problem=decision.public, give_up_status=decision.status)
        state, more = gone(state)
        return state, [orders.Record("gave_up", f"gave up: {sentence}", level="error"), *more]
    sentence = f"{sentence}; {WAY_OUT}"
    last = state.last_restart
    if last is not None:  # what it had, a ready engine, is over; what an operator starts later is another matter
        last = replace(last, ready_after_s=None, given_up=True)
    public = f"{decision.public}; {WHERE_TO_LOOK}"
    state = replace(state, node=Node.PARKED, problem=sentence, public_problem=public, started=True, last_restart=last)
    parked: list[orders.Order] = [
        orders.CloseGate(ClosedReason.PARKED, public),
        orders.Record("parked", f"parked: {sentence}", level="error"),
    ]
    at = restart.slow_retry_at(policy.restart, moment.now)
    return state, [*parked, orders.SetTimer(Timer.BACKOFF, at)] if at is not None else parked


@on(Node.PARKED, fact=facts.TimerFired, to=(Node.SWEEPING, Node.PARKED))
def slow_retry(state: State, _fact: Fact, _moment: Moment, _policy: Policy) -> Step:
    """`restart.slow_retry` has passed: one try, from a clean proof."""
    if state.leaving:
        return state, []
    state = replace(state, node=Node.SWEEPING, ending=None)
    return state, [orders.Record("slow_retry", "trying once more after restart.slow_retry"), orders.Sweep()]


@on(Node.SWEEPING, fact=facts.SweepFailed, to=(Node.UNKILLABLE, Node.GONE))
def sweep_failed(state: State, fact: facts.SweepFailed, moment: Moment, policy: Policy) -> Step:
    """Something is left: never a second engine beside it."""
    said = orders.Record("unkillable", fact.sentence, level="error")
    if fact.refused:
        state, more = gone(replace(state, problem=fact.sentence, public_problem="", give_up_status=78))
        return state, [said, *more]
    if state.leaving:
        state, more = gone(replace(state, unkillable=True, problem=fact.sentence, public_problem=""))
        return state, [said, *more]
    return replace(state, node=Node.UNKILLABLE, problem=fact.sentence, public_problem=""), [
        orders.CloseGate(ClosedReason.UNKILLABLE),
        said,
        orders.SetTimer(Timer.BACKOFF, moment.now + policy.look_again),
    ]


@on(Node.UNKILLABLE, fact=facts.TimerFired, to=(Node.SWEEPING,))
def look_again(state: State, _fact: facts.TimerFired, _moment: Moment, _policy: Policy) -> Step:
    """A process in the kernel's hands may go after all."""
    return replace(state, node=Node.SWEEPING), [orders.Sweep()]
