"""The start gate: an engine starts into memory that has been measured, or not at all."""

from dataclasses import replace

import pytest

from vllm_supervisor.core.memory import GIB, GuardPolicy, Reading
from vllm_supervisor.core.memory_gate import Open, Stillness, TooLittle, Wait, Waiting, decide, follow, wanted
from vllm_supervisor.core.neighbours import Neighbour

TOTAL = 120 * GIB
POLICY = GuardPolicy()  # low is 10.8 GiB, twice of it 21.6
OTHER = (Neighbour("VLLM::EngineCore", 4089, int(38.2 * GIB)),)


def ask(
    available: float,
    before: float | None,
    at: float = 0.0,
    *,
    stood: float = 0.0,
    asked: bool = False,
    held: bool = False,
) -> Open | Waiting | TooLittle:
    """Ask the gate of a machine of 120 GiB with so many GiB available, `stood` seconds already; the wait is from 0 to 300 s."""
    was = None if before is None else int(before * GIB)
    reading = Reading(at, TOTAL, int(available * GIB))
    wait = Wait(0.0, 300.0, was, asked=asked, neighbours=OTHER if held else ())
    return decide(reading, wait, Stillness(reading.available, at - stood), POLICY)


@pytest.mark.parametrize(
    ("available", "before", "opens"),
    [
        (112.0, 114.0, True),  # less a margin of 2.4 GiB
        (111.0, 114.0, False),
        (11.0, None, True),  # the first engine needs a machine above `low`
        (10.0, None, False),
        (10.0, 5.0, False),  # and every engine does
    ],
)
def test_opens_at_the_level_before_the_last_engine(available: float, before: float | None, opens: bool) -> None:
    """Enough is what was there before, less two percent; never less than the level `low`."""
    assert (ask(available, before) == Open()) is opens


@pytest.mark.parametrize(
    ("available", "stood", "at", "held", "asked", "expected"),
    [
        # another model has moved in: 70 of the 110 GiB of before are left
        (70.0, 0.0, 20.0, True, False, Waiting),  # it may still rise
        (70.0, 4.9, 20.0, True, False, Waiting),
        (70.0, 5.0, 20.0, True, False, Open),
        (70.0, 29.9, 40.0, False, False, Waiting),  # nobody is seen to hold it: a driver may give it back late
        (70.0, 30.0, 40.0, False, False, Open),
        (70.0, 0.0, 300.0, False, False, Open),  # at the end of the wait
        (30.0, 5.0, 20.0, True, False, Waiting),  # 38.2 GiB seen are less than half of what is missing
        (22.0, 30.0, 40.0, False, False, Open),
        (21.5, 200.0, 299.0, True, False, Waiting),  # not well above low
        (21.5, 300.0, 300.0, True, False, TooLittle),
        # a person's restart: the level of now, if it stands
        (70.0, 0.0, 0.0, False, True, Waiting),
        (70.0, 2.0, 2.0, False, True, Open),
        (11.0, 2.0, 2.0, False, True, Open),
        (11.0, 0.0, 300.0, False, True, Open),
        (10.0, 2.0, 2.0, False, True, Waiting),
        (10.0, 2.0, 300.0, False, True, TooLittle),
    ],
)  # fmt: skip
def test_below_the_level_of_before(
    available: float, stood: float, *, at: float, held: bool, asked: bool, expected: type
) -> None:
    """Well above low and still is enough: soon where the rest is seen in other hands, at once where a person asks."""
    assert isinstance(ask(available, 110.0, at, stood=stood, held=held, asked=asked), expected)


def test_stillness_is_a_level_that_is_kept() -> None:
    """Noise of one percent is none; a rise or a fall begins anew, a slow one as well."""
    still = None
    seen = []
    for at, available in enumerate((70.0, 70.9, 69.0, 71.5, 71.0, 60.0, 60.0)):
        still = follow(still, Reading(float(at), TOTAL, int(available * GIB)))
        seen.append(still.since)
    assert seen == [0.0, 0.0, 0.0, 3.0, 3.0, 5.0, 5.0]
    slow = [follow(None, Reading(0.0, TOTAL, 40 * GIB))]
    for at in range(1, 61):  # half a GiB a second
        slow.append(follow(slow[-1], Reading(float(at), TOTAL, 40 * GIB + at * GIB // 2)))
    assert max(at - one.since for at, one in enumerate(slow)) < 5.0


def test_waits_with_words_and_gives_up_with_the_numbers() -> None:
    """What is waited for, how much there is and how much is wanted, and what to do."""
    assert ask(36.7, 112.1, at=20.0) == Waiting(
        "waiting for memory before the engine starts: 36.7 GiB available, 109.7 GiB wanted "
        "(112.1 GiB before the last engine, less 2.4 GiB); for 280 s at most"
    )
    assert ask(6.7, 112.1, at=300.0) == TooLittle(
        "memory did not come back within 300 s: 6.7 GiB available, 109.7 GiB wanted "
        "(112.1 GiB before the last engine, less 2.4 GiB); find what holds it, a reboot may be needed",
        lost=True,
    )
    first = ask(3.0, None, at=300.0)
    assert isinstance(first, TooLittle)
    assert not first.lost
    assert "the level memory.low of 120.0 GiB" in first.sentence


def test_the_neighbour_is_named() -> None:
    """Who holds what is missing stands in each sentence, and a reboot is not the advice."""
    by = "held by VLLM::EngineCore (pid 4089, 38.2 GiB)"
    opened = ask(70.0, 110.0, 30.0, stood=5.0, held=True)
    assert opened == Open(
        "70.0 GiB available, 107.6 GiB wanted (110.0 GiB before the last engine, less 2.4 GiB); it starts with that; "
        + by
    )
    waiting = ask(70.0, 110.0, 10.0, held=True)
    assert isinstance(waiting, Waiting)
    assert waiting.sentence.endswith(f"for 290 s at most; {by}")
    short = ask(9.0, 50.0, 300.0, held=True)
    assert isinstance(short, TooLittle)
    assert (short.lost, short.sentence.endswith(f"{by}; stop what uses it")) == (False, True)
    small = ask(6.0, 112.0, 300.0, held=True)  # 38.2 of 104 GiB explain nothing
    assert isinstance(small, TooLittle)
    assert small.lost
    assert "in use by VLLM" in small.sentence


def test_memory_that_is_back_opens_even_at_the_end() -> None:
    """The last look decides by what it sees, not by the clock."""
    assert ask(112.0, 112.1, at=301.0) == Open()


def test_a_level_that_sinks_a_little_with_each_start_is_followed() -> None:
    """112.15, 112.05, 111.95 GiB as each failed start kept a little: the gate lets them pass, the budget ends them."""
    before = 112.15
    for available in (112.05, 111.95):
        assert wanted(TOTAL, int(before * GIB), POLICY) < available * GIB
        before = available


def test_a_wait_without_an_engine_before_it_has_no_level_to_return_to() -> None:
    """The first start asks for `low` alone, whoever is there."""
    wait = Wait(0.0, 300.0, None, neighbours=OTHER)
    reading = Reading(0.0, TOTAL, 11 * GIB)
    assert decide(reading, wait, follow(None, reading), POLICY) == Open()
    assert decide(reading, replace(wait, before=110 * GIB), follow(None, reading), POLICY) != Open()
