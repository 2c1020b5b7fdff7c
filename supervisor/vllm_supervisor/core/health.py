"""The classifier: fold what was seen at one tick into what is remembered, and say what the engine is.

Rules:
* `judge` is a function of (memory, observation, policy). It costs the same for every tick, keeps no window but the
  clocks and the last samples, and does nothing: acting on a verdict, and logging one, is its caller's part.
* Verdicts are per engine label; one hung engine among healthy ones is a hang. The order of the verdicts is a table
  (`health_rules.RULES`), the clocks are in `progress`.
* Two lives are never compared: another incarnation, another start time, or counters that fell where no start time says
  otherwise, begin a new memory and ask for an answer. Start times that come back after another one mean a proxy.
* Metrics that contradict our own account (`metrics_trust`) are left out, and named in the judgement.
* A tick that came late, a suspended machine, sleep and pause void every timer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vllm_supervisor.core import metrics_trust, progress
from vllm_supervisor.core.health_rules import find
from vllm_supervisor.core.metrics_trust import Trust
from vllm_supervisor.core.progress import Track
from vllm_supervisor.core.samples import EngineSeries, MetricsSample, Observation, ScrapeFault
from vllm_supervisor.core.situation import Errors, Finding, HealthPolicy, Situation, Value
from vllm_supervisor.core.words import Verdict

# How many changes of the start time are remembered to tell a restart from two backends behind one address.
STARTS_KEPT = 4
# Half a core between two looks is work; and work that rests for less than a minute has not ended.
WORK, RESTS = 0.5, 60.0


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the engine is just now, and what that rests on. Times are monotonic seconds, rates are a second.

    `confirmed`: proven, and a reason to restart (`stuck`, `failing`). `wants_probe`: an answer would help.
    `restarted`: at this tick counters began a new life. `progress_at`: the last progress that was seen, of the engine
    with demand that waits longest for one; None before there was any.
    """

    at: float
    verdict: Verdict
    sentence: str
    evidence: Mapping[str, Value]
    since: float
    source: str
    confirmed: bool
    wants_probe: bool
    restarted: bool
    running: float | None
    waiting: float | None
    tokens_per_s: float | None
    steps_per_s: float | None
    progress_at: float | None
    dropped: str = ""  # why the metrics are not believed, or ""
    beacons_dropped: str = ""  # the same of the beacons


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered between two ticks; empty at the start of a run, and of a `check`."""

    incarnation: int | None = None
    tracks: Mapping[str, Track] = field(default_factory=dict)
    whole: Track | None = None
    metrics: MetricsSample | None = None
    completions: int = 0
    starts: tuple[float, ...] = ()
    trust: Trust = field(default_factory=Trust)
    unproven: bool = False
    pardoned_5xx: int = 0
    errors: Errors = field(default_factory=Errors)
    verdict: Verdict | None = None
    since: float = 0.0
    cpu: tuple[float, float] | None = None  # (at, total)
    computed_at: float | None = None
    tokens: tuple[float, float] | None = None
    steps: tuple[float, float] | None = None
    tokens_per_s: float | None = None
    steps_per_s: float | None = None


def judge(memory: Memory, seen: Observation, policy: HealthPolicy) -> tuple[Memory, Judgement]:
    """Return the memory after this tick and what is to be said at it."""
    before = memory
    memory, restarted = _lives(memory, seen)
    memory, seen = _believed(memory, seen)
    if seen.late > policy.late_limit:
        memory = _void(memory, seen.at)
    tracks = _tracks(memory, seen, policy)
    whole = _whole(memory, seen, policy, tracks)
    answered = memory.whole is not None and (seen.probe.answered_at or 0.0) > memory.whole.updated_at
    moved = memory.whole is not None and whole.progress_at > memory.whole.updated_at
    memory = replace(
        memory,
        incarnation=seen.incarnation,
        tracks=tracks,
        whole=whole,
        metrics=seen.metrics or memory.metrics,
        completions=seen.door.completions if seen.door is not None else 0,
        unproven=memory.unproven and not answered and not moved,
        pardoned_5xx=_pardoned(memory, seen, answered=answered),
        errors=memory.errors.after(0 if seen.door is None else seen.door.engine_5xx, seen.at, policy.failing_after),
    )
    memory = _rates(_cpu(memory, seen), seen)
    memory, situation, finding = _find(memory, seen, policy)
    if finding.verdict in {Verdict.ASLEEP, Verdict.PAUSED, Verdict.STARTING}:
        memory = _void(memory, seen.at)
    holds_on = finding.verdict is before.verdict and seen.incarnation == before.incarnation
    since = before.since if holds_on else seen.at
    memory = replace(memory, verdict=finding.verdict, since=since)
    slowest = min([*tracks.values(), whole], key=lambda track: (track.clock is None, track.progress_at))
    return memory, Judgement(
        at=seen.at,
        verdict=finding.verdict,
        sentence=finding.sentence,
        evidence=_evidence(situation) | finding.evidence,
        since=since,
        source=situation.source,
        confirmed=finding.confirmed,
        wants_probe=finding.wants_probe,
        restarted=restarted,
        running=situation.running,
        waiting=situation.waiting,
        tokens_per_s=situation.tokens_per_s,
        steps_per_s=situation.steps_per_s,
        progress_at=slowest.moved_at,
        dropped=memory.trust.dropped,
        beacons_dropped=memory.trust.beacons_dropped,
    )


def _find(memory: Memory, seen: Observation, policy: HealthPolicy) -> tuple[Memory, Situation, Finding]:
    """Ask the rules; where the waits are just over and compilers run, extend the clock once before asking."""
    situation = _situation(memory, seen, policy)
    if seen.processes is not None and seen.processes.compilers > 0:
        tracks = {
            label: replace(track, extended=True) if situation.expired(track) else track
            for label, track in memory.tracks.items()
        }
        whole = situation.whole
        if situation.expired(whole):
            whole = replace(whole, extended=True)
        memory = replace(memory, tracks=tracks, whole=whole)
        situation = _situation(memory, seen, policy)
    return memory, situation, find(situation)


def _situation(memory: Memory, seen: Observation, policy: HealthPolicy) -> Situation:
    running, waiting = _sums(memory.tracks)
    return Situation(
        seen=seen,
        policy=policy,
        tracks=memory.tracks,
        whole=memory.whole or Track(progress_at=seen.at),
        metrics=memory.metrics,
        running=running,
        waiting=waiting,
        tokens_per_s=memory.tokens_per_s,
        steps_per_s=memory.steps_per_s,
        alternating=not memory.trust.dropped and _alternates(memory.starts),
        dropped=memory.trust.dropped,
        beacons_dropped=memory.trust.beacons_dropped,
        counted=memory.trust.counted or seen.door is None,
        unproven=memory.unproven,
        computes=memory.computed_at is not None and seen.at - memory.computed_at < RESTS,
        pardoned_5xx=memory.pardoned_5xx,
        errors=memory.errors,
    )


# -- lives -----------------------------------------------------------------------------------------------------------


def _lives(memory: Memory, seen: Observation) -> tuple[Memory, bool]:
    """Begin a new memory where a new life began; the second value says whether counters showed it."""
    if memory.incarnation is not None and seen.incarnation != memory.incarnation:
        return Memory(verdict=memory.verdict, since=memory.since), False
    metrics = seen.metrics
    if metrics is None or metrics.fault is not None:
        return memory, False
    start = metrics.process_start
    if start is not None and memory.starts and start != memory.starts[-1]:
        starts = (*memory.starts, start)[-STARTS_KEPT:]
        fresh = Memory(verdict=memory.verdict, since=memory.since, starts=starts, trust=memory.trust, unproven=True)
        if seen.incarnation is not None and _alternates(starts):
            return replace(fresh, incarnation=memory.incarnation, unproven=False), False
        return fresh, True
    if start is not None and not memory.starts:
        memory = replace(memory, starts=(start,))
    if start is None and seen.incarnation is None and _fell(memory, metrics):
        return Memory(verdict=memory.verdict, since=memory.since, unproven=True), True
    return memory, False


def _believed(memory: Memory, seen: Observation) -> tuple[Memory, Observation]:
    """Compare the metrics with our own account; what does not fit it is taken out of memory and observation."""
    if seen.incarnation is None:
        return memory, seen
    trust = metrics_trust.compare(memory.trust, seen.metrics, seen.door, alternating=_alternates(memory.starts))
    if trust.dropped and not memory.trust.dropped:
        tracks = {
            label: replace(track, series=None) for label, track in memory.tracks.items() if track.beacon is not None
        }
        memory = replace(memory, tracks=tracks, metrics=None, tokens=None, tokens_per_s=None)
    trust = metrics_trust.compare_beacons(trust, seen.beacons, seen.door)
    if trust.beacons_dropped:
        if not memory.trust.beacons_dropped:
            memory = replace(memory, tracks={}, steps=None, steps_per_s=None)
        seen = replace(seen, beacons=())
    if trust.dropped and seen.metrics is not None and seen.metrics.fault is None:
        seen = replace(seen, metrics=MetricsSample(seen.at, fault=ScrapeFault.CONTRADICTED))
    return replace(memory, trust=trust), seen


def _fell(memory: Memory, metrics: MetricsSample) -> bool:
    for series in metrics.engines:
        track = memory.tracks.get(series.engine)
        if track is not None and progress.fell(track.series, series):
            return True
    return False


def _alternates(starts: tuple[float, ...]) -> bool:
    """Say whether a start time came back after another one: no process does that."""
    return len(set(starts)) < len(starts)


def _void(memory: Memory, now: float) -> Memory:
    return replace(
        memory,
        tracks={label: progress.void(track, now) for label, track in memory.tracks.items()},
        whole=progress.void(memory.whole, now) if memory.whole is not None else None,
    )


# -- clocks ----------------------------------------------------------------------------------------------------------


def _tracks(memory: Memory, seen: Observation, policy: HealthPolicy) -> dict[str, Track]:
    series: dict[str, EngineSeries] = {one.engine: one for one in seen.metrics.engines} if seen.metrics else {}
    beacons = {one.engine: one for one in seen.beacons}
    labels = sorted({*memory.tracks, *series, *beacons})
    if seen.metrics is not None and seen.metrics.fault is None:
        # An engine that neither the metrics nor a beacon know any more has gone, and its last gauges with it.
        labels = [label for label in labels if label in series or label in beacons]
    if beacons and "" in labels:
        # Metrics from before the label existed belong to the one engine there is.
        labels.remove("")
        if len(beacons) == 1 and "" in series:
            series = {next(iter(beacons)): series[""]}
    alone = len(labels) == 1
    blind = (seen.metrics or memory.metrics or MetricsSample(seen.at)).fault is not None
    door = seen.door
    tracks = {}
    for label in labels:
        beacon = beacons.get(label)
        silent = seen.at if door is None else door.silent_since
        if silent is not None and door is not None and not alone:
            silent = silent if seen.at - silent >= min(progress.SILENCE, policy.waits_slow[0]) else None
        tracks[label] = progress.observe(
            memory.tracks.get(label),
            seen.at,
            series.get(label),
            beacon,
            alone_byte_at=door.last_byte_at if alone and door is not None else None,
            # Of several engines a probe reaches one, and says nothing of one whose beacon tells better.
            answered_at=seen.probe.answered_at if alone or beacon is None else None,
            silent_since=None if blind else silent,
            finished=float(door.completions) if door is not None else None,
            gap=policy.waits_slow[0],
        )
    return tracks


def _whole(memory: Memory, seen: Observation, policy: HealthPolicy, tracks: Mapping[str, Track]) -> Track:
    """Take one look at the server as a whole: whether our requests, or our probe, get anything back."""
    now, door, probe = seen.at, seen.door, seen.probe
    whole = memory.whole or Track(progress_at=now, updated_at=now, starved_at=now)
    moments = [track.progress_at for track in tracks.values()]
    if door is not None:
        moments += [door.last_byte_at or 0.0]
        if memory.whole is not None and door.completions > memory.completions:
            moments.append(now)
    moments.append(probe.answered_at or 0.0)
    latest = max(moments)
    if latest > whole.progress_at:
        whole = progress.progressed(whole, latest)
    users = door is not None and door.at_engine > 0
    since = now if users or probe.sent_at is None else probe.sent_at
    present = users or probe.sent_at is not None
    whole = replace(whole, starved_at=now)
    return progress.demand(
        whole, now, present=present, open_since=now if users else None, since=since, gap=policy.waits_slow[0]
    )


# -- what else is remembered -----------------------------------------------------------------------------------------


def _pardoned(memory: Memory, seen: Observation, *, answered: bool) -> int:
    if seen.door is None or seen.door.engine_5xx == 0:
        return 0
    return seen.door.engine_5xx if answered else min(memory.pardoned_5xx, seen.door.engine_5xx)


def _sums(tracks: Mapping[str, Track]) -> tuple[float | None, float | None]:
    both = [progress.counts(track) for track in tracks.values()]
    running = [value for value, _ in both if value is not None]
    waiting = [value for _, value in both if value is not None]
    return (sum(running) if running else None), (sum(waiting) if waiting else None)


def _cpu(memory: Memory, seen: Observation) -> Memory:
    """Note when the engine's processes last used CPU time."""
    if seen.processes is None:
        return memory
    parts = (seen.processes.api_cpu, seen.processes.core_cpu, seen.processes.worker_cpu)
    total = sum(part for part in parts if part is not None)
    last, computed_at = memory.cpu, memory.computed_at
    if last is not None and seen.at > last[0] and (total - last[1]) / (seen.at - last[0]) >= WORK:
        computed_at = seen.at
    return replace(memory, cpu=(seen.at, total), computed_at=computed_at)


def _rates(memory: Memory, seen: Observation) -> Memory:
    """Update the rates from totals: output tokens of the metrics, steps of the beacon, each else the other's."""
    series = seen.metrics.engines if seen.metrics is not None else ()
    outputs = [one.output_tokens for one in series if one.output_tokens is not None]
    if outputs:
        memory = _rate_of(memory, "tokens", seen.at, sum(outputs))
    elif seen.beacons and (memory.metrics is None or memory.metrics.fault is not None):
        memory = _rate_of(memory, "tokens", seen.at, float(sum(one.tokens for one in seen.beacons)))
    iterations = [one.iterations for one in series if one.iterations is not None]
    if seen.beacons:
        return _rate_of(memory, "steps", seen.at, float(sum(one.worked for one in seen.beacons)))
    return _rate_of(memory, "steps", seen.at, sum(iterations)) if iterations else memory


def _rate_of(memory: Memory, name: str, at: float, total: float) -> Memory:
    last: tuple[float, float] | None = getattr(memory, name)
    rate = None
    if last is not None and at > last[0] and total >= last[1]:
        rate = (total - last[1]) / (at - last[0])
    if name == "tokens":
        return replace(memory, tokens=(at, total), tokens_per_s=rate)
    return replace(memory, steps=(at, total), steps_per_s=rate)


def _evidence(s: Situation) -> dict[str, Value]:
    """Return the numbers that stand beside every verdict."""
    seen, door, metrics = s.seen, s.seen.door, s.metrics
    dropped = {"metrics_dropped": s.dropped, "beacons_dropped": s.beacons_dropped}
    facts: dict[str, Value] = {
        **{name: why for name, why in dropped.items() if why},
        "source": s.source,
        "running": s.running,
        "waiting": s.waiting,
        "scrape": None if metrics is None else metrics.fault.value if metrics.fault is not None else "ok",
        "engines": len(s.tracks),
    }
    for label, track in s.tracks.items():
        if track.beacon is not None:
            prefix = f"engine_{label}_" if len(s.tracks) > 1 else ""
            facts[f"{prefix}steps_begun"] = track.beacon.begun
            facts[f"{prefix}steps_ended"] = track.beacon.ended
            facts[f"{prefix}last_work_s"] = round(seen.at - track.beacon.worked_at, 1)
    if door is not None:
        facts |= {"in_flight": door.in_flight, "at_engine": door.at_engine}
        facts["last_byte_s"] = None if door.last_byte_at is None else round(seen.at - door.last_byte_at, 1)
    if seen.processes is not None:
        facts["compilers"] = seen.processes.compilers
    if seen.probe.sent_at is not None:
        facts["probe_s"] = round(seen.at - seen.probe.sent_at, 1)
    return facts
