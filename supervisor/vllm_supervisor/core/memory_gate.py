"""The start gate: whether enough memory has come back for an engine to be started.

Rules:
* On unified memory a process that is gone has not given everything back yet, and a start into too little wedges the
  machine for good. So the wait is for a measured level, never for a time; it is bounded, and ends with the numbers.
* Wanted is what was available before the last engine, less a margin; before the first one, a machine above `low`.
* Memory that another program took meanwhile never comes back. So a level well above `low` is enough as well, once it has
  stood still: soon where other programs are seen to hold what is missing, later where nobody is, for then a driver may
  still be giving it back. What holds it is named.
* A person's restart takes the level of now as its measure: above `low` and still is enough.
Bytes and monotonic seconds. Sources: Blackwellboy/model-serving-minefield traps/memory/81, eugr/spark-vllm-docker/issues/257.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_supervisor.core.memory import GuardPolicy, Reading, gib
from vllm_supervisor.core.neighbours import Neighbour, named

MARGIN = 0.02  # share of the total that may stay away: other programs live here, too
WELL_ABOVE = 2.0  # times `low`: what is enough for a start below the level of before
STILL = 0.01  # share of the total: a change of less is none
STILL_ASKED = 2.0  # seconds without a change: before a start that a person asked for,
STILL_HELD = 5.0  # before one below the level of before, where the missing memory is seen in other programs' hands,
STILL_UNSEEN = 30.0  # and where it is not


@dataclass(frozen=True, slots=True)
class Open:
    """The engine may start; `note`: below the level of before, and what holds the rest."""

    note: str = ""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Not yet; `sentence` says what is waited for."""

    sentence: str


@dataclass(frozen=True, slots=True)
class TooLittle:
    """It did not come back in time; `lost`: there was more before the last engine, and nobody is seen to hold it."""

    sentence: str
    lost: bool


@dataclass(frozen=True, slots=True)
class Stillness:
    """Since when the memory available has been what it is, give or take `STILL`."""

    available: int
    since: float


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait, from `since` to `until`. `before`: available before the last engine, None: no engine yet.

    `asked`: a person asked for this start when memory had had its time; `neighbours`: the largest other programs.
    """

    since: float
    until: float
    before: int | None = None
    asked: bool = False
    neighbours: Sequence[Neighbour] = ()


def follow(known: Stillness | None, reading: Reading) -> Stillness:
    """Take one look."""
    if known is not None and abs(reading.available - known.available) <= STILL * reading.total:
        return known
    return Stillness(reading.available, reading.at)


def wanted(total: int, before: int | None, policy: GuardPolicy) -> int:
    """Return how many bytes have to be available; `before` is what was there before the last engine, None: no engine yet."""
    low = policy.low_bytes(total)
    return low if before is None else max(low, before - int(MARGIN * total))


def decide(reading: Reading, wait: Wait, still: Stillness, policy: GuardPolicy) -> Open | Waiting | TooLittle:
    """Decide about a start at the moment of `reading`; `still` holds it already."""
    want = wanted(reading.total, None if wait.asked else wait.before, policy)
    over = reading.at >= wait.until
    stood = reading.at - still.since
    if reading.available >= want and (not wait.asked or over or stood >= STILL_ASKED):
        return Open()
    missing = want - reading.available
    held = sum(one.size for one in wait.neighbours) >= missing / 2
    enough = reading.available >= WELL_ABOVE * policy.low_bytes(reading.total)
    if enough and (over or stood >= (STILL_HELD if held else STILL_UNSEEN)):
        return Open(f"{_numbers(reading, wait, want)}; it starts with that{_holders(wait, held=held)}")
    if not over:
        left = f"for {wait.until - reading.at:.0f} s at most"
        numbers = _numbers(reading, wait, want)
        return Waiting(f"waiting for memory before the engine starts: {numbers}; {left}{_holders(wait, held=held)}")
    lost = wait.before is not None and not wait.asked and not held
    remedy = "find what holds it, a reboot may be needed" if lost else "stop what uses it"
    numbers = f"within {wait.until - wait.since:.0f} s: {_numbers(reading, wait, want)}"
    return TooLittle(f"memory did not come back {numbers}{_holders(wait, held=held)}; {remedy}", lost)


def _numbers(reading: Reading, wait: Wait, want: int) -> str:
    if wait.before is None or wait.asked:
        why = f"the level memory.low of {gib(reading.total)}"
    else:
        why = f"{gib(wait.before)} before the last engine, less {gib(MARGIN * reading.total)}"
    return f"{gib(reading.available)} available, {gib(want)} wanted ({why})"


def _holders(wait: Wait, *, held: bool) -> str:
    if not wait.neighbours:
        return ""
    return f"; {'held' if held else 'in use'} by {named(wait.neighbours)}"
