"""The ledger's quick way: the loop itself appends, which takes microseconds where a thread's turn takes ten times that.

Rules:
* Not while a sync is under way or has failed (a disk that hangs shows there first), nor after slow appends.
* The loop never opens, ends or mends a file: where that is needed nothing is written, and the thread does it.
* Whether the thread has the file in hand is the caller's knowledge.
"""

from collections.abc import Callable

from vllm_supervisor.adapters.ledger_file import LedgerFile
from vllm_supervisor.core.disk_trust import QUICK_S, DiskTrust
from vllm_supervisor.runtime.ledger_sync import LedgerSync

LOOK_EVERY_S = 0.1  # how often the loop looks whether its file was removed


class QuickWay:
    """Appends, or says no."""

    def __init__(self, file: LedgerFile, sync: LedgerSync, monotonic: Callable[[], float]) -> None:
        """`monotonic` returns seconds."""
        self._file = file
        self._sync = sync
        self._monotonic = monotonic
        self._trust = DiskTrust()
        self._look_at = 0.0

    def write(self, data: bytes) -> bool:
        """Append `data`; False: nothing of it is in the file."""
        file, sync = self._file, self._sync
        began = self._monotonic()
        if sync.under_way or sync.failed_since is not None or not self._trust.holds(began):
            return False
        try:
            if began >= self._look_at:
                if not file.there():
                    return False
                self._look_at = began + LOOK_EVERY_S
            if not file.put_now(data):
                return False
        except OSError:
            return False  # the writer's thread meets the same fault, and knows what to do
        ended = self._monotonic()
        if ended - began > QUICK_S:
            self._trust.took(began, ended)
        return True
