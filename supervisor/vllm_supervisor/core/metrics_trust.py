"""Whether the engine's metrics and beacons fit our own account; a source that contradicts it is not judged by.

Rules:
* Only an engine of ours is compared: all its work comes through our front door, so our ledgers know what it did.
* A counter of one process never falls, and one address has one start time: values that do come from several processes.
* Requests that completed through us moved some counter. Where all counters are 0 or missing one completed request is
  enough to say so; where they stand still `FROZEN_AFTER` are, because a cache before the engine may answer some.
* The metrics may be a moment late: only from the second read after a completion on is anything concluded.
* The same holds for the beacons' steps, which an unknown version of the engine might misreport.
* A source that was dropped stays dropped for the life of this engine, and the reason is told once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_supervisor.core.samples import BeaconSample, DoorSample, EngineSeries, MetricsSample

FROZEN_AFTER = 3  # completed requests without a move of any counter
READS = 2  # in which the counters have to have stood still

COUNTERS = ("iterations", "prompt_tokens", "output_tokens", "prefix_queries", "finished")


@dataclass(frozen=True, slots=True)
class Still:
    """How long the numbers of one source have stood still while requests completed through us."""

    at: int | None = None  # requests completed when the numbers last moved
    seen: int = 0  # requests completed at the last read
    reads: int = 0  # in a row without a move, since a request completed

    def after(self, served: int, *, moved: bool) -> "Still":
        """Return what holds after one more read."""
        at = served if moved or self.at is None else self.at
        # What completed after the last read may come late: only what had completed before it counts.
        return Still(at, served, 0 if moved or self.seen <= at else self.reads + 1)

    def contradicts(self, least: int) -> str:
        """Say that `least` requests or more completed without a move, or ""."""
        behind = self.seen - (self.seen if self.at is None else self.at)
        if self.reads < READS or behind < least:
            return ""
        return (
            f"although {behind} requests completed through us"
            if behind > 1
            else "although a request completed through us"
        )


@dataclass(frozen=True, slots=True)
class Trust:
    """What is remembered of one engine's sources. `dropped`, `beacons_dropped`: why they are not believed, or ""."""

    dropped: str = ""
    beacons_dropped: str = ""
    counted: bool = False  # some counter was above 0: these series can show progress
    series: tuple[EngineSeries, ...] = ()  # of the last good read
    still: Still = Still()
    steps: int | None = None  # steps with work of all beacons, at the last look
    beacons_still: Still = Still()


def compare(trust: Trust, metrics: MetricsSample | None, door: DoorSample | None, *, alternating: bool) -> Trust:
    """Return what is known after one look; `alternating`: start times came back after others."""
    if trust.dropped or door is None or metrics is None or metrics.fault is not None:
        return trust
    if alternating:
        return replace(trust, dropped="their start times alternate, as those of several processes do")
    if (fallen := _fallen(trust.series, metrics.engines)) is not None:
        return replace(trust, dropped=f"a counter fell ({fallen}), as none of one process does")
    counted = trust.counted or any((getattr(one, name) or 0.0) > 0 for one in metrics.engines for name in COUNTERS)
    still = trust.still.after(door.served, moved=_moved(trust.series, metrics.engines))
    trust = replace(trust, counted=counted, series=metrics.engines, still=still)
    behind = still.contradicts(FROZEN_AFTER if counted else 1)
    return replace(
        trust, dropped=f"all counters {'stand still' if counted else 'stay at 0'} {behind}" if behind else ""
    )


def compare_beacons(trust: Trust, beacons: Sequence[BeaconSample], door: DoorSample | None) -> Trust:
    """Do the same for the steps that the beacons report."""
    if trust.beacons_dropped or door is None or not beacons:
        return trust
    steps = sum(one.worked for one in beacons)
    still = trust.beacons_still.after(door.served, moved=steps != trust.steps)
    behind = still.contradicts(FROZEN_AFTER)
    return replace(
        trust, steps=steps, beacons_still=still, beacons_dropped=f"no step has ended {behind}" if behind else ""
    )


def _by_label(engines: Sequence[EngineSeries]) -> Mapping[str, EngineSeries]:
    return {one.engine: one for one in engines}


def _fallen(before: Sequence[EngineSeries], after: Sequence[EngineSeries]) -> str | None:
    known = _by_label(before)
    for one in after:
        last = known.get(one.engine)
        for name in COUNTERS if last is not None else ():
            old, new = getattr(last, name), getattr(one, name)
            if old is not None and new is not None and new < old:
                return f"{name.replace('_', ' ')}: {old:.0f}, then {new:.0f}"
    return None


def _moved(before: Sequence[EngineSeries], after: Sequence[EngineSeries]) -> bool:
    known = _by_label(before)
    for one in after:
        last = known.get(one.engine)
        for name in COUNTERS:
            if (getattr(one, name) or 0.0) > (0.0 if last is None else getattr(last, name) or 0.0):
                return True
    return False
