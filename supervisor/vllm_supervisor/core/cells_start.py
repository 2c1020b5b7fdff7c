"""Cells of a start: from the first sweep to a ready engine."""

from dataclasses import replace

from vllm_supervisor.core import facts, orders, restart
from vllm_supervisor.core.facts import Timer
from vllm_supervisor.core.lifecycle import Moment, Node, Policy, State
from vllm_supervisor.core.moves import lost
from vllm_supervisor.core.table import Step, on
from vllm_supervisor.core.words import ClosedReason


@on(Node.BOOTING, fact=facts.Began, to=(Node.SWEEPING,))
def begin(state: State, _fact: facts.Began, _moment: Moment, _policy: Policy) -> Step:
    """Sweep before the first start as well: a killed supervisor leaves its engine behind."""
    return replace(state, node=Node.SWEEPING), [orders.Sweep()]


@on(Node.STARTING, Node.TERMINATING, Node.KILLING, fact=facts.Spawned)
def spawned(state: State, fact: facts.Spawned, _moment: Moment, _policy: Policy) -> Step:
    """Remember the main process."""
    said = orders.Record(
        "spawned",
        f"engine {state.incarnation} started as pid {fact.pid}",
        (("pid", fact.pid), ("incarnation", state.incarnation)),
    )
    return replace(state, pid=fact.pid), [said]


@on(Node.STARTING, Node.LOSING, Node.TERMINATING, Node.KILLING, fact=facts.SpawnFailed, to=(Node.SWEEPING,))
def spawn_failed(state: State, fact: facts.SpawnFailed, moment: Moment, _policy: Policy) -> Step:
    """A command that cannot be started is an end like any other, without a status."""
    ending = lost(state, moment, None, problem=fact.sentence, may_pass=fact.may_pass)
    return replace(state, node=Node.SWEEPING, ending=ending), [
        orders.ClearTimer(Timer.START),
        orders.ClearTimer(Timer.GRACE),
        orders.ClearTimer(Timer.FAREWELL),
        orders.Sweep(),
    ]


@on(Node.STARTING, fact=facts.LoadProgressed)
def load_progressed(state: State, fact: facts.LoadProgressed, moment: Moment, policy: Policy) -> Step:
    """Move the deadline: a load that goes on is never too slow, but CPU time alone only doubles the wait."""
    if fact.cpu_only:
        seen = moment.now if state.load_seen_at is None else state.load_seen_at
        state = replace(state, load_cpu=True)
        until = min(moment.now, seen + policy.start_timeout) + policy.start_timeout
    else:
        state = replace(state, load_seen_at=moment.now, load_cpu=False)
        until = moment.now + policy.start_timeout
    return state, [orders.SetTimer(Timer.START, until)]


@on(Node.STARTING, fact=facts.StaysUnready)
def stays_unready(state: State, fact: facts.StaysUnready, _moment: Moment, _policy: Policy) -> Step:
    """Name the reason long before the deadline ends the start: the engine may still come round."""
    said = orders.Record("not_ready", f"engine {state.incarnation} is not ready: {fact.sentence}", level="warning")
    return replace(state, problem=fact.sentence, public_problem=fact.sentence), [said]


@on(Node.STARTING, fact=facts.BecameReady, to=(Node.READY,))
def became_ready(state: State, fact: facts.BecameReady, moment: Moment, _policy: Policy) -> Step:
    """Open admission."""
    took = moment.now - (moment.now if state.spawned_at is None else state.spawned_at)
    last = state.last_restart
    if last is not None and last.ready_after_s is None and not last.given_up:
        last = replace(last, ready_after_s=moment.now - last.at)
    sentence = f"engine {state.incarnation} is ready after {took:.1f} s" + (f" ({fact.note})" if fact.note else "")
    state = replace(
        state,
        node=Node.READY,
        ready_at=moment.now,
        load_s=took,
        started=True,
        problem="",
        public_problem="",
        last_restart=last,
        tally=restart.ready(state.tally, moment.now),
    )
    return state, [
        orders.ClearTimer(Timer.START),
        orders.OpenGate(ClosedReason.STARTING),
        orders.OpenGate(ClosedReason.RESTARTING),
        orders.Record("ready", sentence, (("pid", state.pid), ("took_s", round(took, 3)))),
    ]
