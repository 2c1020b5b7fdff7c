"""When a probe may be sent, and when it must be withdrawn.

Rules:
* One probe in flight, ever. An unanswered one is demand under the classifier's waits and is never followed by a second.
* Never while a user's request is in flight: our account must be empty. The engine must report nothing running either,
  unless its gauges are stale: running above zero, our account empty, and nothing moving since the last look. A beacon's
  counts are never stale.
* A user's request that arrives withdraws the probe at once; one answer a minute is worth less than any user's wait.
* Nothing is sent to an engine that starts, sleeps or is paused, nor where the last try was told that a probe is not
  possible. One that refuses connections is asked all the same: the refusals prove that it serves nobody.
* `urgent` (a suspicion to be settled) skips the interval, and nothing else.
"""

from dataclasses import dataclass
from enum import StrEnum

from vllm_supervisor.core.words import Verdict

# Verdicts at which no probe can be answered, or none should be.
_SILENT = {
    Verdict.STARTING,
    Verdict.ASLEEP,
    Verdict.PAUSED,
    Verdict.DEAD,
    Verdict.STUCK,
}
# A suspicion is settled sooner than by the interval, but not by hammering.
URGENT_INTERVAL = 5.0


class ProbeOrder(StrEnum):
    """What to do about the probe just now."""

    NOTHING = "nothing"
    SEND = "send"
    WITHDRAW = "withdraw"


@dataclass(frozen=True, slots=True)
class ProbeView:
    """What the decision rests on. Times are monotonic seconds."""

    verdict: Verdict
    in_flight: int  # users' requests that hold a place at the gate, whatever they wait for
    running: float | None  # what the engine reports; None: it does not
    waiting: float | None
    moving: bool  # there was progress since the last look
    probing: bool  # a probe is in flight
    possible: bool  # False after a 401, 403, or with no endpoint that can carry one
    last_at: float | None  # when the last probe was sent
    urgent: bool = False
    exact: bool = False  # `running` and `waiting` are the scheduler's own counts


def decide(view: ProbeView, now: float, interval: float) -> ProbeOrder:
    """Decide about the probe; `interval` in seconds, 0 never sends one."""
    if view.probing:
        return ProbeOrder.WITHDRAW if view.in_flight else ProbeOrder.NOTHING
    if interval <= 0 or not view.possible or view.in_flight or view.verdict in _SILENT:
        return ProbeOrder.NOTHING
    if (view.running or view.waiting) and (view.moving or view.exact):
        return ProbeOrder.NOTHING
    pause = min(interval, URGENT_INTERVAL) if view.urgent else interval
    if view.last_at is not None and now - view.last_at < pause:
        return ProbeOrder.NOTHING
    return ProbeOrder.SEND
