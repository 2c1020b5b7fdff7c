"""The launch gate: an engine starts into memory that has been measured, or not at all."""

import pytest

from vllm_supervisor.core.memory import GIB, GuardPolicy, Reading
from vllm_supervisor.core.memory_gate import Open, TooLittle, Waiting, decide, wanted

TOTAL = 120 * GIB
POLICY = GuardPolicy()


def ask(available: float, before: float | None, at: float = 0.0) -> Open | Waiting | TooLittle:
    """Ask the gate of a machine of 120 GiB with so many GiB available; the wait is from 0 to 300 s."""
    was = None if before is None else int(before * GIB)
    return decide(Reading(at, TOTAL, int(available * GIB)), was, POLICY, since=0.0, until=300.0)


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


def test_waits_with_words_and_gives_up_with_the_numbers() -> None:
    """What is waited for, how much there is and how much is wanted, and what to do."""
    assert ask(36.7, 112.1, at=20.0) == Waiting(
        "waiting for memory before the engine starts: 36.7 GiB available, 109.7 GiB wanted "
        "(112.1 GiB before the last engine, less 2.4 GiB); for 280 s at most"
    )
    assert ask(36.7, 112.1, at=300.0) == TooLittle(
        "memory did not come back within 300 s: 36.7 GiB available, 109.7 GiB wanted "
        "(112.1 GiB before the last engine, less 2.4 GiB); find what holds it, a reboot may be needed",
        lost=True,
    )
    first = ask(3.0, None, at=300.0)
    assert isinstance(first, TooLittle)
    assert not first.lost
    assert "the level memory.low of 120.0 GiB" in first.sentence


def test_memory_that_is_back_opens_even_at_the_end() -> None:
    """The last look decides by what it sees, not by the clock."""
    assert ask(112.0, 112.1, at=301.0) == Open()


def test_a_level_that_sinks_a_little_with_each_start_is_followed() -> None:
    """112.15, 112.05, 111.95 GiB as each failed start kept a little: the gate lets them pass, the budget ends them."""
    before = 112.15
    for available in (112.05, 111.95):
        assert wanted(TOTAL, int(before * GIB), POLICY) < available * GIB
        before = available
