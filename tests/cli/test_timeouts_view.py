"""`timeouts` for a person: every row is whole, whatever the terminal."""

from vllm_supervisor.cli.timeouts import render
from vllm_supervisor.core.timeouts import Limits, as_json, matrix, plan


def test_every_row_is_shown() -> None:
    """Each limit stands with its value, its owner, what it covers and what it does not guarantee."""
    limits = Limits(60.0, "TimeoutStopSec of x", 0.0, 60.0, 30.0, 5.0, 5.0, server_graceful=40.0)
    budget = plan(limits)
    text = render(as_json(limits, budget))
    assert text.startswith(budget.sentence)
    for row in matrix(limits, budget):
        assert row.owner in text
        assert row.not_guaranteed in text
    assert "drain: 20 s   fits: NO" in text
    assert "server's own graceful time: 40 s   fits: NO" in text
    assert "request deadline: none   fits: -" in text
