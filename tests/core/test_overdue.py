"""What has taken too long in an exchange: one table."""

import pytest

from vllm_supervisor.core.ending import BodyProgress, Ending, overdue
from vllm_supervisor.core.front_door_settings import FrontDoorSettings

LIMITS = FrontDoorSettings(body_timeout=10.0, client_stall_timeout=20.0, body_deadline=30.0, body_min_rate=1000)
NOW = 1000.0


@pytest.mark.parametrize(
    ("deadline", "blocked", "body", "ending"),
    [
        (None, None, None, None),
        (NOW, None, None, Ending.DEADLINE),
        (NOW + 0.1, None, None, None),
        (NOW - 5, 100.0, 100.0, Ending.DEADLINE),
        (None, 20.0, None, Ending.CLIENT_STALLED),
        (None, 19.9, None, None),
        (None, None, 10.0, Ending.BODY_TOO_SLOW),
        (None, None, 9.9, None),
        (None, 1.0, 100.0, None),  # who takes nothing of the answer is not asked for the rest of the body
        (None, 20.0, 100.0, Ending.CLIENT_STALLED),
    ],
)
def test_overdue(deadline: float | None, blocked: float | None, body: float | None, ending: Ending | None) -> None:
    """`blocked` and `body` are for how long, in seconds."""
    told = overdue(
        LIMITS,
        NOW,
        deadline=deadline,
        blocked_since=None if blocked is None else NOW - blocked,
        body=None if body is None else BodyProgress(NOW - body, NOW - body),
    )
    assert told is ending


@pytest.mark.parametrize(
    ("began", "last", "received", "slow"),
    [
        (29.9, 0.0, 100, False),
        (30.1, 0.0, 100, True),
        (30.9, 0.0, 1000, False),
        (31.1, 0.0, 1000, True),
        (1000.0, 0.0, 1_000_000, False),
        (1031.0, 0.0, 1_000_000, True),
        (10.0, 10.0, 1_000_000, True),  # the pause counts all the same
    ],
)
def test_a_body_must_come_at_the_least_rate(began: float, last: float, received: int, slow: bool) -> None:
    """Thirty seconds, and one more for each thousand bytes; `began` and `last` are for how long, in seconds."""
    progress = BodyProgress(NOW - began, NOW - last, received)
    assert progress.too_slow(LIMITS, NOW) is slow


@pytest.mark.parametrize(("deadline", "rate"), [(0.0, 1000), (30.0, 0)])
def test_the_least_rate_can_be_turned_off(deadline: float, rate: int) -> None:
    """Either key at 0 leaves the pause alone to be judged."""
    limits = FrontDoorSettings(body_timeout=10.0, body_deadline=deadline, body_min_rate=rate)
    assert not BodyProgress(NOW - 10_000, NOW - 9, 1).too_slow(limits, NOW)
    assert BodyProgress(NOW - 10_000, NOW - 10, 1).too_slow(limits, NOW)


def test_time_in_which_nobody_reads_is_not_the_clients() -> None:
    """A body that is not read, because the engine takes no more, is not slow, and its clocks go on afterwards."""
    body = BodyProgress(NOW, NOW)
    body.came(500, NOW + 1)
    body.stop(NOW + 2)
    body.stop(NOW + 3)
    assert not body.too_slow(LIMITS, NOW + 500)
    body.go_on(NOW + 502)
    body.go_on(NOW + 503)
    assert not body.too_slow(LIMITS, NOW + 511.9)
    body.came(1, NOW + 511.9)
    body.came(1, NOW + 521.8)
    body.came(1, NOW + 530)
    assert not body.too_slow(LIMITS, NOW + 530.4)
    assert body.too_slow(LIMITS, NOW + 530.6)
