"""When the loop leaves the ledger's writing to a thread."""

import pytest

from vllm_supervisor.core.disk_trust import DISTRUST_S, QUICK_S, SLOW_APPENDS, DiskTrust

SLOW = QUICK_S * 1.5


@pytest.mark.parametrize(
    ("gap", "took", "trusted"),
    [(0.2, QUICK_S / 2, True), (0.2, SLOW, False), (2.0, SLOW, True)],
    ids=["quick", "slow in a row", "slow now and then"],
)
def test_only_slow_appends_in_a_row_lose_trust(gap: float, took: float, trusted: bool) -> None:
    """One that was kept waiting says nothing; several within a second do."""
    trust = DiskTrust()
    for number in range(SLOW_APPENDS):
        began = 100.0 + number * gap
        trust.took(began, began + took)
    assert trust.holds(began + took) == trusted


def test_trust_comes_back() -> None:
    """After a while the loop tries again, and one slow append is not enough to lose it anew."""
    trust = DiskTrust()
    for _ in range(SLOW_APPENDS):
        trust.took(100.0, 100.0 + SLOW)
    later = 100.0 + SLOW + DISTRUST_S
    assert not trust.holds(later - 0.001)
    assert trust.holds(later)
    trust.took(later, later + SLOW)
    assert trust.holds(later + SLOW)
