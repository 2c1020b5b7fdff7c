"""The memory guard against collapses as they were reported from a GB10 (121.7 GiB, four looks a second).

Times are seconds since the fall began. The two collapses: vllm-project/vllm/issues/56824.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_supervisor.core.memory import (
    GIB,
    Crossing,
    GuardPolicy,
    GuardState,
    Level,
    Reading,
    slope,
    step,
    tell,
    time_to_floor,
)

TOTAL = 121.7  # GiB
POLICY = GuardPolicy()
FLOOR, LOW = 0.06 * TOTAL, 0.09 * TOTAL  # 7.3 and 10.95 GiB


@dataclass(frozen=True)
class Seen:
    """What the guard said at one look."""

    at: float
    available: float  # GiB
    state: GuardState


def play(available: Callable[[float], float], seconds: float, **more: Callable[[float], object]) -> list[Seen]:
    """Look four times a second at `available` (GiB by time); stop at the floor, where the engine is killed."""
    state, seen = GuardState(), []
    for look in range(int(seconds * 4) + 1):
        at = look / 4
        have = available(at)
        extra = {name: value(at) for name, value in more.items()}
        reading = Reading(1000 + at, int(TOTAL * GIB), int(have * GIB), **extra)
        state = step(state, reading, POLICY)
        seen.append(Seen(at, have, state))
        if state.crossing is not None:
            break
    return seen


def line(start: float, end: float, seconds: float) -> Callable[[float], float]:
    """Fall evenly from `start` to `end` GiB."""
    return lambda at: start + (end - start) * at / seconds


def first(seen: list[Seen], level: Level) -> float | None:
    """When `level` was said first."""
    return next((one.at for one in seen if one.state.level is level), None)


@pytest.mark.parametrize(
    ("start", "end", "seconds", "low_at", "killed_at"),
    [(29.0, 2.5, 9.0, 2.5, 7.5), (23.8, 6.3, 5.0, 1.0, 4.75)],
    ids=["29 to 2.5 GiB in 9 s", "23.8 to 6.3 GiB in 5 s"],
)
def test_reported_collapses_end_in_time(
    start: float, end: float, seconds: float, low_at: float, killed_at: float
) -> None:
    """Admission closes seconds before, and the engine is killed at the first look below the floor: less than one fall late."""
    seen = play(line(start, end, seconds), seconds)
    assert (first(seen, Level.LOW), first(seen, Level.FLOOR)) == (low_at, killed_at)
    assert seen[-1].at == killed_at
    assert FLOOR - seen[-1].available < (start - end) / seconds / 4
    assert seen[-1].state.crossing is Crossing.LEVEL


def test_a_slow_leak_closes_admission_and_ends_at_the_floor() -> None:
    """20 MiB a second from 14 GiB: low at 10.95 GiB, after 156.25 s, killed after 343.0 s, one look's fall below the floor."""
    rate = 20 / 1024
    seen = play(lambda at: 14.0 - rate * at, 400.0)
    assert (first(seen, Level.LOW), seen[-1].at) == (156.25, 343.0)
    assert {one.state.level for one in seen if one.at > 156.25} == {Level.LOW, Level.FLOOR}  # closed once, and kept
    assert FLOOR - seen[-1].available < rate / 4


def test_page_cache_that_grows_is_no_shortage() -> None:
    """MemFree from 90 to 1 GiB in a minute, all of it page cache: MemAvailable stands, and nothing is done."""
    free = line(90.0, 1.0, 60.0)
    seen = play(
        lambda _at: 95.0,
        60.0,
        free=lambda at: int(free(at) * GIB),
        cached=lambda at: int((95.0 - free(at)) * GIB),
    )
    assert len(seen) == 241
    assert {one.state.level for one in seen} == {Level.NORMAL}


@pytest.mark.parametrize("used", [0.90, 0.92])
def test_steady_high_use_is_normal(used: float) -> None:
    """An hour at 90 or 92 % with the noise of a living machine (150 MiB up and down): nothing is done."""
    seen = play(lambda at: TOTAL * (1 - used) + 0.15 * ((at * 7.3) % 2 - 1), 3600.0)
    assert len(seen) == 14401
    assert {one.state.level for one in seen} == {Level.NORMAL}


def test_a_model_that_fills_memory_down_to_its_place_is_not_killed() -> None:
    """A load of 40 GiB a second that stops at 14 GiB: low while it falls, normal 5 s after it began, never the floor."""
    seen = play(lambda at: max(14.0, 110.0 - 40.0 * at), 60.0)
    assert first(seen, Level.FLOOR) is None
    assert seen[-1].state.level is Level.NORMAL


def test_a_fall_that_leaves_no_time_for_another_look_is_the_floor() -> None:
    """48 GiB a second: at 14 GiB the next look would find 2; it is killed there, above the floor."""
    seen = play(lambda at: 62.0 - 48.0 * at, 5.0)
    assert (seen[-1].at, seen[-1].available, seen[-1].state.crossing) == (1.0, 14.0, Crossing.FAST)


def test_a_large_allocation_in_one_go_is_left_alone() -> None:
    """60 GiB between two looks, down to 20 GiB and no further: what a KV cache looks like."""
    seen = play(lambda at: 80.0 if at < 3 else 20.0, 30.0)
    assert first(seen, Level.FLOOR) is None
    assert seen[-1].state.level is Level.NORMAL


def test_a_late_look_is_no_fast_fall() -> None:
    """Ten seconds between two looks and 17 GiB less: that is 1.7 GiB a second, and the next look is in time."""
    state = step(GuardState(), Reading(1000.0, int(TOTAL * GIB), 30 * GIB), POLICY)
    state = step(state, Reading(1010.0, int(TOTAL * GIB), 13 * GIB), POLICY)
    assert state.crossing is None


def at_rest(level: float) -> Callable[[float], float]:
    """Stand at `level` GiB."""
    return lambda _at: level


def steps(*levels: tuple[float, float]) -> Callable[[float], float]:
    """Stand at the level of the last (since, GiB) that has begun."""
    return lambda at: [level for since, level in levels if at >= since][-1]


@pytest.mark.parametrize(
    ("available", "said_at", "killed_at"),
    [
        (at_rest(90.0), 4.0, None),  # a healthy engine, as on every real machine
        (at_rest(22.5), 4.0, None),
        (at_rest(9.0), 4.0, None),  # below low, and at rest there since before we came
        (line(110.0, 30.0, 30.0), 20.0, None),  # weights that load
        (lambda at: max(14.0, 110.0 - 40.0 * at), 2.0, None),  # a KV cache taken in one go, above low
        (steps((0, 60.0), (5, 20.0)), 5.0, None),
        (steps((0, 14.0), (5, 12.9), (5.25, 12.8), (5.5, 10.5)), 5.5, 5.5),  # low: the line counts
        (steps((0, 12.0), (5, 10.0)), 4.0, 5.0),  # and for five seconds
        (steps((0, 12.0), (5, 10.0)), 5.5, 5.5),
        (steps((0, 12.0), (9.5, 10.0)), 4.0, None),
        (steps((0, 12.0), (5, 10.0)), 25.0, None),  # at rest there since 20 s
        (line(29.0, 2.5, 9.0), 5.75, 5.75),  # falling, 12.1 GiB left: 1.75 s earlier than the floor itself
        (line(29.0, 2.5, 9.0), 2.5, 5.75),  # said at 21.6 GiB: counted when memory is that tight
    ],
)  # fmt: skip
def test_the_drivers_word_counts_only_while_memory_is_tight(
    available: Callable[[float], float], said_at: float, killed_at: float | None
) -> None:
    """NV_ERR_NO_MEMORY is the floor below low or while falling towards the floor from just above it, else nothing."""
    seen = play(available, 28.0, driver_out=lambda at: 3 if at < said_at else 4)
    killed = seen[-1] if seen[-1].state.crossing is not None else None
    assert (killed and killed.at, killed and killed.state.crossing) == (
        killed_at,
        None if killed_at is None else Crossing.DRIVER,
    )


def test_lines_from_before_the_first_look_mean_nothing() -> None:
    """A count that is there at the first look is of another time, on a machine that is low as well."""
    seen = play(line(12.0, 8.0, 20.0), 20.0, driver_out=lambda _at: 3)
    assert {one.state.crossing for one in seen} == {None}


@pytest.mark.parametrize(("available", "killed"), [(10.5, True), (30.0, False)])
def test_stalls_count_only_below_low(available: float, killed: bool) -> None:
    """60 % of full stall ends an engine on a machine that is low, not on one that merely swaps."""
    seen = play(lambda _at: available, 5.0, stalled=lambda at: 65.0 if at >= 2 else 0.0)
    assert (seen[-1].state.crossing is Crossing.STALLED) is killed


def test_low_ends_when_the_fall_ends_and_begins_again_when_it_goes_on() -> None:
    """Down to 9 GiB and steady there: closed for 15 s without a new minimum, open then, closed again after 0.6 GiB more."""

    def fall(at: float) -> float:
        return 12.0 - at / 2 if at < 6 else 9.0 if at < 40 else 9.0 - (at - 40) / 10

    seen = play(fall, 55.0)
    levels = [
        (one.at, one.state.level)
        for one, before in zip(seen[1:], seen, strict=False)
        if one.state.level is not before.state.level
    ]
    assert levels == [(2.25, Level.LOW), (21.0, Level.NORMAL), (46.25, Level.LOW)]


def test_the_way_back_up_opens() -> None:
    """After the kill memory returns, some of it first: floor, low, and normal 5 s later; all at once: normal at once."""

    def after_kill(first: float) -> list[tuple[int, Level]]:
        state, seen = GuardState(), [(-1, Level.NORMAL)]
        for look in range(80):
            have = 20.0 - look if look < 14 else first if look < 16 else 100.0
            state = step(state, Reading(1000 + look / 4, int(TOTAL * GIB), int(have * GIB)), POLICY)
            if state.level is not seen[-1][1]:
                seen.append((look, state.level))
        return seen[-2:]

    assert after_kill(8.0) == [(14, Level.LOW), (34, Level.NORMAL)]
    assert after_kill(100.0) == [(13, Level.FLOOR), (14, Level.NORMAL)]


def test_what_is_told_holds_the_numbers() -> None:
    """The sentence has level, total, floor and rate; the slope is known after a second."""
    seen = play(line(29.0, 2.5, 9.0), 9.0)
    last = seen[-1]
    reading = Reading(1000 + last.at, int(TOTAL * GIB), int(last.available * GIB))
    said = tell(last.state, reading, POLICY)
    assert (
        said == "memory reached the floor: 6.9 GiB of 121.7 GiB available, floor 7.3 GiB, falling by 2.9 GiB a second"
    )
    assert slope(seen[3].state) is None
    assert round(slope(last.state) or 0) == round(-26.5 / 9 * GIB)
    early = seen[8]
    left = time_to_floor(early.state, Reading(1002.0, int(TOTAL * GIB), int(early.available * GIB)), POLICY)
    assert left == pytest.approx((early.available - FLOOR) / (26.5 / 9), abs=0.01)


@given(st.lists(st.integers(0, int(TOTAL * GIB)), min_size=1, max_size=60))
def test_below_the_floor_is_always_the_floor(levels: list[int]) -> None:
    """Whatever came before, a look at or below the floor says so, and the memory of the guard stays small."""
    state = GuardState()
    for look, available in enumerate(levels):
        state = step(state, Reading(look / 4, int(TOTAL * GIB), available), POLICY)
        if available <= POLICY.floor_bytes(int(TOTAL * GIB)):
            assert state.level is Level.FLOOR
            assert state.crossing is not None
        assert len(state.recent) <= 9
