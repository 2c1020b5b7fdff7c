"""The stall clock of one engine, and of the server as a whole: demand without progress.

Rules:
* Progress of an engine is any of: a step with tokens ended (beacon); batches, prompt or output tokens, or prefix
  queries rose; a new maximum of KV usage since the last progress; a probe was answered; and, where no beacon tells
  better and there is one engine only, a byte of an answer. Steps without tokens are life of the loop, not progress.
* Demand is requests that run or wait in the engine, or a step with tokens that is open. For the whole server it is
  requests of ours at the engine, or a probe without an answer.
* The clock starts at the later of the last progress and the first demand since. Demand that leaves does not stop it
  (clients of a hung engine time out and come again); only a long time without any demand does.
* How much of the clock's time had demand is counted along, so that two short visits far apart are not read as one long
  wait.
"""

from dataclasses import dataclass, replace

from vllm_supervisor.core.samples import BeaconSample, EngineSeries

# Fewer computed tokens than one in two seconds, over a quarter of an hour, with work waiting and nothing finished:
# such an engine lives, and serves nobody. One long generation is two orders of magnitude above it.
STARVED_AFTER = 900.0
STARVED_TOKENS = 450.0
# A step without tokens within this time means that the engine's loop still turns.
LOOP_ALIVE = 60.0
# Without a beacon, and among several engines, a gauge that says "running" may be stale: some request must be silent.
SILENCE = 30.0

_COUNTERS = ("iterations", "prompt_tokens", "output_tokens", "prefix_queries")


@dataclass(frozen=True, slots=True)
class Track:
    """What is remembered of one engine between two ticks. Times are monotonic seconds."""

    progress_at: float  # of the last progress, or since when there could have been any
    moved_at: float | None = None  # of the last progress that was seen
    demand_at: float | None = None  # first demand since the last progress
    seen_at: float | None = None  # last demand seen
    demand_s: float = 0.0  # time with demand since the clock started
    updated_at: float = 0.0
    extended: bool = False  # the one extension for compilers was given
    open_now: bool = False  # demand is there that no gauge can feign
    open_at: float | None = None  # first such demand since the last progress
    open_s: float = 0.0  # time with such demand since then
    in_decode: bool = False
    starved_at: float = 0.0
    starved_tokens: float = 0.0
    starved_worked: float = 0.0
    starved_finished: float = 0.0
    kv_max: float = 0.0
    series: EngineSeries | None = None
    beacon: BeaconSample | None = None

    @property
    def clock(self) -> float | None:
        """Since when there has been demand without progress, or None."""
        return None if self.demand_at is None else max(self.progress_at, self.demand_at)

    def age(self, now: float) -> float:
        """How long there has been demand without progress, in seconds."""
        return 0.0 if self.clock is None else max(0.0, now - self.clock)

    @property
    def loop_turns(self) -> bool:
        """Whether the engine goes on making steps, with or without tokens (beacon only)."""
        return (
            self.beacon is not None
            and self.clock is not None
            and self.beacon.changed_at > max(self.updated_at - LOOP_ALIVE, self.clock)
        )

    @property
    def starved(self) -> bool:
        """Whether steps go on for long while next to nothing is computed and nothing finishes."""
        if self.updated_at - self.starved_at < STARVED_AFTER:
            return False
        return _worked(self.series, self.beacon) - self.starved_worked >= 2


def demand(track: Track, now: float, *, present: bool, open_since: float | None, since: float, gap: float) -> Track:
    """Move the clock of `track` by what is demanded now; `since` is when the demand began, if it began now.

    `open_since`: since when demand is there that no gauge can feign, or None. `gap`: after so many seconds without any
    demand the clock stops.
    """
    passed = now - track.updated_at if track.updated_at else 0.0
    open_now = present and open_since is not None
    if present:
        started = track.demand_at is None
        begun = max(since, track.progress_at) if track.demand_at is None else track.demand_at
        if open_since is not None and track.open_at is None:
            track = replace(track, open_at=max(begun, open_since, track.progress_at))
        elif open_now:
            track = replace(track, open_s=track.open_s + passed)
        return replace(
            track,
            demand_at=begun,
            seen_at=now,
            demand_s=0.0 if started else track.demand_s + passed,
            updated_at=now,
            open_now=open_now,
        )
    left = track.seen_at is None or now - track.seen_at > gap
    return replace(
        track,
        demand_at=None if left else track.demand_at,
        demand_s=0.0 if left else track.demand_s,
        extended=track.extended and not left,
        updated_at=now,
        open_now=False,
        open_at=None if left else track.open_at,
        open_s=0.0 if left else track.open_s,
    )


def progressed(track: Track, at: float) -> Track:
    """Stop the clock: there was progress at `at`."""
    return replace(
        track,
        progress_at=max(at, track.progress_at),
        moved_at=at,
        demand_at=None,
        seen_at=None,
        demand_s=0.0,
        open_at=None,
        open_s=0.0,
        extended=False,
        kv_max=track.series.kv_usage or 0.0 if track.series is not None else 0.0,
    )


def void(track: Track, now: float) -> Track:
    """Start every timer anew: what happened until now was not watched, or was meant to be."""
    return replace(
        track,
        progress_at=now,
        demand_at=None,
        seen_at=None,
        demand_s=0.0,
        open_at=None,
        open_s=0.0,
        starved_at=now,
        extended=False,
        updated_at=now,
    )


def observe(
    track: Track | None,
    now: float,
    series: EngineSeries | None,
    beacon: BeaconSample | None,
    *,
    alone_byte_at: float | None,
    answered_at: float | None,
    silent_since: float | None,
    finished: float | None,
    gap: float,
) -> Track:
    """Take one look at an engine.

    `series` None: not read this time. `alone_byte_at`: last byte of an answer, if there is one engine only.
    `answered_at`: last answer to a probe that proves something for this engine. `silent_since`: since when a gauge that
    says "running" can be believed, or None. `finished`: requests that have completed, of a better source than `series`.
    """
    if track is None or (beacon is not None and track.beacon is not None and beacon.pid != track.beacon.pid):
        track = Track(progress_at=now, updated_at=now, starved_at=now)
        track = _anchor(replace(track, series=series, beacon=beacon), now, finished)
        track = replace(track, kv_max=series.kv_usage or 0.0 if series is not None else 0.0)
    else:
        at = _progress(track, now, series, beacon, alone_byte_at=alone_byte_at, answered_at=answered_at)
        track = replace(track, series=series or track.series, beacon=beacon)
        if at is not None:
            track = progressed(track, at)
        elif series is not None and series.kv_usage is not None:
            track = replace(track, kv_max=max(track.kv_max, series.kv_usage))
    running, waiting = counts(track)
    exact = beacon is not None
    present = bool(running or waiting) or (beacon is not None and beacon.open_tokens > 0)
    if (
        not waiting
        or _finished(track, finished) > track.starved_finished
        or _tokens(track.series, track.beacon) - track.starved_tokens >= STARVED_TOKENS
    ):
        track = _anchor(track, now, finished)
    track = replace(track, in_decode=beacon.in_decode if beacon is not None else False)
    return demand(track, now, present=present, open_since=now if exact else silent_since, since=now, gap=gap)


def counts(track: Track) -> tuple[float | None, float | None]:
    """Return (running, waiting): the beacon's, which are exact, else the gauges."""
    if track.beacon is not None:
        return float(track.beacon.running), float(track.beacon.waiting)
    if track.series is not None:
        return track.series.running, track.series.waiting
    return None, None


def fell(before: EngineSeries | None, after: EngineSeries) -> bool:
    """Say whether a counter went backwards, as it does when its process began a new life."""
    if before is None:
        return False
    for name in (*_COUNTERS, "finished"):
        old, new = getattr(before, name), getattr(after, name)
        if old is not None and new is not None and new < old:
            return True
    return False


def _progress(
    track: Track,
    now: float,
    series: EngineSeries | None,
    beacon: BeaconSample | None,
    *,
    alone_byte_at: float | None,
    answered_at: float | None,
) -> float | None:
    """Return when there was progress since the last look, or None."""
    if answered_at is not None and answered_at > track.progress_at:
        return answered_at
    if beacon is not None and beacon.worked_at > track.progress_at:
        return beacon.worked_at
    if beacon is None and alone_byte_at is not None and alone_byte_at > track.progress_at:
        return alone_byte_at
    if series is not None and track.series is not None:
        for name in _COUNTERS:
            old, new = getattr(track.series, name), getattr(series, name)
            # A counter that appears has counted something: vLLM makes some of them with the first request.
            if new is not None and new > (old or 0.0):
                return now
        if series.kv_usage is not None and series.kv_usage > track.kv_max:
            return now
    return None


def _anchor(track: Track, now: float, finished: float | None) -> Track:
    return replace(
        track,
        starved_at=now,
        starved_tokens=_tokens(track.series, track.beacon),
        starved_worked=_worked(track.series, track.beacon),
        starved_finished=_finished(track, finished),
    )


def _tokens(series: EngineSeries | None, beacon: BeaconSample | None) -> float:
    if beacon is not None:
        return float(beacon.tokens)
    return series.output_tokens or 0.0 if series is not None else 0.0


def _worked(series: EngineSeries | None, beacon: BeaconSample | None) -> float:
    if beacon is not None:
        return float(beacon.worked)
    return series.iterations or 0.0 if series is not None else 0.0


def _finished(track: Track, finished: float | None) -> float:
    if track.series is not None and track.series.finished is not None:
        return track.series.finished
    return finished or 0.0
