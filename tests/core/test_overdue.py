"""What has taken too long in an exchange: one table."""

import pytest

from vllm_supervisor.core.ending import Ending, overdue
from vllm_supervisor.core.front_door_settings import FrontDoorSettings

LIMITS = FrontDoorSettings(body_timeout=10.0, client_stall_timeout=20.0)
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
        body_waits_since=None if body is None else NOW - body,
    )
    assert told is ending
