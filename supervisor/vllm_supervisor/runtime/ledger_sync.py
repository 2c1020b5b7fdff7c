"""Syncs the ledger's written lines to the disk, from a thread of its own, at most once an interval.

Rules:
* It shares the writer's lock; the lock is never held during I/O, and no one waits for a sync but `sync = "always"`.
* A descriptor of its own for each segment: the writer goes on, and may close its own, meanwhile.
* After a failed sync the kernel may have dropped the pages: nothing proves those lines any more, so they count as at
  risk, and the sync is tried again.
"""

import os
import threading
from collections.abc import Callable

from vllm_supervisor.adapters.ledger_file import LedgerFile


class LedgerSync:
    """See the module's rules. The attributes are read and written under the lock, `under_way` alone without it."""

    def __init__(
        self, file: LedgerFile, lock: threading.Lock, interval_s: float, monotonic: Callable[[], float]
    ) -> None:
        """`lock` is the writer's, `interval_s` the pause between two syncs in seconds."""
        self._file = file
        self._lock = lock
        self._interval_s = interval_s
        self._monotonic = monotonic
        self._due = threading.Condition(lock)
        self._handles: list[int] = []  # the last one is of the open segment
        self._unsynced = 0
        self._closing = self._writer_done = False
        self.at_risk = 0
        self.failed_since: float | None = None
        self.error = ""
        self.under_way = False

    # -- told by the writer, which holds the lock --------------------------------------------------------------

    def opened(self, handle: int) -> None:
        """Take a descriptor of a newly opened segment; it is closed here."""
        self._handles.append(handle)
        self._due.notify()

    def wrote(self, lines: int) -> None:
        """Count lines that wait for a sync."""
        if not self._unsynced:
            self._due.notify()
        self._unsynced += lines

    def close(self, *, writer_done: bool) -> None:
        """Come to an end: at once ready for it, and then, when the writer is done, with a last sync."""
        self._closing = True
        self._writer_done = self._writer_done or writer_done  # who closes again does not make it write again
        self._due.notify()

    # -- the thread --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Sync until closed."""
        while True:
            with self._lock:
                self._due.wait_for(
                    lambda: self._unsynced or len(self._handles) > 1 or self._closing or self.failed_since is not None
                )
                self._due.wait_for(lambda: self._closing, self._interval_s)
                if self._closing:
                    self._due.wait_for(lambda: self._writer_done)
                last = self._writer_done
                lines, self._unsynced = self._unsynced, 0
                handles = list(self._handles)
                del self._handles[: len(handles) if last else -1]
            for position, handle in enumerate(handles):
                if lines or self.failed_since is not None:
                    self.sync(handle, lines)
                if last or position < len(handles) - 1:
                    os.close(handle)
            if last:
                return

    def sync(self, handle: int | None, lines: int) -> None:
        """Sync one descriptor (None: the writer's own), on which `lines` rest."""
        self.under_way = True
        try:
            self._file.sync(handle)
        except OSError as error:
            with self._lock:
                self.at_risk += lines
                self.error = error.strerror or str(error)
                if self.failed_since is None:
                    self.failed_since = self._monotonic()
        else:
            with self._lock:
                self.failed_since = None
        finally:
            self.under_way = False
