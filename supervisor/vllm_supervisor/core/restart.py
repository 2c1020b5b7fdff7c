"""When the engine may be started again, and when to give up: a pure policy over a small, frozen tally.

Rules:
* Crashes, hangs and starts that never became ready have a budget each; a restart somebody ordered has none,
  nor has one of a headless node that ended with its head.
* A crash leaves its tally when it is older than `within` and, since it, one life was ready for `healthy_after`. Load
  time heals nothing: six minutes of load and one minute of life is a loop that must end.
* Failed starts are counted since the engine was last ready. A deterministic one ends at once, unless its signature is
  worth another try; a signature with waits of its own (the model hub, a port) is counted apart, by its own number.
* An unknown start failure that looks the same three times in a row, and took as long (±20 %), is deterministic too.
* The wait doubles with each failure still in the tally and is drawn from its upper half, so that it grows and yet
  differs between machines.
* One restart at a time is the caller's duty. A start that a person orders begins with `pardoned(tally)`.
Times are monotonic seconds, durations seconds.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from vllm_supervisor.core.exit_status import ExitReading, give_up_status
from vllm_supervisor.core.signatures import Cause, Repeat

_SAME_STARTS = 3  # equal unknown start failures in a row that prove a repeating reason
_SAME_DURATION = 0.2
_MOST_DOUBLINGS = 32


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The `[restart]` section of the configuration, with its names and defaults; durations in seconds."""

    max: int = 3
    within: float = 900.0
    stuck_max: int = 3
    stuck_within: float = 21600.0
    start_attempts: int = 2
    backoff: float = 1.0
    backoff_max: float = 60.0
    healthy_after: float = 600.0
    on_give_up: Literal["auto", "park", "exit"] = "auto"
    slow_retry: float = 0.0


class EndKind(StrEnum):
    """What kind of end a life had, as the caller knows it."""

    CRASH = "crash"  # ended or had to be ended, after it was ready
    HANG = "hang"  # ended by us because nothing moved
    START_FAILURE = "start_failure"  # never became ready
    COMMANDED = "commanded"  # somebody ordered the restart
    FOLLOWED = "followed"  # a headless node ended with the node it belongs to


@dataclass(frozen=True, slots=True)
class Ended:
    """One life that is over. `why`: our own words where we ended it ourselves (a hang, a start without progress)."""

    kind: EndKind
    reading: ExitReading
    duration_s: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class RestartTally:
    """What the policy remembers; bounded by the budgets and the number of signatures."""

    ever_ready: bool = False
    ready_since: float | None = None
    healed_until: float | None = None  # crashes before this instant were followed by a healthy life
    crashes: tuple[float, ...] = ()
    hangs: tuple[float, ...] = ()
    failed_starts: int = 0
    waits: tuple[tuple[str, int], ...] = ()  # failed starts by signature with waits of its own
    unknown: tuple[tuple[str, float], ...] = ()  # fingerprint and duration of the last unknown failed starts


@dataclass(frozen=True, slots=True)
class Restart:
    """Start again at `at`, after a wait of `backoff_s`."""

    at: float
    backoff_s: float


class GiveUpKind(StrEnum):
    """Which rule ended it."""

    REPEATS = "repeats"
    OUTSIDE = "outside"
    CRASHES = "crashes"
    HANGS = "hangs"
    STARTS = "starts"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start again. `status`: what we exit with, if giving up means to exit.

    `public` is what clients read: the class of the failure and its remedy in fixed words. `sentence` may quote the engine.
    """

    kind: GiveUpKind
    sentence: str
    status: int
    public: str


FAILING = "failing"  # an engine we ended because it answered nothing but errors: neither an exit nor a budget names it
# The fixed set of what a restart is counted under: `FAILING`, or what `restart_cause` gives.
RESTART_CAUSES: tuple[str, ...] = (*EndKind, FAILING, *(cause for cause in Cause if cause is not Cause.REQUESTED))


def restart_cause(ended: Ended) -> str:
    """Name the cause of a restart for metrics and status: a crash by what ended it, everything else by its kind."""
    if ended.kind is EndKind.CRASH and not ended.reading.clean:
        return ended.reading.cause
    return ended.kind


def ready(tally: RestartTally, now: float) -> RestartTally:
    """Remember that the engine became ready: failed starts are over, healing begins."""
    return replace(tally, ever_ready=True, ready_since=now, failed_starts=0, waits=(), unknown=())


def pardoned(tally: RestartTally) -> RestartTally:
    """Give fresh budgets, because a person ordered the start."""
    return RestartTally(ever_ready=tally.ever_ready)


def used(tally: RestartTally, policy: RestartPolicy, now: float) -> int:
    """Count the crashes that burden the budget just now."""
    return len(_healed(tally, policy, now).crashes)


def stuck_used(tally: RestartTally, policy: RestartPolicy, now: float) -> int:
    """Count the hangs that burden their own budget just now."""
    return len(_healed(tally, policy, now).hangs)


def after_end(
    tally: RestartTally, policy: RestartPolicy, ended: Ended, now: float, jitter: float
) -> tuple[RestartTally, Restart | GiveUp]:
    """Decide what follows the end of a life at `now`. `jitter`: a random number, 0 ≤ jitter < 1."""
    tally = replace(_healed(tally, policy, now), ready_since=None)
    match ended.kind:
        case EndKind.COMMANDED:
            return tally, Restart(now, 0.0)
        case EndKind.FOLLOWED:
            return tally, Restart(now + policy.backoff, policy.backoff)
        case EndKind.HANG:
            return _after_hang(tally, policy, ended, now, jitter)
        case EndKind.CRASH:
            return _after_crash(tally, policy, ended, now, jitter)
        case EndKind.START_FAILURE:
            return _after_failed_start(tally, policy, ended, now, jitter)


def give_up_mode(
    policy: RestartPolicy, *, ever_ready: bool, on_terminal: bool, has_notify: bool, is_pid1: bool
) -> Literal["park", "exit"]:
    """Say whether giving up ends us. `auto`: only where somebody is looking on and the engine never once ran."""
    if policy.on_give_up != "auto":
        return policy.on_give_up
    return "exit" if not ever_ready and not is_pid1 and (on_terminal or has_notify) else "park"


def slow_retry_at(policy: RestartPolicy, now: float) -> float | None:
    """Say when a park that begins now is left by ourselves, or None for never. The tally stays: one try a turn."""
    return now + policy.slow_retry if policy.slow_retry > 0 else None


def _healed(tally: RestartTally, policy: RestartPolicy, now: float) -> RestartTally:
    healed_until = tally.healed_until
    if tally.ready_since is not None and now - tally.ready_since >= policy.healthy_after:
        healed_until = now
    crashes = tuple(
        at for at in tally.crashes if healed_until is None or at >= healed_until or now - at <= policy.within
    )
    hangs = tuple(at for at in tally.hangs if now - at <= policy.stuck_within)
    return replace(tally, healed_until=healed_until, crashes=crashes, hangs=hangs)


def _after_hang(
    tally: RestartTally, policy: RestartPolicy, ended: Ended, now: float, jitter: float
) -> tuple[RestartTally, Restart | GiveUp]:
    tally = replace(tally, hangs=(*tally.hangs, now)[-policy.stuck_max - 1 :])
    if len(tally.hangs) > policy.stuck_max:
        rule = f"hang {len(tally.hangs)} within {_span(policy.stuck_within)}"
        return tally, _give_up(GiveUpKind.HANGS, rule, ended)
    return tally, _again(now, policy.backoff, policy.backoff_max, len(tally.hangs), jitter)


def _after_crash(
    tally: RestartTally, policy: RestartPolicy, ended: Ended, now: float, jitter: float
) -> tuple[RestartTally, Restart | GiveUp]:
    tally = replace(tally, crashes=(*tally.crashes, now)[-policy.max - 1 :])
    if _only_outside(ended.reading) and ended.reading.retries == 0:
        return tally, _give_up(GiveUpKind.OUTSIDE, "a restart does not help", ended)
    if len(tally.crashes) > policy.max:
        rule = f"crash {len(tally.crashes)} without {_span(policy.healthy_after)} of health in between"
        return tally, _give_up(GiveUpKind.CRASHES, rule, ended)
    return tally, _again(now, policy.backoff, policy.backoff_max, len(tally.crashes), jitter)


def _after_failed_start(
    tally: RestartTally, policy: RestartPolicy, ended: Ended, now: float, jitter: float
) -> tuple[RestartTally, Restart | GiveUp]:
    reading, signature = ended.reading, ended.reading.signature
    if signature and signature.backoff:  # it waits for something outside, it does not try its luck
        seen = dict(tally.waits)
        nth = seen[signature.id] = seen.get(signature.id, 0) + 1
        tally = replace(tally, waits=tuple(seen.items()))
        if nth > (signature.retries or 0):
            return tally, _give_up(GiveUpKind.STARTS, f"start {nth} of this kind failed", ended)
        return tally, _again(now, *signature.backoff, nth, jitter)
    failed = tally.failed_starts + 1
    unknown = tally.unknown
    if not signature:
        unknown = (*unknown, (reading.fingerprint, ended.duration_s))[-_SAME_STARTS:]
    tally = replace(tally, failed_starts=failed, unknown=unknown)
    worth = policy.start_attempts if reading.retries is None else min(policy.start_attempts, reading.retries + 1)
    if failed >= worth and _only_outside(reading):
        return tally, _give_up(GiveUpKind.OUTSIDE, "a restart does not help", ended)
    if failed >= worth and reading.repeat is Repeat.DETERMINISTIC:
        return tally, _give_up(GiveUpKind.REPEATS, "a restart would meet the same failure", ended)
    if not signature and _all_same(unknown):
        return tally, _give_up(GiveUpKind.REPEATS, f"the same failure {_SAME_STARTS} times in a row", ended)
    if failed >= worth:
        return tally, _give_up(GiveUpKind.STARTS, f"start {failed} failed", ended)
    return tally, _again(now, policy.backoff, policy.backoff_max, len(tally.crashes) + failed, jitter)


def _only_outside(reading: ExitReading) -> bool:
    return reading.signature is not None and reading.signature.outside_only


def _all_same(unknown: tuple[tuple[str, float], ...]) -> bool:
    last, duration = unknown[-1]
    return len(unknown) == _SAME_STARTS and all(
        name == last and abs(took - duration) <= _SAME_DURATION * duration for name, took in unknown
    )


def _again(now: float, first: float, most: float, nth: int, jitter: float) -> Restart:
    wait = min(most, first * 2.0 ** min(nth - 1, _MOST_DOUBLINGS)) * (1 + jitter) / 2
    return Restart(now + wait, wait)


def _give_up(kind: GiveUpKind, rule: str, ended: Ended) -> GiveUp:
    mend = f"; {ended.reading.mend}" if ended.reading.mend else ""
    spent = kind is not GiveUpKind.REPEATS
    failed = "failed to start" if ended.kind is EndKind.START_FAILURE else "failed"
    return GiveUp(
        kind,
        f"{rule}: {ended.why or ended.reading.sentence}{mend}",
        give_up_status(ended.reading, spent=spent),
        f"the engine {failed}: {ended.reading.label}{mend}",
    )


def _span(seconds: float) -> str:
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= unit and seconds % unit == 0:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:g} s"
