"""What status, metrics and incidents show of the machine's memory, as plain values.

Rules:
* `available_bytes`, `floor_bytes` and `pressure` are always there; where nothing is guarded the last two are null.
* A value that is not known is null in the status and left out of the metrics, never 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_supervisor.core.health_metrics import Metric
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


def metrics(picture: MemoryPicture) -> list[Metric]:
    """Return the families of a guarded machine; none where nobody guards."""
    reading, state, policy = picture.reading, picture.state, picture.policy
    if reading is None or state is None:
        return []
    levels = tuple(({"level": level.value}, float(level is state.level)) for level in Level)
    return [
        *_gauge("memory_available_bytes", "MemAvailable of the machine.", reading.available),
        *_gauge("memory_floor_bytes", "At this level the engine is killed.", policy.floor_bytes(reading.total)),
        *_gauge("memory_minimum_bytes", "Lowest MemAvailable since the engine was started.", picture.minimum),
        *_gauge("memory_slope_bytes_per_second", "How MemAvailable changes; negative while it falls.", slope(state)),
        *_gauge(
            "memory_stalled_percent", "Share of time in which memory stalled everything (PSI full).", reading.stalled
        ),
        Metric("vllm_supervisor_memory_pressure", "gauge", "How memory stands: 1 for the current level.", levels),
    ]


def _gauge(name: str, text: str, value: float | None) -> list[Metric]:
    return [] if value is None else [Metric(f"vllm_supervisor_{name}", "gauge", text, (({}, float(value)),))]


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
