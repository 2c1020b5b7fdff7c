"""SIGKILL of the supervisor under load; `scripts/kill-test` plays more rounds of it, and with real vLLM."""

import pytest

from fakes import kill_scenario


@pytest.mark.parametrize(("segment", "seed"), [("64MiB", 1), ("16KiB", 2)])
def test_nothing_accepted_is_lost_by_a_killed_supervisor(segment: str, seed: int) -> None:
    """Killed at random moments and started again: the audit holds each time, and every answered id is in the ledger.

    With small segments as well, of which each run has many.
    """
    kill_scenario.play_mock(rounds=4, seed=seed, segment=segment)
