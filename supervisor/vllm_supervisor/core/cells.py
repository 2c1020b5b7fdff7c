"""The cells of the lifecycle table: what each fact does in each node.

Each cell names the nodes it may lead to, so that the diagram in the documents is drawn from here and cannot lie.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from vllm_supervisor.core import facts, orders, restart
from vllm_supervisor.core.ends import judge
from vllm_supervisor.core.facts import Fact, Timer
from vllm_supervisor.core.lifecycle import Cell, Ending, Moment, Node, Policy, State, Why
from vllm_supervisor.core.restart import GiveUp, Restart
from vllm_supervisor.core.words import ClosedReason, Cut, Phase

TABLE: dict[tuple[Node, type], Cell] = {}
LEADS_TO: dict[tuple[Node, type], tuple[Node, ...]] = {}

Step = tuple[State, list[orders.Order]]
F = TypeVar("F", bound=Fact)
CellFor = Callable[[State, F, Moment, Policy], Step]


def on(*nodes: Node, fact: type[F], to: tuple[Node, ...] = ()) -> Callable[[CellFor[F]], CellFor[F]]:
    """Put a cell into the table for `fact` in each of `nodes`; `to` are the nodes it may lead to (none: it stays)."""

    def put(cell: CellFor[F]) -> CellFor[F]:
        for node in nodes:
            if (node, fact) in TABLE:
                raise ValueError(f"two cells for {fact.__name__} in {node.value}")
            TABLE[node, fact] = cell
            LEADS_TO[node, fact] = to or (node,)
        return cell

    return put


def stay(state: State, _fact: Fact, _moment: Moment, _policy: Policy) -> Step:
    """Change nothing: the fact is harmless here."""
    return state, []


ALIVE = (Node.READY, Node.EXAMINING, Node.EMPTYING, Node.CUTTING)  # nodes in which requests may be at the engine
EVERY = tuple(Node)
BEYOND = tuple(
    node for node in Node if node not in (Node.BOOTING, Node.STARTING, *ALIVE)
)  # it has ended, or is about to


# -- beginning ---------------------------------------------------------------------------------------------------


@on(Node.BOOTING, fact=facts.Began, to=(Node.SWEEPING,))
def begin(state: State, _fact: facts.Began, _moment: Moment, _policy: Policy) -> Step:
    """Sweep before the first start as well: a killed supervisor leaves its engine behind."""
    return replace(state, node=Node.SWEEPING), [orders.Sweep()]


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
        first_dead=(),
        ending=None,
        problem="",
        drain_deadline=None,
    )
    return state, [
        orders.OpenGate(ClosedReason.PARKED),
        orders.OpenGate(ClosedReason.UNKILLABLE),
        orders.ClearTimer(Timer.BACKOFF),
        orders.SetTimer(Timer.START, moment.now + policy.start_timeout),
        orders.Spawn(number),
    ]


@on(Node.STARTING, Node.TERMINATING, Node.KILLING, fact=facts.Spawned)
def spawned(state: State, fact: facts.Spawned, _moment: Moment, _policy: Policy) -> Step:
    """Remember the main process."""
    said = orders.Record(
        "spawned",
        f"engine {state.incarnation} started as pid {fact.pid}",
        (("pid", fact.pid), ("incarnation", state.incarnation)),
    )
    return replace(state, pid=fact.pid), [said]


@on(Node.STARTING, Node.TERMINATING, Node.KILLING, fact=facts.SpawnFailed, to=(Node.SWEEPING,))
def spawn_failed(state: State, fact: facts.SpawnFailed, moment: Moment, _policy: Policy) -> Step:
    """A command that cannot be started is an end like any other, without a status."""
    return replace(state, node=Node.SWEEPING, ending=lost(state, moment, None, problem=fact.sentence)), [
        orders.ClearTimer(Timer.START),
        orders.ClearTimer(Timer.GRACE),
        orders.Sweep(),
    ]


@on(Node.STARTING, fact=facts.LoadProgressed)
def load_progressed(state: State, _fact: facts.LoadProgressed, moment: Moment, policy: Policy) -> Step:
    """A load that moves is never too slow."""
    return state, [orders.SetTimer(Timer.START, moment.now + policy.start_timeout)]


@on(Node.STARTING, fact=facts.BecameReady, to=(Node.READY,))
def became_ready(state: State, fact: facts.BecameReady, moment: Moment, _policy: Policy) -> Step:
    """Open admission."""
    took = moment.now - (moment.now if state.spawned_at is None else state.spawned_at)
    last = state.last_restart
    if last is not None and last.ready_after_s is None:
        last = replace(last, ready_after_s=moment.now - last.at)
    sentence = f"engine {state.incarnation} is ready after {took:.1f} s" + (f" ({fact.note})" if fact.note else "")
    state = replace(
        state,
        node=Node.READY,
        ready_at=moment.now,
        load_s=took,
        started=True,
        last_restart=last,
        tally=restart.ready(state.tally, moment.now),
    )
    return state, [
        orders.ClearTimer(Timer.START),
        orders.OpenGate(ClosedReason.STARTING),
        orders.OpenGate(ClosedReason.RESTARTING),
        orders.Record("ready", sentence, (("pid", state.pid), ("took_s", round(took, 3)))),
    ]


# -- ends nobody asked for ---------------------------------------------------------------------------------------


def lost(state: State, moment: Moment, raw: int | None, *, problem: str = "") -> Ending:
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
    )


@on(*ALIVE, fact=facts.Exited, to=(Node.SWEEPING,))
def exited_while_serving(state: State, fact: facts.Exited, moment: Moment, _policy: Policy) -> Step:
    """Nobody asked: clients are told at once, then everything that is left is removed."""
    return replace(state, node=Node.SWEEPING, ending=lost(state, moment, fact.raw)), [
        orders.CloseGate(ClosedReason.RESTARTING),
        orders.CutInFlight(Cut.ENGINE_FAILED),
        orders.ClearTimer(Timer.EVIDENCE),
        orders.ClearTimer(Timer.DRAIN),
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
    sentence = f"{fact.name} (pid {fact.pid}) died under the running engine"
    state = replace(state, first_dead=(*state.first_dead, fact.name))
    return put_down(state, moment, policy, Why.CORE_DIED, sentence)


@on(*ALIVE, fact=facts.ReportedDead, to=(Node.KILLING,))
def reported_dead(state: State, fact: facts.ReportedDead, moment: Moment, policy: Policy) -> Step:
    """The engine says it is dead and does not end: end it."""
    return put_down(state, moment, policy, Why.REPORTED_DEAD, fact.sentence)


def put_down(state: State, moment: Moment, policy: Policy, why: Why, sentence: str) -> Step:
    """KILL an engine that cannot serve any more; clients are told first."""
    keep = state.why in (Why.STOP, Why.COMMANDED)
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
        orders.ClearTimer(Timer.DRAIN),
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
        orders.SaveEvidence(fact.sentence),
    ]


@on(Node.EXAMINING, fact=facts.EvidenceSaved, to=(Node.TERMINATING,))
@on(Node.EXAMINING, fact=facts.TimerFired, to=(Node.TERMINATING,))
def examined(state: State, _fact: Fact, moment: Moment, policy: Policy) -> Step:
    """Clients are told, then the engine goes: it cannot finish anything."""
    state, more = terminate(state, moment, min(policy.lost_grace, policy.stop_grace))
    return state, [
        orders.ClearTimer(Timer.EVIDENCE),
        orders.CloseGate(ClosedReason.RESTARTING),
        orders.CutInFlight(Cut.ENGINE_FAILED),
        *more,
    ]


@on(Node.EXAMINING, fact=facts.StopRequested)
def stop_examining(state: State, fact: facts.StopRequested, _moment: Moment, _policy: Policy) -> Step:
    """It ends in a moment anyway."""
    return stopping(state, fact)


@on(Node.STARTING, fact=facts.MemberDied, to=(Node.LOSING,))
def member_died_loading(state: State, fact: facts.MemberDied, moment: Moment, policy: Policy) -> Step:
    """A core that fails during the load leaves its reason to the main process, which ends by itself."""
    state = replace(state, node=Node.LOSING, first_dead=(*state.first_dead, fact.name))
    return state, [orders.ClearTimer(Timer.START), orders.SetTimer(Timer.FAREWELL, moment.now + policy.farewell)]


@on(Node.STARTING, fact=facts.ReportedDead, to=(Node.LOSING,))
def reported_dead_loading(state: State, _fact: facts.ReportedDead, moment: Moment, policy: Policy) -> Step:
    """The same, told by its output."""
    return replace(state, node=Node.LOSING), [
        orders.ClearTimer(Timer.START),
        orders.SetTimer(Timer.FAREWELL, moment.now + policy.farewell),
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
    sentence = f"the load showed no progress for {policy.start_timeout:g} s (engine.start_timeout)"
    return terminate(
        replace(state, why=Why.START_TIMEOUT, why_sentence=sentence), moment, min(policy.load_grace, policy.stop_grace)
    )


# -- ends we ask for ---------------------------------------------------------------------------------------------


def terminate(state: State, moment: Moment, grace: float) -> Step:
    """TERM to the main process, once, with a deadline."""
    return replace(state, node=Node.TERMINATING, term_sent=True), [
        orders.ClearTimer(Timer.START),
        orders.ClearTimer(Timer.DRAIN),
        orders.ClearTimer(Timer.CUT),
        orders.Terminate(),
        orders.SetTimer(Timer.GRACE, moment.now + grace),
    ]


def cut(state: State, moment: Moment, policy: Policy) -> Step:
    """End what did not finish, before TERM: an engine with an open connection may never exit."""
    return replace(state, node=Node.CUTTING), [
        orders.ClearTimer(Timer.DRAIN),
        orders.CutInFlight(Cut.DRAIN_DEADLINE),
        orders.SetTimer(Timer.CUT, moment.now + policy.cut_grace),
        orders.WatchDrain(),
    ]


def kill(state: State, moment: Moment, policy: Policy) -> Step:
    """KILL the whole tree."""
    return replace(state, node=Node.KILLING, kill_sent=True), [
        orders.KillTree(),
        orders.SetTimer(Timer.GRACE, moment.now + policy.kill_grace),
    ]


def stopping(state: State, fact: facts.StopRequested) -> Step:
    """Note one more request to stop; the first closes admission for good and leaves `running`."""
    first = state.stops == 0
    state = replace(
        state,
        stops=state.stops + 1,
        why=Why.STOP,
        stop_signum=fact.signum if first else state.stop_signum,
        phase=Phase.DRAINING if state.phase is Phase.RUNNING else state.phase,
    )
    said = orders.Record(
        "stop_requested", f"stop requested by {fact.by}" + ("" if first else f" (request {state.stops}: hurrying)")
    )
    return state, ([orders.CloseGate(ClosedReason.STOPPING), said] if first else [said])


@on(Node.BOOTING, Node.WAITING, Node.PARKED, fact=facts.StopRequested, to=(Node.GONE,))
def stop_without_engine(state: State, fact: facts.StopRequested, _moment: Moment, _policy: Policy) -> Step:
    """There is no engine: write down how it ended."""
    state, said = stopping(state, fact)
    state, more = gone(state)
    return state, said + more


@on(Node.UNKILLABLE, fact=facts.StopRequested, to=(Node.GONE,))
def stop_unkillable(state: State, fact: facts.StopRequested, moment: Moment, policy: Policy) -> Step:
    """We leave, and our exit status says that a process is left."""
    return stop_without_engine(replace(state, unkillable=True), fact, moment, policy)


@on(Node.SWEEPING, Node.GONE, fact=facts.StopRequested)
def stop_noted(state: State, fact: facts.StopRequested, _moment: Moment, _policy: Policy) -> Step:
    """What is going on ends by itself and soon."""
    return stopping(state, fact)


@on(Node.STARTING, fact=facts.StopRequested, to=(Node.TERMINATING,))
def stop_loading(state: State, fact: facts.StopRequested, moment: Moment, policy: Policy) -> Step:
    """Nothing was accepted yet, and vLLM ignores TERM while it loads: a short grace is enough."""
    state, said = stopping(state, fact)
    state, more = terminate(state, moment, min(policy.load_grace, policy.stop_grace))
    return state, said + more


@on(Node.LOSING, fact=facts.StopRequested)
def stop_losing(state: State, fact: facts.StopRequested, _moment: Moment, _policy: Policy) -> Step:
    """It is ending anyway, within the farewell."""
    return stopping(state, fact)


@on(Node.READY, fact=facts.StopRequested, to=(Node.EMPTYING,))
def stop_serving(state: State, fact: facts.StopRequested, moment: Moment, policy: Policy) -> Step:
    """Refuse new work, let accepted work finish within the budget."""
    state, said = stopping(state, fact)
    state, more = empty(state, moment, policy)
    return state, said + more


def empty(state: State, moment: Moment, policy: Policy) -> Step:
    """Wait for the last request in flight, or for the budget to end."""
    deadline = moment.now + policy.drain_budget
    return replace(state, node=Node.EMPTYING, drain_deadline=deadline), [
        orders.SetTimer(Timer.DRAIN, deadline),
        orders.WatchDrain(),
    ]


@on(Node.EMPTYING, fact=facts.StopRequested, to=(Node.EMPTYING, Node.CUTTING))
def stop_draining(state: State, fact: facts.StopRequested, moment: Moment, policy: Policy) -> Step:
    """The first stop joins a drain for a restart and gets the whole budget; a further one ends the drain now."""
    first = state.stops == 0
    state, said = stopping(state, fact)
    state, more = empty(state, moment, policy) if first else cut(state, moment, policy)
    return state, said + more


@on(Node.CUTTING, fact=facts.StopRequested, to=(Node.CUTTING, Node.KILLING))
def stop_cutting(state: State, fact: facts.StopRequested, moment: Moment, policy: Policy) -> Step:
    """The third request kills."""
    state, said = stopping(state, fact)
    if state.stops < 3:  # noqa: PLR2004 - contract: a second one hurries, a third one kills
        return state, said
    state, more = kill(state, moment, policy)
    return state, said + more


@on(Node.TERMINATING, fact=facts.StopRequested, to=(Node.TERMINATING, Node.KILLING))
def stop_terminating(state: State, fact: facts.StopRequested, moment: Moment, policy: Policy) -> Step:
    """TERM is out and is never repeated: a second request shortens the wait for it, a third kills."""
    state, said = stopping(state, fact)
    if state.stops == 1:
        return state, said
    if state.stops == 2:  # noqa: PLR2004 - as above
        return state, [*said, orders.SetTimer(Timer.GRACE, moment.now + min(policy.short_grace, policy.stop_grace))]
    state, more = kill(state, moment, policy)
    return state, said + more


@on(Node.KILLING, fact=facts.StopRequested)
def stop_killing(state: State, fact: facts.StopRequested, _moment: Moment, _policy: Policy) -> Step:
    """Nothing is quicker than KILL."""
    return stopping(state, fact)


@on(Node.EMPTYING, fact=facts.Drained, to=(Node.TERMINATING,))
@on(Node.CUTTING, fact=facts.Drained, to=(Node.TERMINATING,))
def drained(state: State, _fact: Fact, moment: Moment, policy: Policy) -> Step:
    """Nothing is in flight: the engine may go. After a second request it gets the short budget."""
    hurried = state.stops > 1
    return terminate(state, moment, min(policy.short_grace, policy.stop_grace) if hurried else policy.stop_grace)


@on(Node.EMPTYING, fact=facts.TimerFired, to=(Node.CUTTING,))
def drain_over(state: State, _fact: facts.TimerFired, moment: Moment, policy: Policy) -> Step:
    """The budget is spent."""
    said = orders.Record("drain_deadline", "the drain budget is spent; what is still open is cut", level="warning")
    state, more = cut(state, moment, policy)
    return state, [said, *more]


@on(Node.CUTTING, fact=facts.TimerFired, to=(Node.TERMINATING,))
def cut_over(state: State, fact: facts.TimerFired, moment: Moment, policy: Policy) -> Step:
    """Clients that take nothing do not hold us."""
    return drained(state, fact, moment, policy)


@on(Node.TERMINATING, fact=facts.TimerFired, to=(Node.KILLING,))
def grace_over(state: State, _fact: facts.TimerFired, moment: Moment, policy: Policy) -> Step:
    """TERM was not enough."""
    said = orders.Record(
        "killing", "the engine did not end after TERM; KILL goes to all of its processes", level="warning"
    )
    state, more = kill(state, moment, policy)
    return state, [said, *more]


@on(Node.KILLING, fact=facts.TimerFired, to=(Node.SWEEPING,))
def kill_over(state: State, _fact: facts.TimerFired, moment: Moment, _policy: Policy) -> Step:
    """Not even KILL ended the main process: the sweep tells what is left and how."""
    return replace(state, node=Node.SWEEPING, ending=lost(state, moment, -9)), [orders.Sweep()]


# -- restart on demand, drain and resume -------------------------------------------------------------------------


@on(Node.READY, fact=facts.RestartRequested, to=(Node.EMPTYING,))
def restart_serving(state: State, fact: facts.RestartRequested, moment: Moment, policy: Policy) -> Step:
    """Drain first, then restart."""
    state, more = empty(replace(state, why=Why.COMMANDED, why_sentence=fact.reason), moment, policy)
    return state, [orders.CloseGate(ClosedReason.RESTARTING), asked_restart(fact), *more]


@on(Node.STARTING, fact=facts.RestartRequested, to=(Node.TERMINATING,))
def restart_loading(state: State, fact: facts.RestartRequested, moment: Moment, policy: Policy) -> Step:
    """Nothing is in flight while it loads."""
    state = replace(state, why=Why.COMMANDED, why_sentence=fact.reason)
    state, more = terminate(state, moment, min(policy.load_grace, policy.stop_grace))
    return state, [asked_restart(fact), *more]


@on(Node.WAITING, fact=facts.RestartRequested, to=(Node.STARTING,))
def restart_now(state: State, fact: facts.RestartRequested, moment: Moment, policy: Policy) -> Step:
    """A person does not wait for the backoff."""
    state, more = spawn(state, moment, policy)
    return state, [asked_restart(fact), *more]


@on(Node.PARKED, Node.UNKILLABLE, fact=facts.RestartRequested, to=(Node.SWEEPING,))
def restart_parked(state: State, fact: facts.RestartRequested, _moment: Moment, _policy: Policy) -> Step:
    """A person has mended something: begin with a clean tally, and prove again that nothing is left."""
    state = replace(state, node=Node.SWEEPING, tally=restart.pardoned(state.tally), ending=None)
    return state, [
        asked_restart(fact),
        orders.ClearTimer(Timer.BACKOFF),
        orders.CloseGate(ClosedReason.RESTARTING),
        orders.Sweep(),
    ]


@on(
    Node.BOOTING, Node.SWEEPING, Node.LOSING, Node.EXAMINING, Node.EMPTYING, Node.CUTTING, Node.TERMINATING, Node.KILLING, Node.GONE,
    fact=facts.RestartRequested,
)  # fmt: skip
def restart_anyway(state: State, fact: facts.RestartRequested, _moment: Moment, _policy: Policy) -> Step:
    """One is under way, or we are leaving: there is never a second at a time."""
    return state, [asked_restart(fact)]


def asked_restart(fact: facts.RestartRequested) -> orders.Record:
    """Say who asked."""
    return orders.Record("restart_requested", f"restart requested by {fact.by}: {fact.reason}")


@on(*EVERY, fact=facts.DrainRequested)
def drain_requested(state: State, fact: facts.DrainRequested, _moment: Moment, _policy: Policy) -> Step:
    """Close admission; nothing else changes."""
    return state, [
        orders.CloseGate(ClosedReason.DRAIN_REQUESTED),
        orders.Record("drain_requested", f"admission closed by {fact.by}"),
    ]


@on(*EVERY, fact=facts.ResumeRequested)
def resume_requested(state: State, fact: facts.ResumeRequested, _moment: Moment, _policy: Policy) -> Step:
    """Open admission again, as far as `drain` closed it."""
    return state, [
        orders.OpenGate(ClosedReason.DRAIN_REQUESTED),
        orders.Record("resumed", f"admission opened by {fact.by}"),
    ]


# -- between two incarnations ------------------------------------------------------------------------------------


@on(Node.SWEEPING, fact=facts.SweepDone, to=(Node.STARTING, Node.WAITING, Node.PARKED, Node.GONE))
def swept(state: State, fact: facts.SweepDone, moment: Moment, policy: Policy) -> Step:
    """Nothing is left. Say what ended, then decide what comes next."""
    said: list[orders.Order] = []
    decision: Restart | GiveUp | None = None
    if state.ending is not None:
        state, decision, said = judge(state, state.ending, fact.evidence, moment, policy)
    if state.stops:
        state, more = gone(state)
    elif decision is None:
        state, more = spawn(state, moment, policy)
    elif isinstance(decision, Restart):
        state, more = wait(state, decision.at, moment, policy)
    else:
        state, more = give_up(state, decision, moment, policy)
    return state, said + more


def wait(state: State, at: float, moment: Moment, policy: Policy) -> Step:
    """Back off; without a backoff the next incarnation starts at once."""
    if at <= moment.now:
        return spawn(state, moment, policy)
    sentence = f"the next engine starts in {at - moment.now:.1f} s"
    return replace(state, node=Node.WAITING), [
        orders.SetTimer(Timer.BACKOFF, at),
        orders.Record("backing_off", sentence),
    ]


@on(Node.WAITING, fact=facts.TimerFired, to=(Node.STARTING,))
def backoff_over(state: State, _fact: facts.TimerFired, moment: Moment, policy: Policy) -> Step:
    """The backoff has passed."""
    return spawn(state, moment, policy)


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
        state, more = gone(replace(state, problem=sentence, give_up_status=decision.status))
        return state, [orders.Record("gave_up", f"gave up: {sentence}", level="error"), *more]
    state = replace(state, node=Node.PARKED, problem=sentence, started=True)
    parked: list[orders.Order] = [
        orders.CloseGate(ClosedReason.PARKED, sentence),
        orders.Record("parked", f"parked: {sentence}", level="error"),
    ]
    at = restart.slow_retry_at(policy.restart, moment.now)
    return state, [*parked, orders.SetTimer(Timer.BACKOFF, at)] if at is not None else parked


@on(Node.PARKED, fact=facts.TimerFired, to=(Node.SWEEPING,))
def slow_retry(state: State, _fact: facts.TimerFired, _moment: Moment, _policy: Policy) -> Step:
    """`restart.slow_retry` has passed: one try, from a clean proof."""
    state = replace(state, node=Node.SWEEPING, ending=None)
    return state, [orders.Record("slow_retry", "trying once more after restart.slow_retry"), orders.Sweep()]


@on(Node.SWEEPING, fact=facts.SweepFailed, to=(Node.UNKILLABLE, Node.GONE))
def sweep_failed(state: State, fact: facts.SweepFailed, moment: Moment, policy: Policy) -> Step:
    """Something is left: never a second engine beside it."""
    said = orders.Record("unkillable", fact.sentence, level="error")
    if fact.refused:
        state, more = gone(replace(state, problem=fact.sentence, give_up_status=78))
        return state, [said, *more]
    if state.stops:
        state, more = gone(replace(state, unkillable=True, problem=fact.sentence))
        return state, [said, *more]
    return replace(state, node=Node.UNKILLABLE, problem=fact.sentence), [
        orders.CloseGate(ClosedReason.UNKILLABLE, fact.sentence),
        said,
        orders.SetTimer(Timer.BACKOFF, moment.now + policy.look_again),
    ]


@on(Node.UNKILLABLE, fact=facts.TimerFired, to=(Node.SWEEPING,))
def look_again(state: State, _fact: facts.TimerFired, _moment: Moment, _policy: Policy) -> Step:
    """A process in the kernel's hands may go after all."""
    return replace(state, node=Node.SWEEPING), [orders.Sweep()]


def gone(state: State) -> Step:
    """No engine any more: write down how everything ended."""
    return replace(state, node=Node.GONE, phase=Phase.DOCUMENTING), [
        orders.CloseGate(ClosedReason.STOPPING),
        orders.ClearTimer(Timer.BACKOFF),
        orders.Document(),
    ]


@on(Node.GONE, fact=facts.Documented)
def documented(state: State, _fact: facts.Documented, _moment: Moment, _policy: Policy) -> Step:
    """The end."""
    return replace(state, phase=Phase.ENDED), [orders.End()]


# -- harmless pairs ----------------------------------------------------------------------------------------------

for _nodes, _fact in (
    # A watcher may be late: what it saw has been dealt with since.
    (BEYOND, facts.MemberDied),
    (BEYOND, facts.ReportedDead),
    (tuple(node for node in Node if node is not Node.READY), facts.Condemned),
    (tuple(node for node in Node if node is not Node.EXAMINING), facts.EvidenceSaved),
    (tuple(node for node in Node if node is not Node.STARTING), facts.LoadProgressed),
    (tuple(node for node in Node if node is not Node.STARTING), facts.BecameReady),
    (tuple(node for node in Node if node not in (Node.EMPTYING, Node.CUTTING)), facts.Drained),
    # After "it cannot be killed" it may still end.
    ((Node.SWEEPING, Node.WAITING, Node.PARKED, Node.UNKILLABLE, Node.GONE), facts.Exited),
):
    for _node in _nodes:
        on(_node, fact=_fact)(stay)
