"""Cells of ends we ask for: a stop, which the drain orders, and a restart that a person orders."""

from dataclasses import replace

from vllm_supervisor.core import facts, orders, restart
from vllm_supervisor.core.facts import Fact, Timer
from vllm_supervisor.core.lifecycle import Moment, Node, Policy, State, Why
from vllm_supervisor.core.moves import gone, kill, launch, lost, terminate
from vllm_supervisor.core.table import ALIVE, Step, on
from vllm_supervisor.core.words import ClosedReason, Cut


def wait_for_cut(state: State, kill_at: float, moment: Moment, policy: Policy) -> Step:
    """Let cut exchanges end before TERM: an engine with an open connection may never exit (vLLM 0.32).

    And let it confirm that it has stopped their work: after TERM it may have no time to.
    """
    return replace(state, node=Node.CUTTING, kill_at=kill_at), [
        orders.ClearTimer(Timer.EMPTY),
        orders.SetTimer(Timer.CUT, min(moment.now + policy.cut_grace, kill_at)),
        orders.WatchCut(),
    ]


@on(Node.BOOTING, Node.WAITING, Node.GATING, Node.PARKED, fact=facts.EngineStopOrdered, to=(Node.GONE,))
def stop_without_engine(state: State, _fact: Fact, _moment: Moment, _policy: Policy) -> Step:
    """There is no engine."""
    return gone(state)


@on(Node.UNKILLABLE, fact=facts.EngineStopOrdered, to=(Node.GONE,))
def stop_unkillable(state: State, _fact: Fact, _moment: Moment, _policy: Policy) -> Step:
    """We leave, and our exit status says that a process is left."""
    return gone(replace(state, unkillable=True))


@on(Node.STARTING, fact=facts.EngineStopOrdered, to=(Node.TERMINATING,))
def stop_loading(state: State, fact: facts.EngineStopOrdered, moment: Moment, policy: Policy) -> Step:
    """Nothing was accepted yet, and vLLM ignores TERM while it loads: a short grace is enough."""
    return terminate(replace(state, why=Why.STOP), min(fact.kill_at, moment.now + policy.load_grace))


@on(Node.LOSING, fact=facts.EngineStopOrdered)
def stop_losing(state: State, fact: facts.EngineStopOrdered, moment: Moment, policy: Policy) -> Step:
    """It is ending anyway; now it has less time for it."""
    until = min(fact.kill_at, moment.now + policy.load_grace)
    if state.kill_at is not None:
        until = min(until, state.kill_at)
    return replace(state, why=Why.STOP, kill_at=until), [orders.SetTimer(Timer.FAREWELL, until)]


@on(Node.EXAMINING, fact=facts.EngineStopOrdered)
def stop_examining(state: State, fact: facts.EngineStopOrdered, moment: Moment, policy: Policy) -> Step:
    """The bundle gets what the engine's own end leaves of the time: of a hurried stop, nothing."""
    left = min(moment.now + policy.evidence_takes, fact.kill_at - policy.lost_grace)
    return state, [orders.SetTimer(Timer.EVIDENCE, max(moment.now, left))]


@on(Node.READY, Node.EMPTYING, fact=facts.EngineStopOrdered, to=(Node.CUTTING,))
def stop_serving(state: State, fact: facts.EngineStopOrdered, moment: Moment, policy: Policy) -> Step:
    """The drain is over: what was cut may say so to its clients, then TERM."""
    return wait_for_cut(replace(state, why=Why.STOP), fact.kill_at, moment, policy)


@on(Node.CUTTING, fact=facts.EngineStopOrdered)
def stop_cutting(state: State, fact: facts.EngineStopOrdered, _moment: Moment, _policy: Policy) -> Step:
    """Asked again: less time for the engine, once it is told."""
    earlier = fact.kill_at if state.kill_at is None else min(fact.kill_at, state.kill_at)
    return replace(state, why=Why.STOP, kill_at=earlier), []


@on(Node.TERMINATING, fact=facts.EngineStopOrdered)
def stop_terminating(state: State, fact: facts.EngineStopOrdered, _moment: Moment, _policy: Policy) -> Step:
    """TERM is out and is never repeated: only the wait for it shortens."""
    earlier = fact.kill_at if state.kill_at is None else min(fact.kill_at, state.kill_at)
    why = Why.STOP if state.why in (Why.NONE, Why.COMMANDED) else state.why
    return replace(state, why=why, kill_at=earlier), [orders.SetTimer(Timer.GRACE, earlier)]


@on(*ALIVE, Node.STARTING, Node.LOSING, Node.TERMINATING, fact=facts.EngineKillOrdered, to=(Node.KILLING,))
def kill_ordered(state: State, _fact: Fact, moment: Moment, policy: Policy) -> Step:
    """The third request to stop."""
    return kill(replace(state, why=Why.STOP), moment, policy)


@on(Node.EMPTYING, fact=facts.StopRequested, to=(Node.READY,))
def stop_joins(state: State, _fact: Fact, _moment: Moment, _policy: Policy) -> Step:
    """A stop takes over from an ordered restart, with its own budget."""
    return replace(state, node=Node.READY, why=Why.NONE, why_sentence=""), [orders.ClearTimer(Timer.EMPTY)]


@on(Node.EMPTYING, fact=facts.Drained, to=(Node.TERMINATING,))
def emptied(state: State, _fact: Fact, moment: Moment, policy: Policy) -> Step:
    """Nothing is in flight: the engine may go."""
    return terminate(state, moment.now + policy.stop_grace)


@on(Node.EMPTYING, fact=facts.TimerFired, to=(Node.CUTTING,))
def empty_over(state: State, _fact: Fact, moment: Moment, policy: Policy) -> Step:
    """The budget is spent: what is still open is cut."""
    sentence = f"the drain budget of {policy.limits.drain:g} s is spent; what is still open is cut"
    state, more = wait_for_cut(state, moment.now + policy.cut_grace + policy.stop_grace, moment, policy)
    return state, [
        orders.Record("drain_deadline", sentence, level="warning"),
        orders.CutInFlight(Cut.DRAIN_DEADLINE),
        *more,
    ]


@on(Node.CUTTING, fact=facts.CutSettled, to=(Node.TERMINATING,))
def cut_done(state: State, _fact: Fact, moment: Moment, policy: Policy) -> Step:
    """All have been told."""
    return terminate(state, kill_time(state, moment, policy))


@on(Node.CUTTING, fact=facts.TimerFired, to=(Node.TERMINATING,))
def cut_over(state: State, _fact: Fact, moment: Moment, policy: Policy) -> Step:
    """Clients that take nothing do not hold us."""
    return terminate(state, kill_time(state, moment, policy))


def kill_time(state: State, moment: Moment, policy: Policy) -> float:
    """When TERM has to have worked: as the stop planned it, else the whole grace from now."""
    return moment.now + policy.stop_grace if state.kill_at is None else state.kill_at


@on(Node.TERMINATING, fact=facts.TimerFired, to=(Node.KILLING,))
def grace_over(state: State, _fact: Fact, moment: Moment, policy: Policy) -> Step:
    """TERM was not enough."""
    sentence = "the engine did not end after TERM; KILL goes to all of its processes"
    state, more = kill(state, moment, policy)
    return state, [orders.Record("killing", sentence, level="warning"), *more]


@on(Node.KILLING, fact=facts.TimerFired, to=(Node.SWEEPING,))
def kill_over(state: State, _fact: Fact, moment: Moment, _policy: Policy) -> Step:
    """Not even KILL ended the main process: the sweep tells what is left and how."""
    return replace(state, node=Node.SWEEPING, ending=lost(state, moment, -9)), [orders.Sweep()]


# -- a restart that a person orders


@on(Node.READY, fact=facts.RestartRequested, to=(Node.READY, Node.EMPTYING))
def restart_serving(state: State, fact: facts.RestartRequested, moment: Moment, policy: Policy) -> Step:
    """Drain first, then restart; while we are leaving there is nothing to restart."""
    if state.leaving:
        return state, [asked_restart(fact)]
    state = replace(state, node=Node.EMPTYING, why=Why.COMMANDED, why_sentence=fact.reason)
    return state, [
        orders.CloseGate(ClosedReason.RESTARTING),
        asked_restart(fact),
        orders.SetTimer(Timer.EMPTY, moment.now + policy.limits.drain),
        orders.WatchDrain(),
    ]


@on(Node.STARTING, fact=facts.RestartRequested, to=(Node.TERMINATING,))
def restart_loading(state: State, fact: facts.RestartRequested, moment: Moment, policy: Policy) -> Step:
    """Nothing is in flight while it loads."""
    state = replace(state, why=Why.COMMANDED, why_sentence=fact.reason)
    state, more = terminate(state, moment.now + min(policy.load_grace, policy.stop_grace))
    return state, [asked_restart(fact), *more]


@on(Node.WAITING, fact=facts.RestartRequested, to=(Node.WAITING, Node.GATING, Node.STARTING))
def restart_now(state: State, fact: facts.RestartRequested, moment: Moment, policy: Policy) -> Step:
    """A person does not wait for the backoff, and gives fresh budgets."""
    if state.leaving:
        return state, [asked_restart(fact)]
    state, more = launch(replace(state, tally=restart.pardoned(state.tally)), moment, policy)
    return state, [asked_restart(fact), *more]


@on(Node.PARKED, Node.UNKILLABLE, fact=facts.RestartRequested, to=(Node.SWEEPING,))
def restart_parked(state: State, fact: facts.RestartRequested, _moment: Moment, _policy: Policy) -> Step:
    """A person has mended something: begin with a clean tally, and prove again that nothing is left."""
    state = replace(state, node=Node.SWEEPING, tally=restart.pardoned(state.tally), measure_now=True)
    return state, [
        asked_restart(fact),
        orders.ClearTimer(Timer.BACKOFF),
        orders.CloseGate(ClosedReason.RESTARTING),
        orders.Sweep(),
    ]


@on(Node.GATING, fact=facts.RestartRequested)
def restart_gated(state: State, fact: facts.RestartRequested, _moment: Moment, _policy: Policy) -> Step:
    """A person sees what holds the memory, and wants the engine beside it."""
    return replace(state, tally=restart.pardoned(state.tally), measure_now=True), [asked_restart(fact)]


@on(Node.SWEEPING, Node.LOSING, Node.EXAMINING, Node.TERMINATING, Node.KILLING, fact=facts.RestartRequested)
def restart_instead(state: State, fact: facts.RestartRequested, _moment: Moment, _policy: Policy) -> Step:
    """An engine is going anyway; after it the next one starts with fresh budgets, as a person's order gives them."""
    return replace(state, tally=restart.pardoned(state.tally)), [asked_restart(fact)]


@on(Node.BOOTING, Node.EMPTYING, Node.CUTTING, Node.GONE, fact=facts.RestartRequested)
def restart_anyway(state: State, fact: facts.RestartRequested, _moment: Moment, _policy: Policy) -> Step:
    """One is under way, or we are leaving: there is never a second at a time."""
    return state, [asked_restart(fact)]


def asked_restart(fact: facts.RestartRequested) -> orders.Record:
    """Say who asked."""
    return orders.Record("restart_requested", f"restart requested by {fact.by}: {fact.reason}")
