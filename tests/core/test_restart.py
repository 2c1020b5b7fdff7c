"""The restart policy on a virtual clock: when it starts again, and exactly when it gives up."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_supervisor.core.exit_status import Asked, ExitEvidence, ExitReading, interpret
from vllm_supervisor.core.restart import (
    RESTART_CAUSES,
    Ended,
    EndKind,
    GiveUp,
    GiveUpKind,
    Restart,
    RestartPolicy,
    RestartTally,
    after_end,
    give_up_mode,
    pardoned,
    ready,
    restart_cause,
    slow_retry_at,
    stuck_used,
    used,
)
from vllm_supervisor.core.signatures import Cause, StartPhase

CRASH, HANG, START_FAILURE, COMMANDED = EndKind.CRASH, EndKind.HANG, EndKind.START_FAILURE, EndKind.COMMANDED
DEFAULT = RestartPolicy()
MINUTE, HOUR = 60.0, 3600.0


def reading(raw: int = 1, block: str = "", *, asked: Asked = Asked.NOTHING, unified: bool = False) -> ExitReading:
    """Read an end before ready."""
    return interpret(raw, asked, StartPhase.LOADING, ExitEvidence(first_error=block, unified_memory=unified))


SEGV = interpret(-11, Asked.NOTHING, StartPhase.SERVING, ExitEvidence())
KILLED_BY_US = interpret(-9, Asked.KILL, StartPhase.SERVING, ExitEvidence())
HUB = reading(1, "HTTPError: 504 Server Error: Gateway Time-out")
USAGE = reading(2, "vllm: error: unrecognized arguments: --x")


@dataclass(frozen=True)
class Life:
    """One life of the engine: how long it loads, how long it is ready (None: never), how it ends."""

    load: float
    life: float | None
    kind: EndKind = CRASH
    reading: ExitReading = SEGV


@dataclass
class Run:
    """What came of a series of lives: end times, waits, and how it was given up."""

    ends: list[float]
    waits: list[float]
    gave_up: GiveUp | None
    tally: RestartTally


def play(
    lives: Iterable[Life], policy: RestartPolicy = DEFAULT, *, jitter: float = 0.0, tally: RestartTally | None = None
) -> Run:
    """Let lives follow one another from second 0 until they are over or the policy gives up."""
    tally = tally or RestartTally()
    run = Run([], [], None, tally)
    now = 0.0
    for life in lives:
        began = now
        now += life.load
        if life.life is not None:
            tally = ready(tally, now)
            now += life.life
        run.ends.append(now)
        tally, decision = after_end(tally, policy, Ended(life.kind, life.reading, now - began), now, jitter)
        run.tally = tally
        if isinstance(decision, GiveUp):
            run.gave_up = decision
            return run
        assert decision.at == now + decision.backoff_s
        run.waits.append(decision.backoff_s)
        now = decision.at
    return run


def failing(*readings: ExitReading, load: float = 30.0) -> list[Life]:
    """Make starts that never become ready."""
    return [Life(load, None, START_FAILURE, each) for each in readings]


# -- crashes


def test_ten_crashes_in_a_row_end_at_the_fourth() -> None:
    """Three crashes are answered, the fourth ends it, at the second foretold."""
    run = play([Life(25, 60)] * 10)
    assert run.ends == [85.0, 170.5, 256.5, 343.5]
    assert run.waits == [0.5, 1.0, 2.0]
    assert run.gave_up is not None
    assert (run.gave_up.kind, run.gave_up.status) == (GiveUpKind.CRASHES, 69)
    assert run.gave_up.sentence.startswith(
        "crash 4 without 10 min of health in between: the engine was ended by SIGSEGV"
    )


def test_long_load_and_short_life_end() -> None:
    """Six minutes of load and one minute of life never fill any 15 minutes with crashes, and end all the same."""
    run = play([Life(6 * MINUTE, 1 * MINUTE)] * 50)
    assert run.ends == [420.0, 840.5, 1261.5, 1683.5]
    assert run.gave_up is not None


def test_health_in_the_past_does_not_excuse_a_later_loop() -> None:
    """A healthy life heals what lay before it, and nothing of the loop that follows."""
    run = play([Life(25, 5 * HOUR), *[Life(6 * MINUTE, 1 * MINUTE)] * 50])
    assert len(run.ends) == 4
    assert run.gave_up is not None


def test_a_long_failed_start_heals_nothing() -> None:
    """Time that passes without a ready engine is no health, however long the failing load took."""
    run = play([Life(25, 60), Life(20 * MINUTE, None, START_FAILURE, reading(1))] * 10)
    assert run.ends[::2] == [85.0, 1371.5, 2659.5, 3950.5]
    assert run.gave_up is not None
    assert run.gave_up.kind is GiveUpKind.CRASHES


def test_lives_just_short_of_health_never_heal() -> None:
    """Even an hour between crashes heals nothing if no life was ready for `healthy_after` at a stretch."""
    run = play([Life(HOUR, 10 * MINUTE - 1)] * 50)
    assert len(run.ends) == 4
    assert run.gave_up is not None


def test_crashes_after_healthy_lives_go_on_for_ever() -> None:
    """An engine that works for hours between its crashes is always started again, with the shortest wait."""
    run = play([Life(25, HOUR)] * 100)
    assert run.gave_up is None
    assert set(run.waits) == {0.5}


def test_a_healthy_life_does_not_heal_within_the_window() -> None:
    """A crash leaves the tally only when it is old as well: `within` bounds what healthy lives may hide."""
    policy = replace(DEFAULT, within=2 * HOUR)
    run = play([Life(25, 11 * MINUTE)] * 50, policy)
    assert len(run.ends) == 4
    assert run.gave_up is not None


def test_healing_shows_while_the_engine_lives() -> None:
    """The budget in use falls back during a long life, not only at its end."""
    tally = play([Life(25, 60)] * 2).tally
    tally = ready(tally, 1000.0)
    assert used(tally, DEFAULT, 1000.0) == 2
    assert used(tally, DEFAULT, 1599.9) == 2
    assert used(tally, DEFAULT, 1600.0) == 0


def test_a_budget_of_none_gives_up_at_once() -> None:
    """With `max = 0` the first crash is the last."""
    run = play([Life(25, HOUR)] * 3, replace(DEFAULT, max=0))
    assert len(run.ends) == 1
    assert run.gave_up is not None


# -- hangs


def test_hangs_are_counted_over_six_hours() -> None:
    """The fourth hang within six hours ends it, however healthy the hours between were."""
    run = play([Life(25, 90 * MINUTE, HANG, KILLED_BY_US)] * 10)
    assert len(run.ends) == 4
    assert run.gave_up is not None
    assert (run.gave_up.kind, run.gave_up.status) == (GiveUpKind.HANGS, 69)


def test_rare_hangs_are_always_answered() -> None:
    """Hangs more than two hours apart never fill the tally."""
    run = play([Life(25, 2 * HOUR, HANG, KILLED_BY_US)] * 50)
    assert run.gave_up is None


def test_hangs_and_crashes_do_not_add_up() -> None:
    """Three of each are answered; a seventh end of either kind is one too many."""
    three = [Life(25, 60)] * 3 + [Life(25, 60, HANG, KILLED_BY_US)] * 3
    assert play(three).gave_up is None
    for last, kind in ((Life(25, 60), GiveUpKind.CRASHES), (Life(25, 60, HANG, KILLED_BY_US), GiveUpKind.HANGS)):
        run = play([*three, last])
        assert run.gave_up is not None
        assert run.gave_up.kind is kind


def test_each_budget_shows_its_own_use() -> None:
    """Hangs burden their own budget and not that of crashes, until they are older than their window."""
    tally = play([Life(25, 60, HANG, KILLED_BY_US)] * 3 + [Life(25, 60)]).tally
    last = tally.hangs[-1]
    assert (used(tally, DEFAULT, last), stuck_used(tally, DEFAULT, last)) == (1, 3)
    assert stuck_used(tally, DEFAULT, last + DEFAULT.stuck_within) == 1
    assert stuck_used(tally, DEFAULT, last + DEFAULT.stuck_within + 1) == 0


def test_our_own_words_name_a_hang() -> None:
    """Where we ended the engine ourselves the sentence says why, not how the process ended."""
    ended = Ended(HANG, KILLED_BY_US, 60.0, why="no step for 300 s with 3 requests waiting")
    _, decision = after_end(RestartTally(), replace(DEFAULT, stuck_max=0), ended, 60.0, 0.0)
    assert isinstance(decision, GiveUp)
    assert decision.sentence == "hang 1 within 6 h: no step for 300 s with 3 requests waiting"


# -- starts that never became ready


def test_two_starts_that_fail_end_it() -> None:
    """`start_attempts` counts attempts: the second failure in a row is the last."""
    run = play(failing(reading(1), reading(1), reading(1)))
    assert run.ends == [30.0, 60.5]
    assert run.gave_up is not None
    assert (run.gave_up.kind, run.gave_up.status) == (GiveUpKind.STARTS, 69)


def test_ready_forgives_failed_starts() -> None:
    """Only starts in a row count: one that became ready begins the count anew."""
    lives = [*failing(reading(1)), Life(25, HOUR)] * 20
    assert play(lives).gave_up is None


def test_a_restart_after_a_crash_has_the_same_start_budget() -> None:
    """An engine that once ran and then cannot start is given up as well."""
    run = play([Life(25, HOUR), *failing(reading(1), reading(1))])
    assert run.gave_up is not None
    assert run.tally.ever_ready


def test_a_deterministic_failure_is_tried_once() -> None:
    """A wrong option ends at the first attempt, with the option, the mend and status 78."""
    run = play(failing(USAGE, USAGE))
    assert run.ends == [30.0]
    assert run.gave_up is not None
    assert (run.gave_up.kind, run.gave_up.status) == (GiveUpKind.REPEATS, 78)
    assert "--x" in run.gave_up.sentence
    assert run.gave_up.sentence.endswith(USAGE.mend)


def test_a_signature_may_be_worth_one_more_start() -> None:
    """A deterministic failure with one retry is tried twice, one without it is not; unified memory grants its own."""
    device = reading(1, "RuntimeError: Failed to infer device type")
    cache = reading(1, "ValueError: No available memory for the cache blocks.")
    unified = reading(1, "ValueError: No available memory for the cache blocks.", unified=True)
    assert [len(play(failing(each, each, each)).ends) for each in (device, cache, unified)] == [2, 1, 2]
    assert len(play(failing(device, device), replace(DEFAULT, start_attempts=1)).ends) == 1


def test_different_failures_share_the_start_budget() -> None:
    """Failures that take turns cannot keep each other alive."""
    turns = [reading(1, "RuntimeError: Failed to infer device type"), reading(1, "FooError: x")] * 5
    assert len(play(failing(*turns)).ends) == 2


def test_an_unreachable_hub_is_waited_for() -> None:
    """The model hub's outage is met with waits of minutes that double up to a quarter of an hour, eight times."""
    run = play(failing(*[HUB] * 20))
    assert run.waits == [30.0, 60.0, 120.0, 240.0, 450.0, 450.0, 450.0, 450.0]
    assert run.gave_up is not None
    assert (run.gave_up.kind, run.gave_up.status) == (GiveUpKind.STARTS, 69)


def test_waiting_for_the_hub_does_not_spend_the_start_budget() -> None:
    """After an outage another failure still has its own attempts."""
    run = play(failing(HUB, HUB, HUB, reading(1), HUB, reading(1)))
    assert len(run.ends) == 6
    assert run.gave_up is not None


@pytest.mark.parametrize(
    ("durations", "ends"),
    [
        ((100.0, 100.0, 100.0), 3),
        ((100.0, 119.0, 100.0), 3),
        ((100.0, 130.0, 100.0, 100.0, 100.0), 5),
        ((10.0, 100.0, 1000.0, 10000.0, 10.0), 6),
    ],
)
def test_the_same_unknown_failure_three_times_repeats(durations: tuple[float, ...], ends: int) -> None:
    """Equal unknown failures, with durations within a fifth, are deterministic at the third, whatever the budget."""
    lives = [Life(duration, None, START_FAILURE, reading(1, "FooError: x")) for duration in durations]
    run = play([*lives, *failing(USAGE)], replace(DEFAULT, start_attempts=100))
    assert len(run.ends) == ends
    assert run.gave_up is not None
    assert (run.gave_up.kind, run.gave_up.status) == (GiveUpKind.REPEATS, 78)


def test_different_unknown_failures_are_not_the_same() -> None:
    """Another error or another status between them keeps the budget open."""
    policy = replace(DEFAULT, start_attempts=100)
    one, other = reading(1, "FooError: x"), reading(1, "BarError: y")
    assert play(failing(one, one, other, one, one, other, one), policy).gave_up is None


def test_what_only_a_new_container_mends_ends_with_its_own_status() -> None:
    """Lost GPU access ends at once with 75, before ready and after; a driver after a suspend is tried twice."""
    lost = reading(1, "NVMLError: Failed to initialize NVML: Unknown Error")
    unknown = reading(1, "RuntimeError: CUDA unknown error")
    for lives, ends in ((failing(lost), 1), ([Life(25, HOUR, CRASH, lost)], 1), (failing(unknown, unknown), 2)):
        run = play(lives)
        assert len(run.ends) == ends
        assert run.gave_up is not None
        assert (run.gave_up.kind, run.gave_up.status) == (GiveUpKind.OUTSIDE, 75)
    assert play([Life(25, HOUR, CRASH, unknown)]).gave_up is None


def test_a_reason_that_repeats_at_start_is_no_reason_while_serving() -> None:
    """A crash of an engine that had worked is tried again, even if its block names a deterministic failure."""
    full = interpret(1, Asked.NOTHING, StartPhase.SERVING, ExitEvidence(first_error="OSError: [Errno 28] No space"))
    assert play([Life(25, 60, CRASH, full)]).gave_up is None


# -- commanded restarts, parking, waits


def test_commanded_restarts_do_not_count() -> None:
    """A hundred ordered restarts are carried out at once and leave every budget as it was."""
    run = play([Life(25, 60)] * 3 + [Life(25, 5, COMMANDED, KILLED_BY_US)] * 100)
    assert run.gave_up is None
    assert set(run.waits[3:]) == {0.0}
    assert len(run.tally.crashes) == 3


def test_a_slow_retry_gets_one_try_and_an_order_gets_all() -> None:
    """After giving up, one more crash gives up again; a person's order begins with fresh budgets."""
    spent = play([Life(25, 60)] * 4).tally
    assert len(play([Life(25, 60)] * 4, tally=spent).ends) == 1
    fresh = pardoned(spent)
    assert fresh == RestartTally(ever_ready=True)
    assert len(play([Life(25, 60)] * 4, tally=fresh).ends) == 4
    starts = play(failing(reading(1), reading(1))).tally
    assert len(play(failing(reading(1)), tally=starts).ends) == 1


def test_the_tally_stays_bounded_through_slow_retries() -> None:
    """Retries over months remember no more than the budgets need."""
    tally = RestartTally()
    for number in range(1000):
        for kind in (CRASH, HANG):
            tally, _ = after_end(tally, DEFAULT, Ended(kind, SEGV, 1.0), float(number), 0.0)
    assert len(tally.crashes) == DEFAULT.max + 1
    assert len(tally.hangs) == DEFAULT.stuck_max + 1


def test_a_failed_start_after_crashes_waits_longer() -> None:
    """The wait grows with every failure that still burdens the engine, of whichever kind."""
    assert play([Life(25, 60), Life(25, 60), *failing(reading(1))]).waits == [0.5, 1.0, 2.0]


def test_slow_retry_is_off_by_default() -> None:
    """`parked` is left by ourselves only if a time is configured."""
    assert slow_retry_at(DEFAULT, 100.0) is None
    assert slow_retry_at(replace(DEFAULT, slow_retry=HOUR), 100.0) == 3700.0


def test_the_wait_is_bounded_and_never_shrinks() -> None:
    """Whatever the jitter, each wait is at least the last one and at most `backoff_max`."""
    policy = replace(DEFAULT, max=2000)
    for jitters in ((0.0, 0.0), (0.999, 0.0)):
        tally, last = RestartTally(), 0.0
        for number in range(2000):
            jitter = jitters[number % 2]
            tally, decision = after_end(tally, policy, Ended(CRASH, SEGV, 1.0), float(number), jitter)
            assert isinstance(decision, Restart)
            assert decision.backoff_s <= policy.backoff_max
            if number < 6:
                assert decision.backoff_s >= last
            last = decision.backoff_s
        assert last >= policy.backoff_max / 2


@pytest.mark.parametrize("ever_ready", [False, True])
@pytest.mark.parametrize("on_terminal", [False, True])
@pytest.mark.parametrize("has_notify", [False, True])
@pytest.mark.parametrize("is_pid1", [False, True])
def test_giving_up_exits_only_where_somebody_looks_on(
    ever_ready: bool, on_terminal: bool, has_notify: bool, is_pid1: bool
) -> None:
    """`auto` exits for an engine that never ran, on a terminal or under systemd; everything else parks."""
    where = {"ever_ready": ever_ready, "on_terminal": on_terminal, "has_notify": has_notify, "is_pid1": is_pid1}
    exits = not ever_ready and not is_pid1 and (on_terminal or has_notify)
    assert give_up_mode(DEFAULT, **where) == ("exit" if exits else "park")
    assert give_up_mode(replace(DEFAULT, on_give_up="park"), **where) == "park"
    assert give_up_mode(replace(DEFAULT, on_give_up="exit"), **where) == "exit"


def test_causes_are_a_fixed_set() -> None:
    """A crash is named by what ended the engine, everything else by its kind; no name is outside the set."""
    assert restart_cause(Ended(CRASH, SEGV, 1.0)) == "crashed"
    assert restart_cause(Ended(CRASH, KILLED_BY_US, 1.0)) == "crash"
    assert restart_cause(Ended(HANG, KILLED_BY_US, 1.0)) == "hang"
    assert restart_cause(Ended(START_FAILURE, USAGE, 1.0)) == "start_failure"
    for kind in EndKind:
        for cause in Cause:
            each = replace(SEGV, cause=cause, clean=cause is Cause.REQUESTED)
            assert restart_cause(Ended(kind, each, 1.0)) in RESTART_CAUSES
    assert len(set(RESTART_CAUSES)) == len(RESTART_CAUSES)


# -- whatever happens


LIVES = st.builds(
    Life,
    load=st.floats(0.1, 2 * HOUR),
    life=st.one_of(st.floats(0.0, 20 * MINUTE), st.floats(0.0, 8 * HOUR)),
    kind=st.sampled_from([CRASH, HANG]),
) | st.builds(
    Life,
    load=st.floats(0.1, 2 * HOUR),
    life=st.none(),
    kind=st.just(START_FAILURE),
    reading=st.sampled_from([reading(1), reading(-11), HUB, USAGE, reading(1, "FooError: x")]),
)


@given(
    st.lists(LIVES, max_size=60),
    st.builds(
        RestartPolicy,
        max=st.integers(0, 5),
        within=st.floats(1.0, 2 * HOUR),
        stuck_max=st.integers(0, 4),
        start_attempts=st.integers(1, 5),
        healthy_after=st.floats(1.0, HOUR),
    ),
    st.floats(0.0, 1.0, exclude_max=True),
)
def test_no_window_ever_holds_more_restarts_than_its_budget(
    lives: list[Life], policy: RestartPolicy, jitter: float
) -> None:
    """Any history keeps every budget in every window, and the tally stays bounded."""
    run = play(lives, policy, jitter=jitter)
    answered = [(end, life) for end, life in zip(run.ends, lives, strict=False)][: len(run.waits)]
    crashes = [end for end, life in answered if life.kind is CRASH]
    hangs = [end for end, life in answered if life.kind is HANG]
    assert all(sum(end <= other <= end + policy.within for other in crashes) <= policy.max for end in crashes)
    assert all(sum(end <= other <= end + policy.stuck_within for other in hangs) <= policy.stuck_max for end in hangs)

    unhealed = in_a_row = 0
    for _, life in answered:
        if life.life is not None and life.life >= policy.healthy_after * 0.999:
            unhealed = 0
        unhealed += life.kind is CRASH
        assert unhealed <= policy.max
        in_a_row = in_a_row + (life.reading is not HUB) if life.kind is START_FAILURE else 0
        assert in_a_row < policy.start_attempts
    assert len(run.tally.crashes) <= policy.max + 1
    assert len(run.tally.hangs) <= policy.stuck_max + 1
    assert len(run.tally.unknown) <= 3
    assert len(run.tally.waits) <= 1
