"""Cells of ends nobody asked for, and of an engine that has to be ended because it is lost."""

from dataclasses import replace

from vllm_supervisor.core import facts, orders
from vllm_supervisor.core.ends import REQUESTED
from vllm_supervisor.core.facts import Fact, Timer
from vllm_supervisor.core.lifecycle import Moment, Node, Policy, State, Why
from vllm_supervisor.core.moves import lost, terminate
from vllm_supervisor.core.table import ALIVE, Step, on
from vllm_supervisor.core.words import ClosedReason, Cut


@on(*ALIVE, fact=facts.Exited, to=(Node.SWEEPING,))
def exited_while_serving(state: State, fact: facts.Exited, moment: Moment, _policy: Policy) -> Step:
    """Nobody asked: clients are told at once, then everything that is left is removed."""
    return replace(state, node=Node.SWEEPING, ending=lost(state, moment, fact.raw)), [
        orders.CloseGate(ClosedReason.RESTARTING),
        orders.CutInFlight(Cut.ENGINE_FAILED),
        orders.ClearTimer(Timer.EVIDENCE),
        orders.ClearTimer(Timer.EMPTY),
        orders.ClearTimer(Timer.CUT),
        orders.Sweep(),
    ]


@on(Node.STARTING, Node.LOSING, Node.TERMINATING, Node.KILLING, fact=facts.Exited, to=(Node.SWEEPING,))
def exited(state: State, fact: facts.Exited, moment: Moment, _policy: Policy) -> Step:
    """The main process is gone; whatever is left of its tree goes now."""
    return replace(state, node=Node.SWEEPING, ending=lost(state, moment, fact.raw)), [
        orders.ClearTimer(Timer.START),
        orders.ClearTimer(Timer.GRACE),
        orders.ClearTimer(Timer.FAREWELL),
        orders.Sweep(),
    ]


@on(*ALIVE, fact=facts.MemberDied, to=(Node.KILLING,))
def member_died(state: State, fact: facts.MemberDied, moment: Moment, policy: Policy) -> Step:
    """An engine without its core never recovers, and vLLM needs seconds to notice: end it now."""
    dead = (f"{fact.name} (pid {fact.pid})", *fact.others)
    state = replace(state, first_dead=(*state.first_dead, *dead))
    sentence = f"{' and '.join(dead)} died under the running engine"
    return put_down(state, moment, policy, Why.CORE_DIED, sentence)


@on(*ALIVE, fact=facts.ReportedDead, to=(Node.KILLING,))
def reported_dead(state: State, fact: facts.ReportedDead, moment: Moment, policy: Policy) -> Step:
    """The engine says it is dead and does not end: end it."""
    return put_down(state, moment, policy, Why.REPORTED_DEAD, fact.sentence)


@on(
    *ALIVE, Node.STARTING, Node.LOSING, Node.TERMINATING, Node.KILLING,
    fact=facts.MemoryFloor, to=(Node.KILLING,),
)  # fmt: skip
def memory_floor(state: State, fact: facts.MemoryFloor, moment: Moment, policy: Policy) -> Step:
    """The guard has killed it already; the rest of its tree goes, too, and it is written down what was seen."""
    if fact.incarnation != state.incarnation or state.why is Why.MEMORY:
        return state, []
    state, more = put_down(state, moment, policy, Why.MEMORY, fact.sentence)
    return state, [
        orders.ClearTimer(Timer.START),
        orders.ClearTimer(Timer.FAREWELL),
        *more,
        orders.SaveEvidence(fact.sentence),
    ]


@on(Node.SWEEPING, fact=facts.MemoryFloor)
def memory_floor_told_late(state: State, fact: facts.MemoryFloor, _moment: Moment, _policy: Policy) -> Step:
    """The guard's KILL may be faster than its word: the end that is being looked into was its doing all the same."""
    ending = state.ending
    if fact.incarnation != state.incarnation or ending is None or ending.why in (*REQUESTED, Why.MEMORY):
        return state, []
    ending = replace(ending, why=Why.MEMORY, why_sentence=fact.sentence, kill_sent=True)
    return replace(state, ending=ending), [orders.SaveEvidence(fact.sentence)]


def put_down(state: State, moment: Moment, policy: Policy, why: Why, sentence: str) -> Step:
    """KILL an engine that cannot serve any more; clients are told first."""
    keep = state.why in REQUESTED
    state = replace(
        state,
        node=Node.KILLING,
        why=state.why if keep else why,
        why_sentence=state.why_sentence if keep else sentence,
        kill_sent=True,
    )
    return state, [
        orders.CloseGate(ClosedReason.RESTARTING),
        orders.CutInFlight(Cut.ENGINE_FAILED),
        orders.ClearTimer(Timer.EVIDENCE),
        orders.ClearTimer(Timer.EMPTY),
        orders.ClearTimer(Timer.CUT),
        orders.Record("engine_lost", sentence, level="error"),
        orders.KillTree(),
        orders.SetTimer(Timer.GRACE, moment.now + policy.kill_grace),
    ]


@on(Node.READY, fact=facts.Condemned, to=(Node.EXAMINING,))
def condemned(state: State, fact: facts.Condemned, moment: Moment, policy: Policy) -> Step:
    """Look first: what is seen now is gone with the engine."""
    why = Why.FAILING if fact.failing else Why.HANG
    return replace(state, node=Node.EXAMINING, why=why, why_sentence=fact.sentence), [
        orders.Record("condemned", fact.sentence, level="error"),
        orders.SetTimer(Timer.EVIDENCE, moment.now + policy.evidence_takes),
        orders.SaveEvidence("failing" if fact.failing else "stuck"),
    ]


@on(Node.EXAMINING, fact=facts.EvidenceSaved, to=(Node.TERMINATING,))
def examined(state: State, _fact: Fact, moment: Moment, policy: Policy) -> Step:
    """What could be seen is written down."""
    return end_condemned(state, moment, policy)


@on(Node.EXAMINING, fact=facts.TimerFired, to=(Node.TERMINATING,))
def examined_enough(state: State, _fact: Fact, moment: Moment, policy: Policy) -> Step:
    """The bundle takes too long: the engine goes without it."""
    return end_condemned(state, moment, policy)


def end_condemned(state: State, moment: Moment, policy: Policy) -> Step:
    """Clients are told, then the engine goes: it cannot finish anything."""
    state, more = terminate(state, moment.now + min(policy.lost_grace, policy.stop_grace))
    return state, [
        orders.ClearTimer(Timer.EVIDENCE),
        orders.CloseGate(ClosedReason.RESTARTING),
        orders.CutInFlight(Cut.ENGINE_FAILED),
        *more,
    ]


@on(Node.STARTING, fact=facts.MemberDied, to=(Node.LOSING,))
def member_died_loading(state: State, fact: facts.MemberDied, moment: Moment, policy: Policy) -> Step:
    """A core that fails during the load leaves its reason to the main process, which ends by itself."""
    dead = (f"{fact.name} (pid {fact.pid})", *fact.others)
    return await_farewell(replace(state, first_dead=(*state.first_dead, *dead)), moment, policy)


@on(Node.STARTING, fact=facts.ReportedDead, to=(Node.LOSING,))
def reported_dead_loading(state: State, _fact: facts.ReportedDead, moment: Moment, policy: Policy) -> Step:
    """The same, told by its output."""
    return await_farewell(state, moment, policy)


def await_farewell(state: State, moment: Moment, policy: Policy) -> Step:
    """Give an engine that lost its core the time to say why."""
    until = moment.now + policy.farewell
    return replace(state, node=Node.LOSING, kill_at=until), [
        orders.ClearTimer(Timer.START),
        orders.SetTimer(Timer.FAREWELL, until),
    ]


@on(Node.LOSING, fact=facts.TimerFired, to=(Node.KILLING,))
def farewell_over(state: State, _fact: facts.TimerFired, moment: Moment, policy: Policy) -> Step:
    """It had its time to say why; some engines wait for ever for a core that is gone."""
    state = replace(
        state, node=Node.KILLING, why=Why.CORE_DIED, why_sentence="the engine lost its core", kill_sent=True
    )
    return state, [orders.KillTree(), orders.SetTimer(Timer.GRACE, moment.now + policy.kill_grace)]


@on(Node.STARTING, fact=facts.TimerFired, to=(Node.TERMINATING,))
def start_timed_out(state: State, _fact: facts.TimerFired, moment: Moment, policy: Policy) -> Step:
    """No sign of progress for the whole of `engine.start_timeout`."""
    waited = moment.now - (moment.now if state.load_seen_at is None else state.load_seen_at)
    limit = "twice engine.start_timeout" if state.load_cpu else "engine.start_timeout"
    seen = "no new line, no I/O, no growing memory" + (", only CPU time" if state.load_cpu else "")
    sentence = f"the load showed no progress for {round(waited, 1):g} s ({limit}): {seen}"
    state = replace(state, why=Why.START_TIMEOUT, why_sentence=sentence)
    return terminate(state, moment.now + min(policy.load_grace, policy.stop_grace))
