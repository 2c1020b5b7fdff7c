"""Writes the ledger in a thread of its own, so that a slow disk never stalls the loop.

Rules:
* One write(2) takes everything that waits. Only a request that is being accepted waits for it; every other line is
  handed over and forgotten by the loop.
* `sync`: "always" waits for fsync as well; "interval" syncs from a second thread, so nobody waits; "off" leaves it to
  the kernel. A written line survives our death by SIGKILL; only a synced one survives power loss.
* Only the writer's thread touches the file. Loop and threads share a queue, bounded in bytes, and a few numbers under
  one lock that is never held during I/O.
* A failing write is tried again a few times; then its lines are counted as lost, later ones get one try each, and the
  first that succeeds is preceded by a `gap` line with the count; `retry` tries with nothing but that line. Failure is a
  value to read (`health`), never raised.

The threads are daemons: a disk that hangs in the kernel cannot keep us from ending.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from vllm_supervisor.adapters.ledger_file import LedgerFile
from vllm_supervisor.core.errors import SetupError
from vllm_supervisor.core.ledger import LedgerHealth, LedgerPolicy

QUEUE_LIMIT = 16 * 1024 * 1024  # bytes that may wait; more means the disk has been stuck for long
ACCEPT_LIMIT_S = 5.0  # the longest a request waits for its line while the disk hangs
RETRIES_S = (0.02, 0.1, 0.3)  # pauses before each further try
PRUNE_EVERY_S = 3600.0


@dataclass(slots=True)
class _Batch:
    lines: list[bytes] = field(default_factory=list)
    holds: list[tuple[str, bool]] = field(default_factory=list)  # (id, opens it or settles it), in order
    size: int = 0
    written: trio.Event | None = None
    lost: bool = False


class LedgerWriter:
    """Appends to `file`. `start` in the loop's thread, `append` from there, `aclose` at the end."""

    def __init__(
        self,
        file: LedgerFile,
        policy: LedgerPolicy,
        *,
        header: Callable[[int, int], bytes],
        gap: Callable[[int], bytes],
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`header(segment, oldest_needed)` and `gap(lines)` build lines and are called in the writer's thread."""
        self._file = file
        self._policy = policy
        self._header, self._gap_line = header, gap
        self._monotonic, self._wall = monotonic, wall
        lock = threading.Lock()
        self._more = threading.Condition(lock)  # the writer waits for lines
        self._dirty = threading.Condition(lock)  # the syncer waits for something to sync
        self._lock = lock
        self._threads: list[threading.Thread] = []
        self._token: trio.lowlevel.TrioToken | None = None
        # under the lock
        self._pending = _Batch()
        self._busy: _Batch | None = None
        self._busy_since = 0.0
        self._closing = self._writer_done = self._retrying = False
        self._homes: dict[str, int] = {}  # unsettled id -> the segment that holds its acceptance
        self._may_prune = False  # only once recovery has said what earlier runs left open
        self._handles: list[int] = []  # descriptors for the syncer; the last one is of the open segment
        self._unsynced = 0
        self._written = self._lost = self._late = self._at_risk = 0
        self._segment = 0
        self._error = ""
        self._write_failed: float | None = None
        self._sync_failed: float | None = None
        # the writer's own
        self._gap_told = 0
        self._segment_lines = 0
        self._prune_at = 0.0

    # -- the loop's side ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the newest segment, mend its end, start the threads. Raises SetupError if that cannot be done."""
        self._token = trio.lowlevel.current_trio_token()
        try:
            self._file.ready()
        except OSError as error:
            raise SetupError(
                f"the ledger cannot be written in {self._file.directory}: {error.strerror}; "
                "set state_dir to a directory that can be written"
            ) from error
        self._opened()
        targets = [self._write_forever] + ([self._sync_forever] if self._policy.sync == "interval" else [])
        self._threads = [threading.Thread(target=target, name="ledger", daemon=True) for target in targets]
        for thread in self._threads:
            thread.start()

    def append(self, line: bytes, *, settles: str = "") -> None:
        """Hand a line over. `settles` names the id whose account it closes."""
        with self._lock:
            self._enqueue(line, settles, opens=False)

    async def append_and_wait(self, line: bytes, opens: str) -> bool:
        """Hand over the line that opens an account; return whether it is in the file, once that is known or overdue."""
        with self._lock:
            batch = self._enqueue(line, opens, opens=True)
            if batch is None:
                return False
            if batch.written is None:
                batch.written = trio.Event()
            patience = ACCEPT_LIMIT_S
            if self._busy is not None:
                patience -= self._monotonic() - self._busy_since  # who comes to a hung disk does not wait anew
        with trio.move_on_after(max(0.0, patience)) as scope:
            await batch.written.wait()
        if scope.cancelled_caught:
            with self._lock:
                self._late += 1
                self._error = self._error or "the disk does not answer"
            return False
        return not batch.lost

    def retry(self) -> None:
        """Try whether the file can be written again, for when nothing else is going to be written."""
        with self._lock:
            self._retrying = True
            self._more.notify()

    async def flush(self, limit_s: float) -> bool:
        """Wait until everything handed over so far is written or given up; False if `limit_s` was not enough."""
        with self._lock:
            batch = self._pending if self._pending.lines else self._busy
            if batch is None:
                return True
            if batch.written is None:
                batch.written = trio.Event()
        with trio.move_on_after(limit_s) as scope:
            await batch.written.wait()
        return not scope.cancelled_caught

    async def aclose(self, limit_s: float) -> bool:
        """Write and sync what waits, close the file; False if `limit_s` was not enough."""
        with self._lock:
            self._closing = True
            self._more.notify()
            self._dirty.notify()
        deadline = self._monotonic() + limit_s

        def join() -> bool:
            for thread in self._threads:
                thread.join(max(0.0, deadline - self._monotonic()))
            return not any(thread.is_alive() for thread in self._threads)

        return await trio.to_thread.run_sync(join)

    def recovered(self, homes: dict[str, int]) -> None:
        """Allow pruning: `homes` are the ids that earlier runs still have open, with their segments."""
        with self._lock:
            self._homes.update(homes)
            self._may_prune = True

    def health(self) -> LedgerHealth:
        """Say how the writing goes, from memory."""
        with self._lock:
            since = self._write_failed if self._write_failed is not None else self._sync_failed
            if since is None and self._busy is not None and self._monotonic() - self._busy_since > ACCEPT_LIMIT_S:
                since = self._busy_since
            return LedgerHealth(
                failed=since is not None,
                since=since,
                error=self._error,
                lost=self._lost,
                late=self._late,
                at_risk=self._at_risk,
                written=self._written,
                queued=self._pending.size + (self._busy.size if self._busy else 0),
                segment=self._segment,
            )

    def _enqueue(self, line: bytes, request_id: str, *, opens: bool) -> _Batch | None:
        batch = self._pending
        if self._closing or batch.size + len(line) > QUEUE_LIMIT:
            self._lost += 1
            return None
        batch.lines.append(line)
        batch.size += len(line)
        if request_id:
            batch.holds.append((request_id, opens))
        if self._busy is None and len(batch.lines) == 1:
            self._more.notify()
        return batch

    # -- the writer's thread -----------------------------------------------------------------------------------

    def _write_forever(self) -> None:
        while True:
            with self._lock:
                if not self._pending.lines and not self._closing and not self._retrying:
                    self._more.wait(PRUNE_EVERY_S)
                batch, self._pending = self._pending, _Batch()
                failed = self._write_failed is not None or self._sync_failed is not None
                again, self._retrying = self._retrying and failed, False
                ends = self._closing and not batch.lines
                if batch.lines:
                    self._busy, self._busy_since = batch, self._monotonic()
            if batch.lines or again:
                self._write_batch(batch)
            if not ends:
                self._prune()
            with self._lock:
                self._busy = None
                event = batch.written
            if event is not None and self._token is not None:
                with suppress(trio.RunFinishedError):
                    self._token.run_sync_soon(event.set)
            if ends:
                self._file.close()
                with self._lock:
                    self._writer_done = True
                    self._dirty.notify()
                return

    def _write_batch(self, batch: _Batch) -> None:
        data = b"".join(batch.lines)
        pauses: tuple[float | None, ...] = (*RETRIES_S, None) if self._write_failed is None else (None,)
        for pause in pauses:
            try:
                self._put(data)
                break
            except OSError as error:
                self._note_failure(error)
                if pause is None:
                    batch.lost = True
                    with self._lock:
                        self._lost += len(batch.lines)
                    return
                time.sleep(pause)
        self._segment_lines += len(batch.lines)
        with self._lock:
            self._write_failed = None
            self._written += len(batch.lines)
            for request_id, opens in batch.holds:
                if opens:
                    self._homes[request_id] = self._segment
                else:
                    self._homes.pop(request_id, None)
            if self._policy.sync == "interval":
                if not self._unsynced:
                    self._dirty.notify()
                self._unsynced += len(batch.lines)
        if self._policy.sync == "always":
            self._sync(None, len(batch.lines))

    def _put(self, data: bytes) -> None:
        try:
            if self._file.ready():
                self._opened()
        except FileNotFoundError:  # somebody removed what this run has written there
            with self._lock:
                self._lost += self._segment_lines
            self._segment_lines = 0
            raise
        if self._file.size == 0 and self._written:
            self._file.put(self._header(self._segment, self._oldest_needed()))
        if self._lost > self._gap_told:
            lost = self._lost
            self._file.put(self._gap_line(lost - self._gap_told))
            self._gap_told = lost
        self._file.put(data)

    def _note_failure(self, error: OSError) -> None:
        with self._lock:
            self._error = error.strerror or str(error)
            if self._write_failed is None:
                self._write_failed = self._monotonic()

    def _opened(self) -> None:
        """Take note of a newly opened segment."""
        with self._lock:
            if self._file.number != self._segment:
                self._segment, self._segment_lines = self._file.number, 0
            if self._policy.sync == "interval":
                self._handles.append(self._file.handle())
                self._dirty.notify()
        self._prune_at = 0.0

    def _oldest_needed(self) -> int:
        with self._lock:
            return min(self._homes.values(), default=self._segment)

    def _prune(self) -> None:
        now = self._monotonic()
        if not self._may_prune or now < self._prune_at:
            return
        self._prune_at = now + PRUNE_EVERY_S
        policy = self._policy
        with suppress(OSError):
            self._file.prune(
                oldest_needed=self._oldest_needed(), now=self._wall(), keep_s=policy.keep_s, max_bytes=policy.max_bytes
            )

    # -- fsync -------------------------------------------------------------------------------------------------

    def _sync_forever(self) -> None:
        """Sync what was written, at most once an interval; the writer goes on meanwhile, on the same file."""
        while True:
            with self._lock:
                self._dirty.wait_for(
                    lambda: self._unsynced or len(self._handles) > 1 or self._closing or self._sync_failed is not None
                )
                self._dirty.wait_for(lambda: self._closing, self._policy.interval_s)
                if self._closing:
                    self._dirty.wait_for(lambda: self._writer_done)
                last = self._writer_done
                lines, self._unsynced = self._unsynced, 0
                handles = list(self._handles)
                del self._handles[: len(handles) if last else -1]
            for position, handle in enumerate(handles):
                if lines or self._sync_failed is not None:
                    self._sync(handle, lines)
                if last or position < len(handles) - 1:
                    os.close(handle)
            if last:
                return

    def _sync(self, handle: int | None, lines: int) -> None:
        """Sync one descriptor. After a failure the kernel may have dropped the pages: nothing proves those lines."""
        try:
            self._file.sync(handle)
        except OSError as error:
            with self._lock:
                self._at_risk += lines
                self._error = error.strerror or str(error)
                if self._sync_failed is None:
                    self._sync_failed = self._monotonic()
        else:
            with self._lock:
                self._sync_failed = None
