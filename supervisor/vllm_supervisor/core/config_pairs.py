"""Keys that contradict each other: pairs of which one value makes the other impossible or without effect.

Rules:
* A row is refused with both keys, both values and what to change. `chosen`: only where both were set by somebody, since a
  default has to give way to a choice without a word.
* Whether a stop fits the limit of whoever kills us is no row: the drain shrinks to it, and that is said at the start.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vllm_supervisor.core.config_sections import Config


@dataclass(frozen=True, slots=True)
class Pair:
    """Two keys, when they fit, and why they have to."""

    first: str
    second: str
    fits: Callable[[Config], bool]
    remedy: str
    chosen: bool = False


PAIRS: tuple[Pair, ...] = (
    Pair(
        "memory.floor",
        "memory.low",
        lambda c: c.memory.floor <= c.memory.low,
        "the engine would be killed before admission closes; set memory.low above memory.floor",
    ),
    Pair(
        "restart.backoff",
        "restart.backoff_max",
        lambda c: c.restart.backoff <= c.restart.backoff_max,
        "the first wait is longer than the longest; raise restart.backoff_max",
        chosen=True,
    ),
    Pair(
        "restart.backoff_max",
        "restart.within",
        lambda c: c.restart.backoff_max < c.restart.within,
        "crashes would leave the window before they are counted; raise restart.within",
        chosen=True,
    ),
    Pair(
        "health.waits",
        "restart.stuck_within",
        lambda c: sum(c.health.waits) < c.restart.stuck_within,
        "a hang would leave the window before the next is found; raise restart.stuck_within",
    ),
    Pair(
        "health.waits",
        "health.waits_slow",
        lambda c: all(fast <= slow for fast, slow in zip(c.health.waits, c.health.waits_slow, strict=True)),
        "what is slow would be judged sooner than what is fast; raise health.waits_slow",
        chosen=True,
    ),
    Pair(
        "health.interval",
        "health.waits",
        lambda c: c.health.interval <= min(c.health.waits),
        "a wait would be over before the second look; lower health.interval",
        chosen=True,
    ),
    Pair(
        "health.interval",
        "health.failing_after",
        lambda c: c.health.interval <= c.health.failing_after,
        "one failed look would be a row of them; lower health.interval",
        chosen=True,
    ),
    Pair(
        "health.probe_interval",
        "health.interval",
        lambda c: not c.health.probe_interval or c.health.interval <= c.health.probe_interval,
        "a probe is sent at a look; lower health.interval",
        chosen=True,
    ),
    Pair(
        "front_door.max_in_flight",
        "front_door.max_connections",
        lambda c: c.front_door.max_in_flight <= c.front_door.max_connections,
        "a request needs a connection; raise front_door.max_connections",
        chosen=True,
    ),
    Pair(
        "front_door.hold",
        "front_door.request_deadline",
        lambda c: not c.front_door.request_deadline or c.front_door.hold <= c.front_door.request_deadline,
        "a request would end while it waits for the engine; lower front_door.hold",
    ),
    Pair(
        "ledger.segment",
        "ledger.max_size",
        lambda c: c.ledger.segment <= c.ledger.max_size,
        "one file is larger than all may be; lower ledger.segment",
        chosen=True,
    ),
    Pair(
        "restart.on_give_up",
        "restart.slow_retry",
        lambda c: c.restart.on_give_up != "exit" or not c.restart.slow_retry,
        "who exits is not parked and retries nothing; set restart.slow_retry = 0, or restart.on_give_up = park",
    ),
)


def contradictions(config: Config, origins: Mapping[str, str], default: str) -> list[tuple[Pair, str]]:
    """Return the rows that do not fit, each with the origin of the value that was set; `default` marks one that was not."""
    found = []
    for pair in PAIRS:
        chosen = [origin for key in (pair.first, pair.second) if (origin := origins[key]) != default]
        if chosen and (len(chosen) == 2 or not pair.chosen) and not pair.fits(config):
            found.append((pair, chosen[-1]))
    return found
