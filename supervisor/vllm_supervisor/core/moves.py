"""Moves that several cells make: start, TERM, KILL, the books of a lost life, and the end for good."""

from dataclasses import replace

from vllm_supervisor.core import orders
from vllm_supervisor.core.facts import Timer
from vllm_supervisor.core.lifecycle import Ending, Moment, Node, Policy, State, Why
from vllm_supervisor.core.table import Step
from vllm_supervisor.core.words import ClosedReason


def launch(state: State, moment: Moment, policy: Policy) -> Step:
    """Start the next incarnation, through the gate where memory has to come back first."""
    if not policy.memory_gate:
        return spawn(state, moment, policy)
    return replace(state, node=Node.GATING, pid=None), [
        orders.ClearTimer(Timer.BACKOFF),
        orders.AwaitMemory(moment.now + policy.gate_timeout),
    ]


def spawn(state: State, moment: Moment, policy: Policy) -> Step:
    """Start the next incarnation; every wish and deadline of the last one is forgotten."""
    number = state.incarnation + 1
    state = replace(
        state,
        node=Node.STARTING,
        incarnation=number,
        pid=None,
        why=Why.NONE,
        why_sentence="",
        term_sent=False,
        kill_sent=False,
        spawned_at=moment.now,
        ready_at=None,
        load_seen_at=moment.now,
        load_cpu=False,
        first_dead=(),
        ending=None,
        problem="",
        public_problem="",
        kill_at=None,
        measure_now=False,
    )
    return state, [
        orders.OpenGate(ClosedReason.PARKED),
        orders.ClearTimer(Timer.BACKOFF),
        orders.SetTimer(Timer.START, moment.now + policy.start_timeout),
        orders.Spawn(number),
    ]


def terminate(state: State, kill_at: float) -> Step:
    """TERM to the main process, once, with a deadline."""
    return replace(state, node=Node.TERMINATING, term_sent=True, kill_at=kill_at), [
        orders.ClearTimer(Timer.START),
        orders.ClearTimer(Timer.EMPTY),
        orders.ClearTimer(Timer.CUT),
        orders.Terminate(),
        orders.SetTimer(Timer.GRACE, kill_at),
    ]


def kill(state: State, moment: Moment, policy: Policy) -> Step:
    """KILL the whole tree."""
    return replace(state, node=Node.KILLING, kill_sent=True), [
        *(orders.ClearTimer(timer) for timer in (Timer.START, Timer.EMPTY, Timer.CUT, Timer.EVIDENCE, Timer.FAREWELL)),
        orders.KillTree(),
        orders.SetTimer(Timer.GRACE, moment.now + policy.kill_grace),
    ]


def lost(state: State, moment: Moment, raw: int | None, *, problem: str = "", may_pass: bool = False) -> Ending:
    """Put together what is known of the incarnation that has just ended."""
    return Ending(
        raw=raw,
        at=moment.now,
        was_ready=state.ready_at is not None,
        why=state.why,
        term_sent=state.term_sent,
        kill_sent=state.kill_sent,
        why_sentence=state.why_sentence,
        spawn_problem=problem,
        spawn_may_pass=may_pass,
    )


def gone(state: State) -> Step:
    """No engine any more, for good."""
    return replace(state, node=Node.GONE), [orders.ClearTimer(Timer.BACKOFF)]
