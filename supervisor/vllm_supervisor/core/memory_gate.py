"""The launch gate: whether enough memory has come back for an engine to be started.

Rules:
* On unified memory a process that is gone has not given everything back yet, and a start into too little wedges the
  machine for good. So the wait is for a measured level, never for a time; it is bounded, and ends with the numbers.
* Wanted is what was available before the last engine, less a margin; before the first one, a machine above `low`.
Bytes and monotonic seconds. Sources: Blackwellboy/model-serving-minefield traps/memory/81, eugr/spark-vllm-docker/issues/257.
"""

from dataclasses import dataclass

from vllm_supervisor.core.memory import GuardPolicy, Reading, gib

MARGIN = 0.02  # share of the total that may stay away: other programs live here, too


@dataclass(frozen=True, slots=True)
class Open:
    """The engine may start."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Not yet; `sentence` says what is waited for."""

    sentence: str


@dataclass(frozen=True, slots=True)
class TooLittle:
    """It did not come back in time; `lost`: there was more before the last engine."""

    sentence: str
    lost: bool


def wanted(total: int, before: int | None, policy: GuardPolicy) -> int:
    """Return how many bytes have to be available; `before` is what was there before the last engine, None: no engine yet."""
    low = policy.low_bytes(total)
    return low if before is None else max(low, before - int(MARGIN * total))


def decide(
    reading: Reading, before: int | None, policy: GuardPolicy, *, since: float, until: float
) -> Open | Waiting | TooLittle:
    """Decide about a start at the moment of `reading`; the wait began at `since` and ends at `until`."""
    want = wanted(reading.total, before, policy)
    if reading.available >= want:
        return Open()
    why = (
        f"{gib(before)} before the last engine, less {gib(MARGIN * reading.total)}"
        if before is not None
        else f"the level memory.low of {gib(reading.total)}"
    )
    numbers = f"{gib(reading.available)} available, {gib(want)} wanted ({why})"
    if reading.at < until:
        return Waiting(
            f"waiting for memory before the engine starts: {numbers}; for {until - reading.at:.0f} s at most"
        )
    mend = "a reboot may be needed" if before is not None else "stop what uses it"
    sentence = f"memory did not come back within {until - since:.0f} s: {numbers}; find what holds it, {mend}"
    return TooLittle(sentence, before is not None)
