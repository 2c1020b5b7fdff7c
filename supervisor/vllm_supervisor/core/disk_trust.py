"""Whether the loop may write to the ledger's file itself, or had better leave that to a thread: seen from past writes.

An append to the page cache takes microseconds. One that takes long was kept waiting, by the disk or by a busy
processor; several within a second are the disk's fault, and then the loop keeps its hands off for a while.
"""

QUICK_S = 0.05
SLOW_APPENDS = 3  # so many within a second
DISTRUST_S = 10.0


class DiskTrust:
    """Times are monotonic seconds."""

    def __init__(self) -> None:
        """Begin trusting."""
        self._slow = 0
        self._slow_since = self._from = 0.0

    def holds(self, now: float) -> bool:
        """Say whether an append may be expected to be quick."""
        return now >= self._from

    def took(self, began: float, ended: float) -> None:
        """Take note of an append."""
        if ended - began <= QUICK_S:
            return
        if ended - self._slow_since > 1.0:
            self._slow_since, self._slow = ended, 0
        self._slow += 1
        if self._slow >= SLOW_APPENDS:
            self._from = ended + DISTRUST_S
