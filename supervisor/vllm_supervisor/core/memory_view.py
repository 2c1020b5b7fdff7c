"""What status, metrics and incidents show of the machine's memory, as plain values.

Rules:
* `available_bytes`, `floor_bytes` and `pressure` are always there; where nothing is guarded the last two are null.
* A value that is not known is null in the status and left out of the metrics, never 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_supervisor.core.memory import GuardPolicy, GuardState, Level, Reading, slope, time_to_floor
from vllm_supervisor.core.memory_mode import Mode

LOOKS_SHOWN = 60  # of an incident's minute: one a second


@dataclass(frozen=True, slots=True)
class MemoryPicture:
    """One moment. `state` None: nobody guards. `minimum`: lowest since the engine was started. `history`: (at, available)."""

    mode: Mode | None
    policy: GuardPolicy
    reading: Reading | None
    state: GuardState | None = None
    minimum: int | None = None
    waiting: str | None = None
    history: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryNumbers:
    """What metrics show. Bytes, bytes a second, percent; None is not known."""

    level: Level
    available: int
    floor: int
    minimum: int | None
    slope: float | None
    stalled: float | None


def status(picture: MemoryPicture, now: float) -> dict[str, Any]:
    """Return the `memory` part of the status. Bytes, seconds, percent."""
    reading, state, policy = picture.reading, picture.state, picture.policy
    shown: dict[str, Any] = {
        "available_bytes": None if reading is None else reading.available,
        "floor_bytes": None,
        "pressure": None,
        "guard": None if picture.mode is None else picture.mode.sentence,
    }
    if reading is None or state is None:
        return shown
    rate, left = slope(state), time_to_floor(state, reading, policy)
    return shown | {
        "floor_bytes": policy.floor_bytes(reading.total),
        "pressure": state.level.value,
        "low_bytes": policy.low_bytes(reading.total),
        "total_bytes": reading.total,
        "free_bytes": reading.free,
        "cached_bytes": reading.cached,
        "swap_free_bytes": reading.swap_free,
        "minimum_bytes": picture.minimum,
        "slope_bytes_per_s": None if rate is None else round(rate),
        "time_to_floor_s": None if left is None else round(left, 1),
        "stalled_percent": reading.stalled,
        "oom_kills": reading.oom_kills,
        "waiting_for": picture.waiting,
        "history": [{"ago_s": round(now - at), "available_bytes": available} for at, available in picture.history],
    }


def numbers(picture: MemoryPicture) -> MemoryNumbers | None:
    """Return what metrics show of a guarded machine; None where nobody guards."""
    reading, state, policy = picture.reading, picture.state, picture.policy
    if reading is None or state is None:
        return None
    return MemoryNumbers(
        level=state.level,
        available=reading.available,
        floor=policy.floor_bytes(reading.total),
        minimum=picture.minimum,
        slope=slope(state),
        stalled=reading.stalled,
    )


def looks(readings: Sequence[Reading], now: float) -> list[dict[str, float | None]]:
    """Return a bundle's minute of looks, the last ten as they were and one a second before."""
    kept = [*readings[-10 - 4 * LOOKS_SHOWN : -10 : 4], *readings[-10:]]
    return [dict(_look(reading, now)) for reading in kept]


def _look(reading: Reading, now: float) -> Mapping[str, float | None]:
    return {
        "ago_s": round(now - reading.at, 2),
        "available_bytes": reading.available,
        "free_bytes": reading.free,
        "cached_bytes": reading.cached,
        "stalled_percent": reading.stalled,
    }
