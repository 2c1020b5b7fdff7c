"""The verdicts as a table: which situation is called what, in the order in which they are asked.

Rules:
* Each rule looks at one `Situation` and answers with a `Finding` or with None; the first answer is the verdict.
* `stuck` is only ever said on proof: demand that no gauge can feign was there, through all the waits, without progress;
  or a probe failed. Everything short of that is `suspect`, which changes nothing for users.
* Slow is neither idle nor dead; refused is not saturated; what an operator did on purpose is not a hang; steps that go
  on while nothing completes are `degraded`, which takes readiness and kills nothing.
* A finding's sentence is for people, its evidence is the numbers it rests on. Rules log nothing and change nothing.
"""

from collections.abc import Callable

from vllm_supervisor.core.progress import Track
from vllm_supervisor.core.samples import ScrapeFault
from vllm_supervisor.core.situation import Finding, Situation, Value
from vllm_supervisor.core.words import Verdict

# Engine-side errors in a row before `failing` is considered at all: one bad request is not a sick engine.
FAILING_COUNT = 3
# The same for probes, of which there is one a minute.
FAILING_PROBES = 2
# An engine that made progress this recently is not gone, whatever its listener says.
MOVES = 10.0
# So long without a byte for anybody, while somebody has been waiting as long: longer than one answer takes to be
# generated whole (an engine makes 100,000 tokens and more of one in this time).
UNDELIVERED_AFTER = 7200.0


def _dead(s: Situation) -> Finding | None:
    if s.seen.processes is not None and not s.seen.processes.alive:
        return Finding(Verdict.DEAD, "the engine's process is gone")
    return None


def _starting(s: Situation) -> Finding | None:
    if s.seen.ready_at is None:
        return Finding(Verdict.STARTING, "the engine is starting; a start is not judged by progress of steps")
    return None


def _alternating(s: Situation) -> Finding | None:
    if s.alternating:
        return Finding(
            Verdict.UNJUDGEABLE,
            "start times alternate between reads: a proxy stands in between; check the backends directly",
        )
    return None


def _refused(s: Situation) -> Finding | None:
    if s.metrics is None or s.metrics.fault is not ScrapeFault.REFUSED:
        return None
    moved = [track.moved_at for track in [*s.tracks.values(), s.whole] if track.moved_at is not None]
    if moved and s.now - max(moved) < MOVES:
        return None
    ours = s.seen.processes is not None
    known = "although its process lives" if ours else "at this address"
    return Finding(Verdict.UNREACHABLE, f"nobody listens {known}: not saturated, and not idle", wants_probe=ours)


def _asleep(s: Situation) -> Finding | None:
    if any(track.series is not None and track.series.asleep for track in s.tracks.values()):
        return Finding(Verdict.ASLEEP, "the engine was put to sleep; it makes no steps until it is woken")
    return None


def _paused(s: Situation) -> Finding | None:
    if s.seen.paused or any(track.beacon is not None and track.beacon.paused for track in s.tracks.values()):
        return Finding(Verdict.PAUSED, "the scheduler was paused; requests wait until it is resumed")
    return None


def _stuck(s: Situation) -> Finding | None:
    turns = any(track.loop_turns for track in s.tracks.values())
    for name, track in s.all_tracks():
        if s.proven(track) and not (track.loop_turns or (turns and track is s.whole)):
            age = track.age(s.now)
            return Finding(
                Verdict.STUCK,
                f"{name} has had work for {age:.0f} s without progress{_step(s, track)}",
                _clock(s, track, name),
                confirmed=True,
            )
    return None


def _failing(s: Situation) -> Finding | None:
    door, probe = s.seen.door, s.seen.probe
    if door is None or door.engine_5xx_since is None or door.engine_5xx - s.pardoned_5xx < FAILING_COUNT:
        return None
    since = max(door.engine_5xx_since, probe.answered_at or door.engine_5xx_since)
    if s.now - since < s.policy.failing_after or (door.last_success_at or 0.0) > since:
        return None
    failed = probe.failed_at is not None and probe.failed_at > since
    after = s.policy.failing_after
    evidence: dict[str, Value] = {"engine_5xx": door.engine_5xx, "failing_s": round(s.now - since, 1)}
    if not probe.possible and not failed:
        evidence |= {"failed_trials": s.errors.trials}
        if s.errors.on_trial(s.now, after):
            return Finding(
                Verdict.SUSPECT,
                f"{door.engine_5xx} requests in a row ended in an error of the engine, the last {s.now - s.errors.at:.0f} s "
                "ago; it cannot be probed, so requests are let in to see whether it is well again",
                evidence,
            )
        tail = f"it cannot be probed, so it is tried {s.errors.wait(after):.0f} s after the last error"
    else:
        tail = "and a probe failed as well" if failed else "a probe decides"
    return Finding(
        Verdict.FAILING,
        f"{door.engine_5xx} requests in a row ended in an error of the engine for {s.now - since:.0f} s; {tail}",
        evidence,
        confirmed=failed,
        wants_probe=not failed,
    )


def _probe_failed(s: Situation) -> Finding | None:
    if _probe_failures(s) == 0:
        return None
    return Finding(Verdict.SUSPECT, "a probe failed; the next one decides", wants_probe=True)


def _probes_fail(s: Situation) -> Finding | None:
    probe = s.seen.probe
    if probe.failing_since is None or _probe_failures(s) < FAILING_PROBES:
        return None
    age = s.now - probe.failing_since
    if age < s.policy.failing_after:
        return None
    return Finding(
        Verdict.FAILING,
        f"{probe.failures} probes in a row failed for {age:.0f} s, and no request succeeded in that time",
        {"probe_failures": probe.failures, "failing_s": round(age, 1)},
        confirmed=True,
    )


def _probe_failures(s: Situation) -> int:
    """Return how many probes failed in a row, with no user's request that succeeded since the first of them."""
    door, probe = s.seen.door, s.seen.probe
    if probe.failing_since is None:
        return 0
    return 0 if door is not None and (door.last_success_at or 0.0) > probe.failing_since else probe.failures


def _degraded(s: Situation) -> Finding | None:
    for name, track in s.all_tracks():
        if s.expired(track) and track.loop_turns:
            return Finding(
                Verdict.DEGRADED,
                f"{name} makes empty steps only: {_number(s.waiting)} waiting, nothing scheduled for "
                f"{track.age(s.now):.0f} s",
                _clock(s, track, name),
            )
        if track.starved and not s.expired(track):
            return Finding(
                Verdict.DEGRADED,
                f"{name} makes steps, but has completed nothing for {s.now - track.starved_at:.0f} s while "
                f"{_number(s.waiting)} wait",
                _clock(s, track, name) | {"nothing_completed_s": round(s.now - track.starved_at, 1)},
            )
    return _undelivered(s)


def _undelivered(s: Situation) -> Finding | None:
    door = s.seen.door
    if door is None or door.silent_since is None or s.expired(s.whole):
        return None
    silence = s.now - max(door.silent_since, door.last_byte_at or 0.0)
    if silence < UNDELIVERED_AFTER:
        return None
    return Finding(
        Verdict.DEGRADED,
        f"the engine works, but nobody has got a byte for {silence:.0f} s while {door.at_engine} wait for one",
        {"nothing_delivered_s": round(silence, 1)},
    )


def _blind(s: Situation) -> Finding | None:
    if s.source != "nothing":
        return None
    fault = s.metrics.fault if s.metrics is not None else None
    if fault in {ScrapeFault.TIMEOUT, ScrapeFault.BROKEN}:
        return Finding(
            Verdict.SUSPECT, "/metrics gives no whole answer in time: saturated or stopped, neither idle nor dead"
        )
    said = f"status {s.metrics.status}" if s.metrics is not None and s.metrics.status is not None else "nothing"
    if fault is ScrapeFault.NO_SERIES:
        said = "no series of an engine"
    return Finding(Verdict.UNJUDGEABLE, f"/metrics has {said}: neither idle nor hung can be told from that")


def _restarted(s: Situation) -> Finding | None:
    if s.unproven:
        return Finding(
            Verdict.SUSPECT,
            "restarted: the counters began a new life between two reads; an answer is needed to judge it",
            wants_probe=not s.running and not s.waiting,
        )
    return None


def _suspect(s: Situation) -> Finding | None:
    for name, track in s.all_tracks():
        age = track.age(s.now)
        if track.clock is not None and age >= s.waits_for(track)[0]:
            rest = s.needed(track) - age
            tail = f"stuck in {rest:.0f} s" if rest > 0 else "a probe decides, no request is open that could"
            if track.extended:
                tail += f", extended once by {s.policy.compile_extension:.0f} s because compilers run"
            return Finding(
                Verdict.SUSPECT,
                f"{name} has had work for {age:.0f} s without progress{_step(s, track)}; {tail}",
                _clock(s, track, name),
                wants_probe=True,
            )
    return None


def _busy(s: Situation) -> Finding | None:
    tracks = [track for _name, track in s.all_tracks() if track.seen_at == s.now]
    if not tracks and not (s.seen.door is not None and s.seen.door.in_flight):
        return None
    running, waiting = s.running, s.waiting
    if s.source == "front door" and s.seen.door is not None:
        parts = [f"{s.seen.door.in_flight} in flight, no engine series to judge by"]
    else:
        parts = [f"{_number(running)} running", f"{_number(waiting)} waiting"]
    parts += [
        f"{value:.0f} {unit}"
        for value, unit in ((s.tokens_per_s, "tokens/s"), (s.steps_per_s, "steps/s"))
        if value is not None
    ]
    age = max((track.age(s.now) for track in tracks), default=0.0)
    healthy = age < s.policy.late_limit
    words = "busy and healthy" if healthy else f"busy, no progress for {age:.0f} s, which a long step may take"
    return Finding(Verdict.BUSY, f"{words}: {', '.join(parts)}")


def _idle(s: Situation) -> Finding:
    answered = s.seen.probe.answered_at
    tail = f"; the last probe was answered {s.now - answered:.0f} s ago" if answered is not None else ""
    blind = "; no engine series: judged by the front door and probes alone" if s.source == "front door" else ""
    return Finding(Verdict.IDLE, f"idle: nothing runs and nothing waits{tail}{blind}", wants_probe=True)


# The order is the decision: what is asked first is said.
RULES: tuple[Callable[[Situation], Finding | None], ...] = (
    _dead,
    _starting,
    _alternating,
    _asleep,
    _paused,
    _stuck,
    _failing,
    _probes_fail,
    _refused,
    _probe_failed,
    _degraded,
    _blind,
    _restarted,
    _suspect,
    _busy,
    _idle,
)


def find(situation: Situation) -> Finding:
    """Return the finding of the first rule that applies."""
    for rule in RULES:
        finding = rule(situation)
        if finding is not None:
            return finding
    raise AssertionError  # `_idle` always answers


def _number(value: float | None) -> str:
    return "an unknown number" if value is None else f"{value:.0f}"


def _step(s: Situation, track: Track) -> str:
    """Describe the open step of a track in words, where a beacon shows one."""
    beacon = track.beacon
    if beacon is None or not beacon.in_step:
        return ""
    kind = "prefill" if beacon.open_prefill else "decode"
    return f": a {kind} step of {beacon.open_tokens} tokens has been open for {s.now - beacon.open_since:.0f} s"


def _clock(s: Situation, track: Track, name: str) -> dict[str, Value]:
    """Return the numbers of one track's clock."""
    return {
        "what": name,
        "no_progress_s": round(track.age(s.now), 1),
        "stuck_after_s": round(s.needed(track), 1),
        "demand_s": round(track.demand_s, 1),
        "waits": "decode" if s.waits_for(track) == s.policy.waits else "slow",
        "extended": track.extended,
    }
