"""SIGKILL of the supervisor under load; `scripts/kill-test` plays more rounds of it, and with real vLLM."""

from fakes import kill_scenario


def test_nothing_accepted_is_lost_by_a_killed_supervisor() -> None:
    """Killed at four random moments and started again: the audit holds each time, and every answered id is in the ledger."""
    kill_scenario.play_mock(rounds=4, seed=1)
