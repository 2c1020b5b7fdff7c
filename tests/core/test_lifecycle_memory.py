"""The life of the engine where it shares the machine's memory: the launch gate, and the end at the floor."""

from dataclasses import replace

import pytest

from fakes.engine_life import POLICY, Life, kinds
from vllm_supervisor.core import facts, orders
from vllm_supervisor.core.facts import Timer
from vllm_supervisor.core.lifecycle import Node, Why, engine_state
from vllm_supervisor.core.words import ClosedReason, Cut, EngineState, Phase

GATED = replace(POLICY, memory_gate=True, gate_timeout=300.0)


def loaded() -> Life:
    """Bring an engine to its load on a guarded machine."""
    life = Life(policy=GATED)
    life.tell(facts.Began(), facts.SweepDone(), facts.MemoryBack(), facts.Spawned(101))
    return life


def served() -> Life:
    """Bring an engine up on a guarded machine."""
    life = loaded()
    life.tell(facts.BecameReady())
    return life


def test_every_start_passes_the_gate() -> None:
    """First start, restart after a crash: the engine is spawned only when memory is there, with a bounded wait."""
    life = Life(policy=GATED)
    assert life.tell(facts.Began(), facts.SweepDone())[-1] == orders.AwaitMemory(1300.0)
    assert engine_state(life.state) is EngineState.STARTING
    assert kinds(life.tell(facts.MemoryBack()))[-1] is orders.Spawn
    life.tell(facts.Spawned(101), facts.BecameReady())
    life.crash()
    assert orders.AwaitMemory(life.now + 0.5 + 300.0) in life.fire()
    assert (life.state.node, life.state.incarnation) == (Node.GATING, 1)
    assert engine_state(life.state) is EngineState.DOWN
    assert kinds(life.tell(facts.MemoryBack()))[-1] is orders.Spawn
    assert life.state.incarnation == 2


def test_a_person_skips_the_backoff_and_not_the_gate() -> None:
    """An ordered restart while backing off goes to the gate at once."""
    life = served()
    life.crash()
    life.tell(facts.RestartRequested("pid 1", "now"))
    assert life.state.node is Node.GATING
    life.tell(facts.RestartRequested("pid 1", "now, please"))
    assert life.state.node is Node.GATING


def test_a_persons_restart_measures_by_the_level_of_now() -> None:
    """While it waits at the gate, and when it is parked; the engine that comes of it is judged like any other."""
    life = served()
    life.crash()
    life.fire()
    assert (life.state.node, life.state.measure_now) == (Node.GATING, False)
    life.tell(facts.RestartRequested("pid 1", "beside the other"))
    assert life.state.measure_now
    life.tell(facts.MemoryBack())
    assert (life.state.node, life.state.measure_now) == (Node.STARTING, False)
    life = Life(policy=GATED)
    life.tell(facts.Began(), facts.SweepDone(), facts.MemoryShort("short", lost=True))
    life.tell(facts.RestartRequested("pid 1", "beside the other"), facts.SweepDone())
    assert (life.state.node, life.state.measure_now) == (Node.GATING, True)


def test_a_restart_of_a_serving_engine_waits_for_the_level_of_before() -> None:
    """Its memory is on its way back: what is there at that moment is no measure."""
    life = served()
    life.tell(facts.RestartRequested("pid 1", "now"))
    assert not life.state.measure_now


@pytest.mark.parametrize(("lost", "status"), [(True, 75), (False, 78)])
def test_memory_that_does_not_come_back_parks_with_the_numbers(lost: bool, status: int) -> None:
    """The gate's words are the problem that is shown; ended instead of parked, the status tells a reboot from a mend."""
    life = Life(policy=GATED)
    life.tell(facts.Began(), facts.SweepDone(), facts.MemoryShort("30.0 GiB available, 100.0 GiB wanted", lost))
    assert life.state.node is Node.PARKED
    assert "30.0 GiB available" in life.state.problem
    life.tell(facts.RestartRequested("pid 1", "mended"), facts.SweepDone())
    assert life.state.node is Node.GATING  # a person's order passes the gate as well
    ends = Life(policy=replace(GATED, on_terminal=True))
    ends.tell(facts.Began(), facts.SweepDone(), facts.MemoryShort("too little", lost))
    assert ends.state.give_up_status == status


def test_a_stop_at_the_gate_ends_at_once() -> None:
    """There is no engine to wait for, and what the gate says later is harmless."""
    life = Life(policy=GATED)
    life.tell(facts.Began(), facts.SweepDone(), facts.StopRequested("pid 1"))
    life.fire() if life.state.node is Node.GATING else None
    assert (life.state.node, life.state.phase) == (Node.GONE, Phase.DOCUMENTING)
    assert life.tell(facts.MemoryBack()) == []
    assert not any(isinstance(order, orders.Spawn) for order in life.given)


def test_at_the_floor_clients_are_told_the_tree_goes_and_it_is_written_down() -> None:
    """KILL for what is left, an explicit error for what was in flight, evidence, and a crash out of memory in the books."""
    life = served()
    given = life.tell(facts.MemoryFloor(1, "memory reached the floor: 6.9 GiB"))
    assert kinds(given) == [orders.CloseGate, orders.CutInFlight, orders.KillTree, orders.SaveEvidence]
    assert orders.CutInFlight(Cut.ENGINE_FAILED) in given
    assert orders.CloseGate(ClosedReason.RESTARTING) in given
    life.tell(facts.EvidenceSaved())
    life.crash(-9)
    assert life.state.restarts == {"out_of_memory": 1}
    assert len(life.state.tally.crashes) == 1
    assert life.state.reading is not None
    assert life.state.reading.sentence == "memory reached the floor: 6.9 GiB"
    assert "--gpu-memory-utilization" in life.state.reading.mend
    life.fire()
    assert life.state.node is Node.GATING


def test_floor_while_loading_counts_as_a_failed_start_and_parks_after_two() -> None:
    """A configuration that does not fit is not tried for ever."""
    life = loaded()
    assert Timer.START in life.timers
    life.tell(facts.MemoryFloor(1, "memory reached the floor"))
    assert Timer.START not in life.timers
    life.crash(-9)
    life.fire()
    life.tell(facts.MemoryBack(), facts.Spawned(102), facts.MemoryFloor(2, "memory reached the floor"))
    life.crash(-9)
    assert life.state.node is Node.PARKED
    assert "memory reached the floor" in life.state.problem


def test_the_guards_word_outweighs_what_its_kill_looked_like() -> None:
    """A worker seen dead before the guard's word came is no crash of a worker; the word counts once."""
    life = served()
    life.tell(facts.MemberDied(102, "VLLM::Worker"))
    assert life.state.why is Why.CORE_DIED
    life.tell(facts.MemoryFloor(1, "memory reached the floor"))
    assert life.state.why is Why.MEMORY
    assert life.tell(facts.MemoryFloor(1, "memory reached the floor")) == []


def test_a_kill_faster_than_the_guards_word_is_the_guards_all_the_same() -> None:
    """The exit may be seen first: while the rest is swept the word still names the cause, once, with its evidence."""
    life = served()
    life.tell(facts.Exited(-9))
    assert life.tell(facts.MemoryFloor(1, "memory reached the floor")) == [
        orders.SaveEvidence("memory reached the floor")
    ]
    assert life.tell(facts.MemoryFloor(1, "memory reached the floor")) == []
    life.tell(facts.SweepDone())
    assert life.state.restarts == {"out_of_memory": 1}
    assert life.state.last_restart is not None
    assert "memory reached the floor" in life.state.last_restart.sentence


def test_a_stop_that_was_faster_than_the_guards_word_stays_a_stop() -> None:
    """What we ended on request is not turned into a failure by a word that comes after its end."""
    life = served()
    life.tell(facts.StopRequested("pid 1"), facts.Drained(), facts.CutSettled(), facts.Exited(-9))
    assert life.tell(facts.MemoryFloor(1, "memory reached the floor")) == []
    life.tell(facts.SweepDone())
    assert life.state.reading is not None
    assert life.state.reading.clean


def test_a_late_word_about_an_earlier_engine_touches_no_other() -> None:
    """The fact names the incarnation it killed."""
    life = served()
    life.crash()
    life.fire()
    life.tell(facts.MemoryBack(), facts.Spawned(103), facts.BecameReady())
    assert life.tell(facts.MemoryFloor(1, "memory reached the floor")) == []
    assert life.state.node is Node.READY


def test_floor_in_a_stop_stays_a_stop() -> None:
    """An engine that is being stopped and crosses the floor was still stopped on request."""
    life = served()
    life.tell(facts.StopRequested("pid 1"), facts.Drained(), facts.CutSettled())
    assert life.state.node is Node.TERMINATING
    life.tell(facts.MemoryFloor(1, "memory reached the floor"))
    life.tell(facts.Exited(-9), facts.SweepDone())
    assert life.state.reading is not None
    assert life.state.reading.clean


def test_a_headless_node_that_ends_with_its_head_spends_no_budget() -> None:
    """Ten restarts of the other node in a row are ten restarts here; an end within a minute is its own and is counted."""
    life = Life(policy=replace(POLICY, headless=True))
    life.ready()
    for _ in range(10):
        life.now += 60.0
        life.crash(1)
        life.fire()
        life.ready()
    assert (life.state.incarnation, life.state.restarts, life.state.tally.crashes) == (11, {"followed": 10}, ())
    for _ in range(4):
        life.now += 59.0
        life.crash(1)
        if life.state.node is Node.WAITING:
            life.fire()
            life.ready()
    assert life.state.node is Node.PARKED
