"""What the rules of the verdict look at: one tick put together, the waits that hold in it, and what counts as proof.

Rules:
* The quick waits hold only for an open step of decode size that a beacon shows, long enough after ready, and with no
  call of an operator on the engine's loop; in every other case the slow ones do.
* Proof is a clock whose waits are over, with demand that no gauge can feign for as long, and there through at least half
  of it; or with a probe that failed, or with a probe that has been out for the full waits itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_supervisor.core.progress import Track
from vllm_supervisor.core.samples import MetricsSample, Observation
from vllm_supervisor.core.words import Verdict

# An engine of which nothing is known but that it computes: prompts on a slow CPU take half an hour and more in silence.
# Where anything better is known CPU time proves nothing, because a hung engine spins.
SILENT_WORK = 3600.0
# A failing engine that cannot be probed is tried by users' requests at least this often, in seconds.
LONGEST_TRIAL = 600.0
_DOUBLINGS = 32

Value = str | float | bool | None


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """The waits of the judgement, in seconds; each pair is two looks in a row before `stuck` may be said."""

    waits: tuple[float, float] = (150.0, 150.0)
    waits_slow: tuple[float, float] = (360.0, 360.0)
    compile_extension: float = 600.0
    failing_after: float = 30.0
    settle: float = 600.0  # what stops this soon after ready may be a kernel's first compile: the slow waits count

    @property
    def late_limit(self) -> float:
        """How late our own tick may be before nothing measured across it counts."""
        return max(2.0, self.waits[0] / 10)


@dataclass(frozen=True, slots=True)
class Errors:
    """The row of errors of the engine, as a circuit breaker counts it, for an engine that cannot be probed.

    After the last error requests are let in again, as a trial: at first `failing_after` later, and after each trial that
    failed twice as long, up to `LONGEST_TRIAL`. A request that succeeds ends the row.
    """

    count: int = 0
    at: float = 0.0  # when the last one was seen
    trials: int = 0  # that failed

    def wait(self, failing_after: float) -> float:
        """How long after the last error a trial begins, in seconds."""
        return max(failing_after, min(LONGEST_TRIAL, failing_after * 2.0 ** min(self.trials, _DOUBLINGS)))

    def on_trial(self, now: float, failing_after: float) -> bool:
        """Whether requests are let in just now to see if the engine is well again."""
        return self.count > 0 and now - self.at >= self.wait(failing_after)

    def after(self, count: int, now: float, failing_after: float) -> "Errors":
        """Return what holds when the row has `count` errors."""
        if count == 0:
            return Errors()
        if count == self.count:
            return self
        return Errors(count, now, self.trials + self.on_trial(now, failing_after))


@dataclass(frozen=True, slots=True)
class Situation:
    """One tick, put together: what was seen, the clocks as they stand, and what is known of the life that is judged."""

    seen: Observation
    policy: HealthPolicy
    tracks: Mapping[str, Track]  # by engine label
    whole: Track
    metrics: MetricsSample | None  # the last read, whatever it gave
    running: float | None
    waiting: float | None
    tokens_per_s: float | None
    steps_per_s: float | None
    alternating: bool
    unproven: bool  # counters began a new life, and nothing has been answered since
    computes: bool  # the engine's processes have used CPU time lately
    pardoned_5xx: int  # errors in a row that a later answered probe has outweighed
    counted: bool = True  # some counter of the metrics has been above 0, or nobody can say that one should be
    errors: Errors = field(default_factory=Errors)
    dropped: str = ""  # why the metrics are not believed, or ""
    beacons_dropped: str = ""  # the same of the beacons

    @property
    def now(self) -> float:
        """The time of the observation."""
        return self.seen.at

    @property
    def source(self) -> str:
        """What the verdict rests on."""
        if self.seen.beacons:
            return "beacon"
        if self.metrics is not None and self.metrics.fault is None:
            return "metrics"
        return "front door" if self.seen.door is not None else "nothing"

    def waits_for(self, track: Track) -> tuple[float, float]:
        """Return the waits that hold for a track just now."""
        ready_at, door = self.seen.ready_at, self.seen.door
        settled = ready_at is None or track.clock is None or track.clock - ready_at >= self.policy.settle
        calm = door is None or door.admin_calls == 0
        return self.policy.waits if track.in_decode and settled and calm else self.policy.waits_slow

    def needed(self, track: Track) -> float:
        """Return how long a track may show demand without progress before it is proof."""
        total = sum(self.waits_for(track)) + (self.policy.compile_extension if track.extended else 0.0)
        silent = self.source == "front door" or (self.source == "metrics" and not self.counted)
        return max(total, SILENT_WORK) if self.computes and silent else total

    def expired(self, track: Track) -> bool:
        """Whether the waits of a track are over."""
        return track.clock is not None and track.age(self.now) >= self.needed(track)

    def proven(self, track: Track) -> bool:
        """Whether the waits are over and the demand through them is beyond doubt."""
        if not self.expired(track) or track.clock is None:
            return False
        needed, probe = self.needed(track), self.seen.probe
        if (
            track.open_now
            and track.open_at is not None
            and self.now - track.open_at >= needed
            and track.open_s >= needed / 2
        ):
            return True
        if probe.failed_at is not None and probe.failed_at > track.clock:
            return True
        return probe.sent_at is not None and self.now - probe.sent_at >= needed

    def all_tracks(self) -> list[tuple[str, Track]]:
        """Return the engines' tracks and the whole server's, with a name for people."""
        several = len(self.tracks) > 1
        named = [(f"engine {label}" if several and label else "the engine", t) for label, t in self.tracks.items()]
        return [*named, ("the server", self.whole)]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found. `confirmed`: it is proven, and the engine may be restarted for it."""

    verdict: Verdict
    sentence: str
    evidence: dict[str, Value] = field(default_factory=dict)
    confirmed: bool = False
    wants_probe: bool = False
