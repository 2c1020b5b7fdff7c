"""The life of the engine, told as facts on a virtual clock."""

from dataclasses import replace

import pytest

from fakes.engine_life import POLICY, Life, kinds
from vllm_supervisor.core import facts, orders
from vllm_supervisor.core.cells import LEADS_TO, TABLE
from vllm_supervisor.core.cells_between import WAY_OUT
from vllm_supervisor.core.exit_status import ExitEvidence
from vllm_supervisor.core.facts import Timer
from vllm_supervisor.core.lifecycle import ImpossibleFact, Moment, Node, State, Why, engine_state, step
from vllm_supervisor.core.restart import RestartPolicy
from vllm_supervisor.core.words import ClosedReason, Cut, EngineState, Phase

# Pairs that cannot happen; every other pair has a cell.
IMPOSSIBLE: dict[type, set[Node]] = {
    facts.Began: set(Node) - {Node.BOOTING, Node.GONE},
    facts.SweepDone: set(Node) - {Node.SWEEPING},
    facts.SweepFailed: set(Node) - {Node.SWEEPING},
    facts.Spawned: set(Node) - {Node.STARTING, Node.TERMINATING, Node.KILLING},
    facts.SpawnFailed: set(Node) - {Node.STARTING, Node.LOSING, Node.TERMINATING, Node.KILLING},
    facts.Exited: {Node.BOOTING},
    facts.MemberDied: {Node.BOOTING},
    facts.ReportedDead: {Node.BOOTING},
    facts.MemoryBack: set(Node) - {Node.GATING, Node.GONE},
    facts.MemoryShort: set(Node) - {Node.GATING, Node.GONE},
    facts.MemoryFloor: {Node.BOOTING},
    facts.TimerFired: {Node.BOOTING, Node.SWEEPING, Node.GATING, Node.READY, Node.GONE},
}

FACTS = {
    facts.Began: facts.Began(),
    facts.SweepDone: facts.SweepDone(),
    facts.SweepFailed: facts.SweepFailed("pid 7 stays"),
    facts.Spawned: facts.Spawned(100),
    facts.SpawnFailed: facts.SpawnFailed("no such file"),
    facts.LoadProgressed: facts.LoadProgressed(),
    facts.StaysUnready: facts.StaysUnready("its /health gave status 500"),
    facts.BecameReady: facts.BecameReady(),
    facts.MemberDied: facts.MemberDied(101, "VLLM::EngineCore"),
    facts.ReportedDead: facts.ReportedDead("it says it is dead"),
    facts.Condemned: facts.Condemned("nothing moved for 300 s"),
    facts.EvidenceSaved: facts.EvidenceSaved(),
    facts.MemoryBack: facts.MemoryBack(),
    facts.MemoryShort: facts.MemoryShort("30 GiB available, 100 GiB wanted", lost=True),
    facts.MemoryFloor: facts.MemoryFloor(1, "memory reached the floor"),
    facts.Exited: facts.Exited(0),
    facts.StopRequested: facts.StopRequested("pid 1"),
    facts.RestartRequested: facts.RestartRequested("pid 1", "a new model"),
    facts.EngineStopOrdered: facts.EngineStopOrdered(1030.0),
    facts.EngineKillOrdered: facts.EngineKillOrdered(),
    facts.Drained: facts.Drained(),
    facts.CutSettled: facts.CutSettled(),
    facts.TimerFired: facts.TimerFired(Timer.GRACE),
}


@pytest.mark.parametrize("node", Node)
@pytest.mark.parametrize("fact", FACTS)
def test_every_pair_is_decided(node: Node, fact: type) -> None:
    """Each pair of node and fact of the engine's life has a cell, unless it is listed as impossible."""
    assert ((node, fact) in TABLE) != (node in IMPOSSIBLE.get(fact, set()))


@pytest.mark.parametrize(("node", "fact"), TABLE)
def test_cells_lead_where_they_say(node: Node, fact: type) -> None:
    """A cell leads only to the nodes it declares, from which the diagram is drawn."""
    state = State(node=node, incarnation=1, pid=100, spawned_at=900.0, ready_at=950.0)
    after, _ = TABLE[node, fact](state, FACTS[fact], Moment(1000.0), POLICY)
    assert after.node in LEADS_TO[node, fact]


def test_an_impossible_fact_raises_and_changes_nothing() -> None:
    """A fact that cannot happen raises and leaves the state as it was."""
    state = State()
    with pytest.raises(ImpossibleFact, match="SweepDone cannot happen while booting"):
        step(state, facts.SweepDone(), Moment(0.0), POLICY, TABLE)
    assert state == State()


def test_first_start_sweeps_before_it_spawns() -> None:
    """The first engine starts only after nothing of an earlier run is left."""
    life = Life()
    assert kinds(life.tell(facts.Began())) == [orders.Sweep]
    assert engine_state(life.state) is EngineState.STARTING
    assert kinds(life.tell(facts.SweepDone()))[-1] is orders.Spawn
    opened = life.tell(facts.Spawned(100), facts.BecameReady())
    assert orders.OpenGate(ClosedReason.STARTING) in opened


def test_an_exit_nobody_asked_for_cuts_sweeps_and_restarts() -> None:
    """Exit 0 of an engine nobody stopped is a crash: clients are told at once, the next starts after the backoff."""
    life = Life().ready()
    given = life.tell(facts.Exited(0))
    assert kinds(given) == [orders.CloseGate, orders.CutInFlight, orders.Sweep]
    assert orders.CutInFlight(Cut.ENGINE_FAILED) in given
    life.tell(facts.SweepDone())
    assert life.state.node is Node.WAITING
    assert life.state.restarts == {"exited": 1}
    assert life.state.last_restart is not None
    life.fire()
    assert life.now == 1000.5  # the drawn half of the first backoff
    assert (life.state.node, life.state.incarnation) == (Node.STARTING, 2)


def test_a_died_core_is_killed_at_once_and_named() -> None:
    """The engine is not left to notice that its core is gone; the cause says which part died first."""
    life = Life().ready()
    given = life.tell(facts.MemberDied(101, "VLLM::EngineCore"))
    assert kinds(given) == [orders.CloseGate, orders.CutInFlight, orders.KillTree]
    life.crash(-9)
    assert life.state.restarts == {"part_died": 1}
    assert life.state.last_restart is not None
    assert "VLLM::EngineCore (pid 101) died" in life.state.last_restart.sentence


def test_stop_drains_then_terminates_once() -> None:
    """A stop refuses new work, lets accepted work finish, sends TERM once, and counts as clean whatever the status."""
    life = Life().ready()
    given = life.tell(facts.StopRequested("pid 1"))
    assert orders.CloseGate(ClosedReason.STOPPING) in given
    assert kinds(given)[-1] is orders.WatchDrain
    assert life.state.phase is Phase.DRAINING
    assert kinds(life.tell(facts.Drained())) == [orders.CutInFlight, orders.WatchCut]
    assert kinds(life.tell(facts.Drained())) == []  # told before the cut, and late: nothing has been confirmed
    assert kinds(life.tell(facts.CutSettled())) == [orders.Terminate]
    assert orders.Document in kinds(life.tell(facts.Exited(-15), facts.SweepDone()))
    assert (life.state.node, life.state.phase) == (Node.GONE, Phase.DOCUMENTING)
    assert life.state.reading is not None
    assert life.state.reading.clean
    assert kinds(life.tell(facts.Documented())) == [orders.EnterPhase, orders.End]
    assert life.state.phase is Phase.ENDED
    assert sum(isinstance(o, orders.Terminate) for o in life.given) == 1


def test_minus_fifteen_without_our_term_is_a_failure() -> None:
    """The same number that is clean after our TERM is a crash without it."""
    life = Life().ready()
    life.crash(-15)
    assert life.state.reading is not None
    assert not life.state.reading.clean
    assert life.state.restarts == {"killed": 1}


def test_the_budget_ends_a_drain_with_a_cut_before_term() -> None:
    """What did not finish in the budget is cut first, because an engine with an open connection may never exit."""
    life = Life().ready()
    life.tell(facts.StopRequested("pid 1"))
    given = life.fire()
    assert life.now == 1060.0
    assert orders.CutInFlight(Cut.DRAIN_DEADLINE) in given
    assert orders.Terminate not in kinds(given)
    assert kinds(life.tell(facts.CutSettled())) == [orders.Terminate]


def test_each_further_stop_goes_one_rung_down() -> None:
    """The second request ends the drain and shortens the grace, the third kills."""
    life = Life().ready()
    life.tell(facts.StopRequested("pid 1"))
    life.now += 1.0
    assert orders.CutInFlight(Cut.DRAIN_DEADLINE) in life.tell(facts.StopRequested("pid 1"))
    life.tell(facts.CutSettled())
    assert life.timers[Timer.GRACE] == life.now + 5.0
    life.now += 1.0
    assert kinds(life.tell(facts.StopRequested("pid 1"))) == [orders.KillTree]


def test_stop_during_the_load_is_short() -> None:
    """VLLM ignores TERM while it loads and nothing was accepted: KILL follows after 5 s."""
    life = Life()
    life.tell(facts.Began(), facts.SweepDone(), facts.Spawned(100))
    life.tell(facts.StopRequested("pid 1"))
    assert kinds(life.tell(facts.Drained()))[-1] is orders.Terminate
    assert kinds(life.fire()) == [orders.KillTree]
    assert life.now == 1005.0


def test_a_load_without_progress_ends() -> None:
    """The start deadline moves with each sign of progress, and ends the load when there is none."""
    life = Life()
    life.tell(facts.Began(), facts.SweepDone(), facts.Spawned(100))
    life.now = 2000.0
    life.tell(facts.LoadProgressed())
    life.fire()
    assert life.now == 3800.0
    assert life.state.why is Why.START_TIMEOUT
    life.tell(facts.Exited(0), facts.SweepDone())
    assert life.state.last_restart is not None
    assert "no progress for 1800 s (engine.start_timeout)" in life.state.last_restart.sentence
    assert life.state.reading is not None
    assert "engine.start_timeout" in life.state.reading.mend


def test_cpu_time_alone_doubles_the_wait_of_a_load() -> None:
    """A load that only computes gets twice the start deadline, however long it goes on; any other sign begins anew."""
    life = Life()
    life.tell(facts.Began(), facts.SweepDone(), facts.Spawned(100))
    for second in range(0, 1800, 60):
        life.now = 1000.0 + second
        life.tell(facts.LoadProgressed(cpu_only=True))
        assert life.timers[Timer.START] == life.now + 1800.0
    life.now = 2000.0
    life.tell(facts.LoadProgressed())
    for second in range(0, 3600, 60):
        life.now = 2000.0 + second
        life.tell(facts.LoadProgressed(cpu_only=True))
        assert life.timers[Timer.START] == min(life.now, 2000.0 + 1800.0) + 1800.0
    life.fire()
    assert (life.now, life.state.why) == (2000.0 + 3600.0, Why.START_TIMEOUT)
    assert "3600 s (twice engine.start_timeout)" in life.state.why_sentence
    assert "only CPU time" in life.state.why_sentence


def test_what_keeps_a_start_from_being_ready_is_told() -> None:
    """The reason is shown and logged while the start goes on, and gone once the engine is ready."""
    life = Life()
    life.tell(facts.Began(), facts.SweepDone(), facts.Spawned(100))
    (said,) = life.tell(facts.StaysUnready("its /health gave status 500"))
    assert isinstance(said, orders.Record)
    assert (said.event, said.level) == ("not_ready", "warning")
    assert life.state.problem == "its /health gave status 500"
    assert life.state.node is Node.STARTING
    life.tell(facts.BecameReady())
    assert life.state.problem == ""


def test_a_deterministic_failure_is_tried_once_and_parks() -> None:
    """A usage error is not tried twice; away from a terminal the supervisor parks with the reason."""
    life = Life()
    life.tell(facts.Began(), facts.SweepDone(), facts.Spawned(100), facts.Exited(2))
    block = "vllm: error: unrecognized arguments: --nonsense"
    given = life.tell(facts.SweepDone(ExitEvidence(first_error=block)))
    assert life.state.node is Node.PARKED
    assert "--nonsense" in life.state.problem
    assert any(isinstance(o, orders.CloseGate) and o.reason is ClosedReason.PARKED for o in given)
    assert sum(isinstance(o, orders.Spawn) for o in life.given) == 1


def test_parked_names_the_way_out_wherever_it_is_shown() -> None:
    """Event and status say the cause and what to do next, on one line; the end of a command only the cause."""
    life = Life()
    given = life.tell(facts.Began(), facts.SweepDone(), facts.Spawned(100), facts.Exited(2), facts.SweepDone())
    (said,) = [order.sentence for order in given if isinstance(order, orders.Record) and order.event == "parked"]
    problem = life.state.problem
    assert said == f"parked: {problem}"
    assert problem.count("it refused its command line") == 1
    assert problem.endswith(f"; {WAY_OUT}")
    assert "\n" not in problem
    ends = Life(policy=replace(POLICY, on_terminal=True))
    ends.tell(facts.Began(), facts.SweepDone(), facts.Spawned(100), facts.Exited(2), facts.SweepDone())
    assert WAY_OUT not in ends.state.problem


@pytest.mark.parametrize(
    ("printed", "read"),
    [
        (
            "vllm: error: unrecognized arguments: --topsecret topsecret",
            (
                "the engine failed to start: unknown option; correct the command line; `vllm serve --help=all` lists what"
                " this version knows; see `vllm-supervisor status`"
            ),
        ),
        (
            "ValueError: topsecret",
            (
                "the engine failed to start: it refused its command line; correct the command line; the engine's lines say"
                " where; see `vllm-supervisor status`"
            ),
        ),
        (
            "OSError: topsecret is not a local folder and is not a valid model identifier",
            (
                "the engine failed to start: model not found; check the model's name and revision, and HF_TOKEN if it is"
                " private; see `vllm-supervisor status`"
            ),
        ),
    ],
)
def test_clients_read_the_class_of_a_failure_and_never_the_engines_words(printed: str, read: str) -> None:
    """The refusal is made of fixed words; what the engine printed is in `problem`, for operators."""
    life = Life()
    life.tell(facts.Began(), facts.SweepDone(), facts.Spawned(100), facts.Exited(2))
    given = life.tell(facts.SweepDone(ExitEvidence(first_error=printed)))
    (closed,) = [order.sentence for order in given if isinstance(order, orders.CloseGate)]
    assert closed == life.state.public_problem == read
    life.tell(facts.RestartRequested("pid 1", "mended"), facts.SweepDone(), facts.Spawned(101))
    assert life.state.public_problem == ""


def test_clients_read_nothing_of_processes_that_cannot_be_removed() -> None:
    """Pids and names of processes are for operators."""
    life = Life()
    given = life.tell(facts.Began(), facts.SweepFailed("python (pid 7) is left"))
    assert [order.sentence for order in given if isinstance(order, orders.CloseGate)] == [""]
    assert life.state.problem == "python (pid 7) is left"


def test_a_deterministic_failure_on_a_terminal_ends_with_78() -> None:
    """A typo ends the command."""
    life = Life(policy=replace(POLICY, on_terminal=True))
    life.tell(facts.Began(), facts.SweepDone(), facts.Spawned(100), facts.Exited(2), facts.SweepDone())
    assert (life.state.node, life.state.give_up_status) == (Node.GONE, 78)


def test_ten_crashes_in_a_row_end_after_the_budget() -> None:
    """Three restarts, then parked: a crash loop ends."""
    life = Life().ready()
    for _ in range(10):
        life.crash()
        if life.state.node is Node.PARKED:
            break
        life.fire()
        life.ready()
    assert life.state.incarnation == 4
    assert life.state.node is Node.PARKED
    assert "crash 4" in life.state.problem


def test_long_load_and_short_life_end_too() -> None:
    """Six minutes of load and one minute of life is a loop, although crashes are far apart."""
    life = Life().ready()
    while life.state.node is not Node.PARKED:
        life.now += 60.0
        life.crash()
        if life.state.node is Node.WAITING:
            life.fire()
            life.now += 360.0
            life.ready()
    assert life.state.incarnation == 4
    assert 1000.0 + 3 * 420.0 < life.now < 1000.0 + 4 * 420.0


def test_a_person_leaves_parked_with_fresh_budgets() -> None:
    """`restart` from parked sweeps again and starts with a clean tally."""
    life = Life()
    life.tell(facts.Began(), facts.SweepDone(), facts.Spawned(100), facts.Exited(2), facts.SweepDone())
    assert life.state.node is Node.PARKED
    assert kinds(life.tell(facts.RestartRequested("pid 9", "mended")))[-1] is orders.Sweep
    life.tell(facts.SweepDone())
    assert life.state.node is Node.STARTING
    assert life.state.tally.failed_starts == 0


def test_a_commanded_restart_drains_first_and_is_not_counted() -> None:
    """A person's restart waits for what is in flight and burdens no budget."""
    life = Life().ready()
    assert kinds(life.tell(facts.RestartRequested("pid 9", "new weights"))) == [orders.CloseGate, orders.WatchDrain]
    life.tell(facts.Drained(), facts.Exited(0), facts.SweepDone())
    assert life.state.node is Node.STARTING
    assert life.state.tally.crashes == ()
    assert life.state.restarts == {"commanded": 1}


@pytest.mark.parametrize(("on_terminal", "signum", "told"), [(True, 2, True), (True, 15, False), (False, 2, False)])
def test_who_presses_ctrl_c_is_told_what_a_second_one_does(on_terminal: bool, signum: int, told: bool) -> None:
    """On a terminal the first line says it; each further stop says what it does, and one within a second that it counts once."""
    once = "stop requested again by them: stopping already: asked again within a second, it counts once"
    life = Life(policy=replace(POLICY, on_terminal=on_terminal)).ready()
    said = []
    for _ in range(3):
        given = [*life.tell(facts.StopRequested("them", signum)), *life.tell(facts.StopRequested("them", signum))]
        life.now += 1.0
        said += [order.sentence for order in given if isinstance(order, orders.Record)]
    assert said == [
        f"stop requested by them{'; again: cut what is open' if told else ''}",
        once,
        "stop requested again by them: hurrying: what is still open is cut now",
        once,
        "stop requested again by them: killing: the engine's processes are killed now",
        once,
    ]


def test_an_expected_end_names_its_engine_in_one_breath() -> None:
    """The event of an end we ordered reads as one sentence; one that nobody ordered stands apart from the number."""
    life = Life().ready()
    life.now += 5.0
    life.tell(facts.RestartRequested("pid 9", "new weights"), facts.Drained(), facts.Exited(0), facts.SweepDone())
    life.ready()
    life.crash()
    said = [order.sentence for order in life.given if isinstance(order, orders.Record) and order.event == "exited"]
    assert said[0] == "engine 1 stopped as told: status 0 after 5 s"
    assert said[1].startswith("engine 2: the engine ended with status 1 while it served")


def test_what_kill_does_not_remove_blocks_the_next_engine() -> None:
    """While a process survives KILL no second engine starts; when it goes after all, life goes on."""
    life = Life().ready()
    life.tell(facts.MemberDied(101, "VLLM::EngineCore"))
    life.fire()
    life.tell(facts.SweepFailed("VLLM::EngineCore (pid 101) stays"))
    assert life.state.node is Node.UNKILLABLE
    assert engine_state(life.state) is EngineState.UNKILLABLE
    life.tell(facts.Exited(-9))
    life.fire()
    life.tell(facts.SweepDone())
    assert life.state.node is Node.WAITING


def test_what_goes_after_all_and_is_not_started_again_is_parked_and_no_longer_unkillable() -> None:
    """Admission names the reason of the moment: once nothing is left it is not closed for what was left."""
    life = Life(policy=replace(POLICY, restart=RestartPolicy(max=0))).ready()
    life.tell(facts.Exited(1), facts.SweepFailed("pid 102 stays"))
    life.fire()
    life.tell(facts.SweepDone())
    assert life.state.node is Node.PARKED
    reasons = set()
    for order in life.given:
        if isinstance(order, orders.CloseGate):
            reasons.add(order.reason)
        elif isinstance(order, orders.OpenGate):
            reasons.discard(order.reason)
    assert reasons == {ClosedReason.RESTARTING, ClosedReason.PARKED}


def test_a_person_s_restart_of_what_cannot_be_killed_forgets_nothing() -> None:
    """`restart` looks again at once; when the old engine goes at last, its end is still told, and then the next starts."""
    life = Life().ready()
    life.tell(facts.MemberDied(101, "VLLM::EngineCore"), facts.Exited(-9), facts.SweepFailed("pid 102 stays"))
    assert kinds(life.tell(facts.RestartRequested("pid 9", "rebooted the disk")))[-1] is orders.Sweep
    given = life.tell(facts.SweepDone())
    assert [o.event for o in given if isinstance(o, orders.Record)] == ["exited", "backing_off"]
    assert life.state.restarts == {"part_died": 1}


@pytest.mark.parametrize("end", [facts.Exited(1), facts.MemberDied(101, "VLLM::EngineCore")])
def test_a_restart_ordered_while_an_engine_goes_gives_fresh_budgets(end: facts.Fact) -> None:
    """A person who orders a restart in the moment of the last crash gets an engine, not a parked one."""
    life = Life().ready()
    for _ in range(3):
        life.crash()
        life.fire()
        life.ready()
    life.tell(end, facts.RestartRequested("pid 9", "new weights"))
    if life.state.node is Node.KILLING:
        life.tell(facts.Exited(-9))
    life.tell(facts.SweepDone())
    assert life.state.node is Node.WAITING


def test_a_restart_ordered_in_the_backoff_starts_now_with_fresh_budgets() -> None:
    """After the last crash the budget allows, a person's order makes room for as many again."""
    life = Life().ready()
    for _ in range(3):
        life.crash()
        life.fire()
        life.ready()
    life.crash()
    assert life.state.node is Node.PARKED
    life = Life().ready()
    for _ in range(3):
        life.crash()
        assert orders.Spawn in kinds(life.tell(facts.RestartRequested("pid 9", "new weights")))
        life.ready()
    life.crash()
    assert life.state.node is Node.WAITING


def test_a_restart_ordered_during_a_load_is_no_failed_start() -> None:
    """TERM goes out, KILL after 5 s since a load ignores it, and no budget is burdened."""
    life = Life()
    life.tell(facts.Began(), facts.SweepDone(), facts.Spawned(100))
    assert kinds(life.tell(facts.RestartRequested("pid 9", "new weights"))) == [orders.Terminate]
    assert kinds(life.fire()) == [orders.KillTree]
    assert life.now == 1005.0
    life.tell(facts.Exited(-9), facts.SweepDone())
    assert (life.state.node, life.state.incarnation) == (Node.STARTING, 2)
    assert life.state.restarts == {"commanded": 1}
    assert life.state.tally.failed_starts == 0


def test_a_spawn_that_fails_for_want_of_memory_is_tried_again() -> None:
    """What may be there in a moment says nothing against the command; a missing program does, and is not tried twice."""
    for may_pass, node in ((True, Node.WAITING), (False, Node.PARKED)):
        life = Life()
        life.tell(facts.Began(), facts.SweepDone(), facts.SpawnFailed("cannot start it", may_pass=may_pass))
        life.tell(facts.SweepDone())
        assert life.state.node is node


def test_a_forced_end_is_told_with_the_engine_s_own_reason() -> None:
    """What the core had printed stands behind our words; the cause is what ended it, never our own KILL."""
    life = Life().ready()
    life.tell(facts.MemberDied(101, "VLLM::EngineCore"), facts.Exited(-9))
    block = "RuntimeError: CUDA error: an illegal memory access was encountered"
    life.tell(facts.SweepDone(ExitEvidence(first_error=block)))
    assert life.state.last_restart is not None
    assert life.state.last_restart.sentence == (
        "VLLM::EngineCore (pid 101) died under the running engine: a GPU kernel accessed memory it must not"
    )
    life.fire()
    life.ready().tell(facts.ReportedDead("it says it is dead"), facts.Exited(-9))
    said = next(o for o in life.tell(facts.SweepDone()) if isinstance(o, orders.Record))
    assert dict(said.fields)["cause"] == "part_died"


def test_the_cause_of_a_hang_is_the_hang() -> None:
    """However the process then ended, the event names what we saw."""
    life = Life().ready()
    life.tell(facts.Condemned("nothing moved for 300 s"), facts.EvidenceSaved(), facts.Exited(-9))
    said = next(o for o in life.tell(facts.SweepDone()) if isinstance(o, orders.Record))
    assert (said.sentence, dict(said.fields)["cause"]) == ("engine 1: nothing moved for 300 s", "hang")


def test_ready_again_counts_from_the_death() -> None:
    """The newest restart tells how long there was no engine: from its end to the next one's readiness."""
    life = Life().ready()
    life.tell(facts.Exited(0))
    life.now += 0.4
    life.tell(facts.SweepDone(requests_lost=3))
    life.fire()
    life.now += 20.0
    life.ready()
    assert life.state.last_restart is not None
    assert life.state.last_restart.requests_lost == 3
    assert life.state.last_restart.ready_after_s == pytest.approx(20.9)


def test_a_restart_that_was_given_up_is_not_ready_later() -> None:
    """Parked, the newest restart has no ready engine any more, and what a person starts hours later is no part of it."""
    life = Life().ready()
    while life.state.node is not Node.PARKED:
        life.crash()
        if life.state.node is Node.WAITING:
            life.fire()
            life.ready()
    assert life.state.last_restart is not None
    assert life.state.last_restart.ready_after_s is None
    life.now += 7200.0
    life.tell(facts.RestartRequested("pid 9", "mended"), facts.SweepDone())
    life.ready()
    assert life.state.last_restart.ready_after_s is None
    life.crash()
    life.fire()
    life.ready()
    assert life.state.last_restart.ready_after_s is not None


def test_two_stops_before_the_door_is_open_end_it() -> None:
    """Both signals may be there before anything has begun; what then begins is harmless."""
    life = Life()
    life.tell(facts.StopRequested("pid 1"))
    life.now += 1.0
    life.tell(facts.StopRequested("pid 1"))
    assert life.state.node is Node.GONE
    assert life.tell(facts.Began()) == []


def test_stop_while_unkillable_leaves_and_says_so() -> None:
    """The run ends although a process is left, and remembers it for the exit status."""
    life = Life().ready()
    life.tell(facts.MemberDied(101, "VLLM::EngineCore"), facts.Exited(-9), facts.SweepFailed("pid 101 stays"))
    life.tell(facts.StopRequested("pid 1"), facts.Drained())
    assert life.state.node is Node.GONE
    assert life.state.unkillable


def test_a_refused_sweep_ends_with_78() -> None:
    """With the sweep configured off a leftover is named and nothing is started."""
    life = Life()
    life.tell(facts.Began(), facts.SweepFailed("an earlier run left VLLM::EngineCore (pid 7)", refused=True))
    assert (life.state.node, life.state.give_up_status) == (Node.GONE, 78)
    assert not any(isinstance(o, orders.Spawn) for o in life.given)


def test_a_core_that_dies_while_loading_gets_a_farewell() -> None:
    """The main process has its time to print why; an engine that waits for ever is killed."""
    life = Life()
    life.tell(facts.Began(), facts.SweepDone(), facts.Spawned(100), facts.MemberDied(101, "VLLM::EngineCore"))
    assert life.state.node is Node.LOSING
    assert kinds(life.fire()) == [orders.KillTree]


def test_stops_only_shorten_the_farewell() -> None:
    """However often a stop is asked for, an engine that lost its core never gets more time than it had."""
    life = Life()
    life.tell(facts.Began(), facts.SweepDone(), facts.Spawned(100), facts.MemberDied(101, "VLLM::EngineCore"))
    begun = life.now
    life.now += 9.0
    for _ in range(2):
        given = life.tell(facts.EngineStopOrdered(life.now + 60.0))
        assert given == [orders.SetTimer(Timer.FAREWELL, begun + 10.0)]
        life.now += 0.5


def test_an_engine_refused_after_it_lost_its_core_is_removed() -> None:
    """The two may come in either order; the end is the same sweep."""
    life = Life()
    life.tell(facts.Began(), facts.SweepDone(), facts.Spawned(100), facts.MemberDied(101, "VLLM::Worker"))
    assert orders.Sweep in kinds(life.tell(facts.SpawnFailed("the engine reports no steps")))
    assert life.state.node is Node.SWEEPING


def test_drain_and_resume_touch_admission_alone() -> None:
    """`drain` closes and `resume` opens; engine and phase stay."""
    life = Life().ready()
    assert kinds(life.tell(facts.DrainRequested("pid 9"))) == [orders.CloseGate]
    assert kinds(life.tell(facts.ResumeRequested("pid 9"))) == [orders.OpenGate]
    assert (life.state.node, life.state.phase) == (Node.READY, Phase.RUNNING)


def test_a_condemned_engine_is_examined_before_it_is_touched() -> None:
    """Evidence first, then clients are told and TERM goes out; the hang has a budget of its own."""
    life = Life().ready()
    assert kinds(life.tell(facts.Condemned("nothing moved for 300 s"))) == [orders.SaveEvidence]
    given = life.tell(facts.EvidenceSaved())
    assert kinds(given) == [orders.CloseGate, orders.CutInFlight, orders.Terminate]
    assert kinds(life.fire()) == [orders.KillTree]
    assert life.now == 1005.0
    life.tell(facts.Exited(-9), facts.SweepDone())
    assert life.state.restarts == {"hang": 1}
    assert (life.state.tally.crashes, len(life.state.tally.hangs)) == ((), 1)


def test_a_hurried_stop_does_not_wait_for_evidence() -> None:
    """A stop leaves the bundle its time; the second one ends the condemned engine at once, within the short budget."""
    life = Life().ready()
    life.tell(facts.Condemned("nothing moved for 300 s"), facts.StopRequested("pid 1"))
    assert life.timers[Timer.EVIDENCE] == 1015.0
    life.now = 1002.0
    life.tell(facts.StopRequested("pid 1"))
    assert kinds(life.fire())[-1] is orders.Terminate
    assert life.now == 1002.0
    assert life.timers[Timer.GRACE] == 1007.0


def test_evidence_that_takes_too_long_does_not_hold_the_restart() -> None:
    """A bundle that cannot be written in time is given up, not waited for."""
    life = Life().ready()
    life.tell(facts.Condemned("it answers nothing but errors", failing=True))
    assert kinds(life.fire())[-1] is orders.Terminate
    assert life.now == 1015.0
    life.tell(facts.Exited(0), facts.SweepDone())
    assert life.state.restarts == {"failing": 1}


def test_propagation_refuses_but_does_not_stop_yet() -> None:
    """While routes update, new work is refused and work in flight goes on; the same budget holds all of it."""
    life = Life(policy=replace(POLICY, limits=replace(POLICY.limits, propagation=10.0))).ready()
    assert orders.EnterPhase(Phase.ADMISSION_STOP) in life.tell(facts.StopRequested("pid 1"))
    assert kinds(life.tell(facts.Drained())) == []
    assert orders.EnterPhase(Phase.DRAINING) in life.fire()
    assert life.now == 1010.0
    assert orders.CutInFlight in kinds(life.tell(facts.Drained()))


def test_a_stop_takes_over_from_an_ordered_restart() -> None:
    """A stop that comes while a restart drains has its own whole budget, and nothing starts afterwards."""
    life = Life().ready()
    life.tell(facts.RestartRequested("pid 9", "new weights"))
    life.now += 50.0
    life.tell(facts.StopRequested("pid 1"))
    assert life.timers == {Timer.DRAIN: 1110.0}
    life.tell(facts.Drained(), facts.CutSettled(), facts.Exited(0), facts.SweepDone())
    assert life.state.node is Node.GONE


def test_nothing_starts_once_we_are_leaving() -> None:
    """A backoff that ends during a stop starts no engine."""
    life = Life(policy=replace(POLICY, limits=replace(POLICY.limits, propagation=10.0))).ready()
    life.crash()
    life.tell(facts.StopRequested("pid 1"))
    life.fire()
    assert life.state.node is Node.WAITING
    assert sum(isinstance(o, orders.Spawn) for o in life.given) == 1


def test_an_engine_that_dies_in_the_drain_ends_it() -> None:
    """What is in flight is told at once, nothing restarts, and the stop goes on to its documents."""
    life = Life().ready()
    life.tell(facts.StopRequested("pid 1"))
    assert orders.CutInFlight(Cut.ENGINE_FAILED) in life.tell(facts.MemberDied(101, "VLLM::EngineCore"))
    assert orders.Document in kinds(life.tell(facts.Exited(-9), facts.SweepDone()))
    assert life.state.phase is Phase.DOCUMENTING
