"""The drain's table: every pair has a cell, every stop goes forward, and each path gives the orders it should."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_supervisor.core import drain
from vllm_supervisor.core.drain import (
    CloseAdmission,
    CutAll,
    DeadlinePassed,
    DrainAsked,
    DrainFact,
    DrainOrder,
    DrainState,
    Emptied,
    EngineGone,
    EnterPhase,
    KillEngine,
    LateRequest,
    Leave,
    OpenAdmission,
    ResumeAsked,
    SetDeadline,
    Stage,
    StopAsked,
    StopEngine,
    WatchEmpty,
    WriteReport,
    Written,
)
from vllm_supervisor.core.timeouts import Limits
from vllm_supervisor.core.words import Phase

LIMITS = Limits(None, "nobody", propagation=0.0, drain=60.0, engine_stop=30.0, documentation=5.0, reserve=5.0)
SLOW_ROUTES = Limits(100.0, "test", propagation=10.0, drain=60.0, engine_stop=10.0, documentation=5.0, reserve=5.0)
FACTS: tuple[DrainFact, ...] = (
    StopAsked(), ResumeAsked(), Emptied(), LateRequest(), DeadlinePassed(), EngineGone(), Written(), DrainAsked(),
)  # fmt: skip


def play(*facts: tuple[float, DrainFact], limits: Limits = LIMITS) -> tuple[DrainState, list[DrainOrder]]:
    """Tell the facts in order; return the last state and the orders of the last fact."""
    state, orders = DrainState(), []
    for now, fact in facts:
        state, orders = drain.step(state, fact, now, limits)
    return state, orders


def test_a_stop_refuses_first_and_then_drains() -> None:
    """The first order of a stop closes admission; without propagation the drain begins in the same step."""
    state, orders = play((10.0, StopAsked()))
    assert orders == [
        CloseAdmission(stopping=True),
        EnterPhase(Phase.ADMISSION_STOP),
        SetDeadline(10.0),
        EnterPhase(Phase.DRAINING),
        SetDeadline(70.0),
        WatchEmpty(),
    ]
    assert state.phase is Phase.DRAINING


def test_an_empty_drain_ends_early() -> None:
    """Nothing in flight ends the drain at once, and the engine gets its whole budget from then."""
    state, orders = play((10.0, StopAsked()), (10.5, Emptied()))
    assert orders == [SetDeadline(None), CutAll(), StopEngine(kill_at=40.5)]
    assert state.phase is Phase.DRAINING


def test_the_whole_way() -> None:
    """Each phase follows the one before, and documentation has its own deadline."""
    state, orders = play((0.0, StopAsked()), (60.0, DeadlinePassed()), (61.0, EngineGone()))
    assert orders == [EnterPhase(Phase.DOCUMENTING), SetDeadline(66.0), WriteReport(66.0)]
    state, orders = drain.step(state, Written(), 62.0, LIMITS)
    assert orders == [EnterPhase(Phase.ENDED), SetDeadline(None), Leave()]
    assert list(state.entered.values()) == [0.0, 0.0, 60.0, 61.0, 62.0]


def test_a_report_that_cannot_be_written_does_not_hold_us() -> None:
    """The deadline of the documentation ends us as well."""
    _, orders = play((0.0, StopAsked()), (1.0, Emptied()), (2.0, EngineGone()), (7.0, DeadlinePassed()))
    assert orders[-1] == Leave()


def test_propagation_is_waited_for_even_when_empty() -> None:
    """While routes notice, refused requests find somebody who refuses, and the last of them is measured."""
    state, orders = play((0.0, StopAsked()), (1.0, Emptied()), (4.0, LateRequest()), limits=SLOW_ROUTES)
    assert (state.phase, orders) == (Phase.ADMISSION_STOP, [])
    state, orders = drain.step(state, DeadlinePassed(), 10.0, SLOW_ROUTES)
    assert orders == [EnterPhase(Phase.DRAINING), SetDeadline(70.0), WatchEmpty()]
    state, _ = drain.step(state, LateRequest(), 12.5, SLOW_ROUTES)
    assert (state.late_requests, state.last_late_s) == (2, 12.5)


@pytest.mark.parametrize("limits", [LIMITS, SLOW_ROUTES])
def test_each_repeated_stop_is_one_rung(limits: Limits) -> None:
    """The second request ends the drain with the short budget, the third kills."""
    state, orders = play((0.0, StopAsked()), (1.0, StopAsked()), limits=limits)
    assert orders[-2:] == [CutAll(), StopEngine(kill_at=6.0)]
    _, orders = drain.step(state, StopAsked(), 2.0, limits)
    assert orders == [KillEngine()]


@pytest.mark.parametrize("at", [0.0, 0.1, 0.999])
@pytest.mark.parametrize("facts", [[], [Emptied()], [Emptied(), EngineGone()]])
def test_a_stop_asked_again_at_once_counts_once(facts: list[DrainFact], at: float) -> None:
    """Within a second it is the same wish, whatever the drain has done meanwhile: nothing changes."""
    state, _ = play((0.0, StopAsked()), *((0.0, fact) for fact in facts))
    assert drain.step(state, StopAsked(), at, LIMITS) == (state, [])


def test_the_second_is_counted_from_the_last_wish_that_counted() -> None:
    """Requests that come ever again are not one wish for ever: the first after a second hastens, the next one kills."""
    state, done = play((0.0, StopAsked()))
    counted = []
    for tenth in range(1, 25):
        state, done = drain.step(state, StopAsked(), tenth / 10, LIMITS)
        if done:
            counted.append((tenth, type(done[-1])))
    assert counted == [(10, StopEngine), (20, KillEngine)]


def test_a_second_stop_shortens_the_engine_s_budget() -> None:
    """While the engine stops, a second request only brings KILL closer, and the third sends it."""
    state, _ = play((0.0, StopAsked()), (1.0, Emptied()))
    state, orders = drain.step(state, StopAsked(), 2.0, LIMITS)
    assert orders == [StopEngine(kill_at=7.0)]
    assert drain.step(state, StopAsked(), 3.0, LIMITS)[1] == [KillEngine()]


def test_an_engine_that_dies_ends_the_drain() -> None:
    """With the engine gone nothing can finish: what is in flight is cut and the documentation begins."""
    _, orders = play((0.0, StopAsked()), (1.0, EngineGone()))
    assert orders == [
        SetDeadline(None), CutAll(), EnterPhase(Phase.DOCUMENTING), SetDeadline(6.0), WriteReport(6.0),
    ]  # fmt: skip


def test_drain_and_resume_leave_the_phase_alone() -> None:
    """A maintenance drain closes admission once and opens it again; the phase stays `running`."""
    state, orders = play((0.0, DrainAsked()))
    assert (state.phase, orders) == (Phase.RUNNING, [CloseAdmission(stopping=False)])
    state, orders = drain.step(state, DrainAsked(), 1.0, LIMITS)
    assert orders == []
    state, orders = drain.step(state, ResumeAsked(), 2.0, LIMITS)
    assert (orders, state.drain_since) == ([OpenAdmission()], None)


def test_only_a_hook_s_time_is_taken_off() -> None:
    """A hook's waiting counts against the outer limit and the propagation; a maintenance drain's does not."""
    hook, _ = play((0.0, DrainAsked(hook=True)), (40.0, StopAsked()), limits=SLOW_ROUTES)
    plain, _ = play((0.0, DrainAsked()), (40.0, StopAsked()), limits=SLOW_ROUTES)
    assert (hook.budget.hook, hook.budget.propagation, hook.budget.drain) == (40.0, 0.0, 40.0)
    assert (plain.budget.hook, plain.budget.propagation, plain.budget.drain) == (0.0, 10.0, 60.0)


def test_an_old_hook_is_no_hook() -> None:
    """A hook older than the whole outer limit belonged to another occasion and costs nothing."""
    state, _ = play((0.0, DrainAsked(hook=True)), (7200.0, StopAsked()), limits=SLOW_ROUTES)
    assert (state.budget.hook, state.budget.drain) == (0.0, 60.0)


def test_a_hook_during_a_maintenance_drain_counts_from_its_own_begin() -> None:
    """When a hook comes after a long maintenance drain, only the hook's time counts."""
    state, _ = play((0.0, DrainAsked()), (7200.0, DrainAsked(hook=True)), (7210.0, StopAsked()), limits=SLOW_ROUTES)
    assert state.budget.hook == 10.0


def test_every_pair_has_a_cell() -> None:
    """Every stage takes every fact that can happen there; what cannot raises and changes nothing."""
    kinds = [type(fact) for fact in FACTS if not isinstance(fact, DrainAsked)]
    missing = {pair for pair in itertools.product(Stage, kinds) if pair not in drain.TABLE}
    assert missing == {(stage, Written) for stage in Stage if stage not in (Stage.DOCUMENTING, Stage.ENDED)}
    with pytest.raises(KeyError):
        drain.step(DrainState(), Written(), 0.0, LIMITS)


@given(st.lists(st.sampled_from(FACTS), max_size=30))
def test_the_phase_never_goes_back(facts: list[DrainFact]) -> None:
    """Whatever happens in whatever order, the phase moves forward only, and the end is ordered at most once."""
    state, phases, leaves = DrainState(), list(Phase), 0
    for now, fact in enumerate(facts):
        if (state.stage, type(fact)) not in drain.TABLE and not isinstance(fact, DrainAsked):
            continue
        after, orders = drain.step(state, fact, float(now), SLOW_ROUTES)
        assert phases.index(after.phase) >= phases.index(state.phase)
        leaves += orders.count(Leave())
        state = after
    assert leaves == (state.stage is Stage.ENDED)


def test_late_requests_are_measured_from_the_withdrawal() -> None:
    """What comes during a hook's drain and after the stop counts from the moment admission closed; a resume forgets it."""
    state, _ = play(
        (5.0, LateRequest()),
        (10.0, DrainAsked(hook=True)),
        (12.0, LateRequest()),
        (15.0, StopAsked()),
        (16.5, LateRequest()),
    )
    assert (state.late_requests, state.last_late_s) == (2, 6.5)
    state, _ = play((0.0, DrainAsked()), (3.0, LateRequest()), (4.0, ResumeAsked()), (5.0, LateRequest()))
    assert (state.late_requests, state.last_late_s) == (0, None)
