"""The memory guard: what one look at the machine's memory means, as a function of what was seen before it.

Rules:
* MemAvailable is the measure. A driver's allocations show in no process and no cgroup; page cache is not in the way.
* `floor` is the end of the engine: at or below it; within twice of it and so fast that the next look would find half of it
  gone (higher up a fall may be a KV cache taken in one go, which ends where it should); stalls (PSI full) below `low`; or
  a driver that says NV_ERR_NO_MEMORY while memory is tight: below `low` and not at rest there, or falling to the floor
  from just above it. By itself that line means nothing: it stands in successful starts, and on machines at rest.
* `low` closes admission, and acts only while memory falls: below the level `low`, or `horizon` seconds before the floor.
  When no new minimum comes for `steady` seconds the level is taken as normal for this machine, until it falls further.
* A look decides from numbers alone; the sentence is made afterwards, because the kill comes first.
Bytes and monotonic seconds. Sources of the figures: vllm-project/vllm/issues/56824 (29 → 2.5 GiB in 9 s, 23.8 → 6.3 GiB
in 5 s; the driver's message in three of three starts that succeeded), systemd-oomd (60 % of stall as the mark of a machine that gets nothing done).
"""

from dataclasses import dataclass, replace
from enum import StrEnum

GIB = 2**30


class Level(StrEnum):
    """How the machine's memory stands; public as `memory.pressure`."""

    NORMAL = "normal"
    LOW = "low"
    FLOOR = "floor"


class Crossing(StrEnum):
    """Which rule found the floor."""

    LEVEL = "level"
    FAST = "fast"
    STALLED = "stalled"
    DRIVER = "driver"


@dataclass(frozen=True, slots=True)
class Reading:
    """One look. `stalled` is PSI's full avg10 in percent; `driver_out` counts NV_ERR_NO_MEMORY lines since our start.

    What could not be read is None.
    """

    at: float
    total: int
    available: int
    free: int = 0
    cached: int = 0
    swap_free: int = 0
    swap_total: int = 0
    stalled: float | None = None
    oom_kills: int | None = None
    driver_out: int = 0


@dataclass(frozen=True, slots=True)
class GuardPolicy:
    """`floor` and `low` are shares of the total, from the configuration; the rest is fixed. Seconds, shares, percent."""

    floor: float = 0.06
    low: float = 0.09
    interval: float = 0.25  # between two looks
    horizon: float = 5.0  # a fall that reaches the floor within this counts as low
    hold: float = 5.0  # low lasts at least this long
    steady: float = 15.0  # without a new minimum for this long the level is the machine's normal one
    still: float = 0.001  # what counts as a new minimum while low
    further: float = 0.005  # how much more than the normal level must be gone to be low again
    stall: float = 60.0  # PSI full avg10 that counts as floor below the level `low`
    driver_counts: float = 5.0  # seconds for which the driver's NV_ERR_NO_MEMORY is evidence

    def floor_bytes(self, total: int) -> int:
        """The floor of a machine with `total` bytes."""
        return int(self.floor * total)

    def low_bytes(self, total: int) -> int:
        """Where low begins, never below the floor."""
        return int(max(self.low, self.floor) * total)

    def back_bytes(self, total: int) -> int:
        """Where low is over for certain: half the distance from floor to low above low."""
        low = self.low_bytes(total)
        return low + (low - self.floor_bytes(total)) // 2


# Looks the slope is taken over: two seconds at four looks a second.
_KEPT = 9
_FEWEST = 5


@dataclass(frozen=True, slots=True)
class GuardState:
    """What the guard remembers. `settled`: the level below `low` that was found to be this machine's normal one."""

    level: Level = Level.NORMAL
    crossing: Crossing | None = None
    since: float = 0.0  # when this level began
    recent: tuple[tuple[float, int], ...] = ()
    minimum: int = 0  # lowest since low began
    minimum_at: float = 0.0
    settled: int | None = None
    driver_out: int | None = None
    driver_at: float | None = None  # when the driver last said that it found no memory
    tight_at: float | None = None  # when memory was last low or about to be


def step(state: GuardState, reading: Reading, policy: GuardPolicy) -> GuardState:
    """Take one look; `level` and `crossing` of what is returned say what it means."""
    first = not state.recent
    said = state.driver_out is not None and reading.driver_out > state.driver_out
    state = replace(state, driver_out=reading.driver_out, driver_at=reading.at if said else state.driver_at)
    fast = _too_fast(state, reading, policy)
    state = replace(state, recent=(*state.recent[1 - _KEPT :], (reading.at, reading.available)))
    if not first and _tight(state, reading, policy):
        state = replace(state, tight_at=reading.at)
    crossing = _crossing(state, reading, policy, fast=fast)
    state = replace(state, crossing=crossing)
    if crossing is not None:
        return _enter(state, Level.FLOOR, reading)
    low, back = policy.low_bytes(reading.total), policy.back_bytes(reading.total)
    if first and reading.available <= low:
        state = replace(state, settled=reading.available)  # it was so before we came: it does not fall
    elif reading.available >= back:
        state = replace(state, settled=None)
    if state.level is Level.NORMAL:
        return _enter(state, Level.LOW, reading) if _falls(state, reading, policy) else state
    return _recovering(state, reading, policy)


def _crossing(state: GuardState, reading: Reading, policy: GuardPolicy, *, fast: bool) -> Crossing | None:
    """Say which rule finds the floor in a look that `state` holds already; `fast`: the next one would be too late."""
    if reading.available <= policy.floor_bytes(reading.total):
        return Crossing.LEVEL
    if fast:
        return Crossing.FAST
    said = state.driver_at is not None and reading.at - state.driver_at <= policy.driver_counts
    if said and state.tight_at == reading.at:
        return Crossing.DRIVER
    if reading.stalled is not None and reading.stalled >= policy.stall:
        return Crossing.STALLED if reading.available <= policy.low_bytes(reading.total) else None
    return None


def _too_fast(state: GuardState, reading: Reading, policy: GuardPolicy) -> bool:
    if not state.recent:
        return False
    floor = policy.floor_bytes(reading.total)
    at, available = state.recent[-1]
    fall = (available - reading.available) * min(1.0, policy.interval / max(reading.at - at, 1e-3))
    return fall > 0 and reading.available <= 2 * floor and reading.available - fall < floor / 2


def _tight(state: GuardState, reading: Reading, policy: GuardPolicy) -> bool:
    """Whether the driver's word would count: below low and not at rest there, or falling to the floor from just above."""
    if reading.available > policy.back_bytes(reading.total):
        return False
    left = time_to_floor(state, reading, policy)
    if left is not None and left <= policy.horizon:
        return True
    return _below_low(state, reading, policy)


def _below_low(state: GuardState, reading: Reading, policy: GuardPolicy) -> bool:
    """Whether memory is below low, and below what was found to be this machine's normal level there."""
    if reading.available > policy.low_bytes(reading.total):
        return False
    return state.settled is None or reading.available <= state.settled - policy.further * reading.total


def _falls(state: GuardState, reading: Reading, policy: GuardPolicy) -> bool:
    """Whether admission has to close now."""
    left = time_to_floor(state, reading, policy)
    if left is not None and left <= policy.horizon:
        return True
    return _below_low(state, reading, policy)


def _recovering(state: GuardState, reading: Reading, policy: GuardPolicy) -> GuardState:
    """Low or floor held; see whether that is over."""
    left = time_to_floor(state, reading, policy)
    falls = left is not None and left <= 2 * policy.horizon
    back = reading.available >= policy.back_bytes(reading.total)
    if state.level is Level.FLOOR:
        return _enter(state, Level.NORMAL if back and not falls else Level.LOW, reading)
    if reading.available < state.minimum - policy.still * reading.total:
        return replace(state, minimum=reading.available, minimum_at=reading.at)
    if falls or reading.at - state.since < policy.hold:
        return state
    if back:
        return _enter(state, Level.NORMAL, reading)
    if reading.at - state.minimum_at >= policy.steady:
        return _enter(replace(state, settled=reading.available), Level.NORMAL, reading)
    return state


def _enter(state: GuardState, level: Level, reading: Reading) -> GuardState:
    if state.level is level:
        return state
    return replace(state, level=level, since=reading.at, minimum=reading.available, minimum_at=reading.at)


def slope(state: GuardState) -> float | None:
    """Bytes a second over the last looks, negative while memory falls; None before there are enough of them."""
    if len(state.recent) < _FEWEST:
        return None
    (first_at, first), (last_at, last) = state.recent[0], state.recent[-1]
    return (last - first) / (last_at - first_at) if last_at > first_at else None


def time_to_floor(state: GuardState, reading: Reading, policy: GuardPolicy) -> float | None:
    """Seconds until the floor if the fall goes on; None while nothing falls."""
    rate = slope(state)
    if rate is None or rate >= 0:
        return None
    return max(0.0, (reading.available - policy.floor_bytes(reading.total)) / -rate)


def tell(state: GuardState, reading: Reading, policy: GuardPolicy) -> str:
    """Say why the level is what it is, with the numbers."""
    floor, low = policy.floor_bytes(reading.total), policy.low_bytes(reading.total)
    have = f"{gib(reading.available)} of {gib(reading.total)} available"
    rate = slope(state)
    falling = f", falling by {gib(-rate)} a second" if rate is not None and rate < 0 else ""
    match state.crossing:
        case Crossing.LEVEL:
            return f"memory reached the floor: {have}, floor {gib(floor)}{falling}"
        case Crossing.FAST:
            return f"memory falls too fast for another look: {have}, floor {gib(floor)}{falling}"
        case Crossing.STALLED:
            return f"memory stalls everything for {reading.stalled or 0:.0f} % of the time (PSI full): {have}"
        case Crossing.DRIVER:
            return (
                f"the GPU driver found no memory (NV_ERR_NO_MEMORY in the kernel log) while it is low: {have}{falling}"
            )
    if state.level is Level.LOW:
        return f"memory is low: {have}, low {gib(low)}, floor {gib(floor)}{falling}"
    return f"memory is back to normal: {have}"


def gib(size: float) -> str:
    """Write bytes for people."""
    return f"{size / GIB:.1f} GiB"
