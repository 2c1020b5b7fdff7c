"""Writes the ledger, so that a slow disk never stalls the loop: the usual line at once, all others in a thread.

Rules:
* The loop itself writes while nothing waits, nothing failed and the disk is quick (`ledger_quick`), the lines of a turn of
  the pump together at its end. Else the writer's thread takes all that waits in one write(2), and only an acceptance waits.
* `sync`: "always" waits for fsync as well; "interval" syncs from a second thread, so nobody waits; "off" leaves it to
  the kernel. A written line survives our death by SIGKILL; only a synced one survives power loss.
* Loop and threads share a queue, bounded in bytes, and a few numbers under one lock that is never held during I/O. The
  loop touches the file only while the writer's thread has nothing in hand: the loop alone hands over and clears `_calm`
  with it, the thread sets it when it is done, so the loop may read it without the lock.
* A failing write is tried again a few times; then its lines are kept, within the queue's bound, later ones get one try
  each, and so does `retry`: the kept lines go first. Lines beyond the bound, of a removed file, or still kept at the end
  are counted as lost, and a `gap` line tells how many. Failure is a value to read (`health`), never raised.
* The threads are daemons: a hung disk cannot keep us from ending.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import trio

from vllm_supervisor.adapters.ledger_file import LedgerFile
from vllm_supervisor.adapters.ledger_reader import Position
from vllm_supervisor.adapters.threads import in_thread
from vllm_supervisor.core.errors import SetupError
from vllm_supervisor.core.ledger import LedgerHealth, LedgerPolicy
from vllm_supervisor.runtime.ledger_queue import Batch, Told, Turn, Waiting
from vllm_supervisor.runtime.ledger_quick import QuickWay
from vllm_supervisor.runtime.ledger_sync import LedgerSync

QUEUE_LIMIT = 16 * 1024 * 1024  # bytes that may wait; more means the disk has been stuck for long
ACCEPT_LIMIT_S = 5.0  # the longest a request waits for its line while the disk hangs
RETRIES_S = (0.02, 0.1, 0.3)  # pauses before each further try
PRUNE_EVERY_S = 3600.0


class LedgerWriter:
    """Appends to `file`. `start` in the loop's thread, `append` from there, `aclose` at the end."""

    def __init__(
        self,
        file: LedgerFile,
        policy: LedgerPolicy,
        *,
        header: Callable[[int, int, int], bytes],
        gap: Callable[[int], bytes],
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`header(segment, oldest_needed, read_from)` and `gap(lines)` build lines, in the writer's thread.

        `oldest_needed` is the first segment with a request that is open, `read_from` the first one that the next start
        has to read after a crash.
        """
        self._file = file
        self._policy = policy
        self._header, self._gap_line = header, gap
        self._monotonic, self._wall = monotonic, wall
        lock = threading.Lock()
        self._more = threading.Condition(lock)  # the writer waits for lines
        self._lock = lock
        self._sync = LedgerSync(file, lock, policy.interval_s, monotonic)
        self._quick = QuickWay(file, self._sync, monotonic)
        self._by_interval = policy.sync == "interval"
        self._threads: list[threading.Thread] = []
        self._token: trio.lowlevel.TrioToken | None = None
        # under the lock
        self._pending = Batch()
        self._waiting = Waiting()  # in the thread's hands, or refused by the disk
        self._busy: Batch | None = None
        self._busy_since = 0.0
        self._closing = self._retrying = False
        self._homes: dict[str, int] = {}  # unsettled id -> the segment that holds its acceptance
        self._may_prune = False  # only once recovery has said what earlier runs left open
        self._read_from = 0  # everything, until then
        self._written = self._lost = self._late = 0
        self._segment = 0
        self._error = ""
        self._write_failed: float | None = None
        self._always = policy.sync == "always"
        self._calm = not self._always  # nothing is in the thread's hands, waits for it, or failed there
        # the loop's own
        self.began = Position(0, 0)  # where this run's lines begin
        self._turn = Turn()
        self._in_turn = False
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
        self.began = Position(self._file.number, self._file.size)
        targets = [self._write_forever] + ([self._sync.run] if self._by_interval else [])
        self._threads = [threading.Thread(target=target, name="ledger", daemon=True) for target in targets]
        for thread in self._threads:
            thread.start()

    def begin_turn(self) -> None:
        """Let what is appended wait for `end_turn`."""
        self._in_turn = True

    def end_turn(self) -> None:
        """Write what has gathered."""
        self._in_turn = False
        if self._turn.lines:
            self._write_turn()

    def append(self, data: bytes, *, lines: int = 1, settles: str = "") -> None:
        """Write `lines` lines, or hand them over. `settles` names the id whose account the last one closes."""
        self._turn.append(data, lines, settles)
        if not self._in_turn:
            self._write_turn()

    def accept(self, line: bytes, opens: str, told: Told) -> None:
        """Write the line that opens an account, if that is surely quick, and say whether it is in the file.

        If it is not, nothing was done: it comes again, to be waited for.
        """
        self._turn.accept(line, opens, told)
        if not self._in_turn:
            self._write_turn()

    def _write_turn(self) -> None:
        turn, self._turn = self._turn, Turn()
        done = self._calm and self._quick.write(turn.data)
        with self._lock:
            if done:
                turn.settle(self._homes, self._segment)
                self._written += turn.lines
                if self._by_interval:
                    self._sync.wrote(turn.lines)
            else:
                for line, settles in turn.apart():
                    self._enqueue(line, settles, opens=False)
        if done:
            self._segment_lines += turn.lines
        for told in turn.told:
            told(done)

    async def append_and_wait(self, line: bytes, opens: str, *, required: bool = False) -> bool:
        """Hand over the line that opens an account; return whether it is in the file, once that is known or overdue.

        If it is not, the line still waits, and counts as late unless `required`: nothing goes on without it then.
        """
        with self._lock:
            batch = self._enqueue(line, opens, opens=True)
            if batch is None:
                return False
            written = batch.awaited()
            patience = ACCEPT_LIMIT_S
            if self._busy is not None:
                patience -= self._monotonic() - self._busy_since  # who comes to a hung disk does not wait anew
        with trio.move_on_after(max(0.0, patience)) as scope:
            await written.wait()
        on_record = not scope.cancelled_caught and not batch.refused
        if not on_record:
            with self._lock:
                self._late += not required
                self._error = self._error or "the disk does not answer"
        return on_record

    def retry(self) -> None:
        """Try whether the file can be written again, for when nothing else is going to be written."""
        with self._lock:
            self._retrying, self._calm = True, False
            self._more.notify()

    async def flush(self, limit_s: float) -> bool:
        """Wait until everything handed over so far was tried; False if it is not written within `limit_s`."""
        with self._lock:
            batch = self._pending if self._pending.lines else self._busy
            if batch is None:
                return not self._waiting
            written = batch.awaited()
        with trio.move_on_after(limit_s) as scope:
            await written.wait()
        return not scope.cancelled_caught and not batch.refused

    async def aclose(self, limit_s: float) -> bool:
        """Write and sync what waits, close the file; False if `limit_s` was not enough."""
        with self._lock:
            self._closing, self._calm = True, False
            self._more.notify()
            self._sync.close(writer_done=False)
        deadline = self._monotonic() + limit_s

        def join() -> bool:
            for thread in self._threads:
                thread.join(max(0.0, deadline - self._monotonic()))
            return not any(thread.is_alive() for thread in self._threads)

        return await in_thread(join, abandon=False)

    def recovered(self, homes: dict[str, int], read_from: int | None = None) -> None:
        """Allow pruning: `homes` are the ids that earlier runs still have open, with their segments.

        `read_from` is the first segment of the runs that a later start has to look at again; None: there are none.
        """
        with self._lock:
            self._homes.update(homes)
            self._may_prune = True
            self._read_from = min(self.began.segment, read_from or self.began.segment)

    def health(self) -> LedgerHealth:
        """Say how the writing goes, from memory."""
        with self._lock:
            since = self._write_failed if self._write_failed is not None else self._sync.failed_since
            if since is None and self._busy is not None and self._monotonic() - self._busy_since > ACCEPT_LIMIT_S:
                since = self._busy_since
            return LedgerHealth(
                failed=since is not None,
                since=since,
                error=self._error or self._sync.error,
                lost=self._lost,
                late=self._late,
                at_risk=self._sync.at_risk,
                written=self._written,
                queued=self._pending.size + self._waiting.size,
                segment=self._segment,
            )

    def _enqueue(self, line: bytes, request_id: str, *, opens: bool) -> Batch | None:
        batch, self._calm = self._pending, False
        if self._closing or batch.size + self._waiting.size + len(line) > QUEUE_LIMIT:
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
                batch, self._pending = self._pending, Batch()
                failed = self._write_failed is not None or self._sync.failed_since is not None
                again, self._retrying = self._retrying and failed, False
                ends = self._closing and not batch.lines
                if batch.lines:
                    self._busy, self._busy_since = batch, self._monotonic()
                    self._waiting.add(batch)
            if batch.lines or again or (ends and self._waiting):
                batch.refused = not self._write_waiting()
            if not ends:
                self._prune()
            with self._lock:
                self._busy = None
                event = batch.written
                more = self._pending.lines or self._retrying or self._closing or self._always
                self._calm = not (more or self._write_failed is not None or self._lost > self._gap_told)
            if event is not None and self._token is not None:
                with suppress(trio.RunFinishedError):
                    self._token.run_sync_soon(event.set)
            if ends:
                self._file.close()
                with self._lock:
                    self._lost += self._waiting.give_up()
                    self._sync.close(writer_done=True)
                return

    def _write_waiting(self) -> bool:
        """Write all that waits, or at least try; return whether that is done."""
        pauses: tuple[float | None, ...] = (*RETRIES_S, None) if self._write_failed is None else (None,)
        for pause in pauses:
            try:
                self._put_waiting()
                break
            except OSError as error:
                with self._lock:
                    self._error = error.strerror or str(error)
                    if self._write_failed is None:
                        self._write_failed = self._monotonic()
                if pause is None:
                    return False
                time.sleep(pause)
        with self._lock:
            self._write_failed = None
        return True

    def _put_waiting(self) -> None:
        waited = bool(self._waiting)
        while self._waiting:
            batch = self._waiting.first
            self._make_ready()
            self._file.put(b"".join(batch.lines))
            self._wrote(batch)
        lost = self._lost
        if lost > self._gap_told or not waited:
            self._make_ready()
            if lost > self._gap_told:
                self._file.put(self._gap_line(lost - self._gap_told))
                self._gap_told = lost
            self._wrote(Batch())

    def _wrote(self, batch: Batch) -> None:
        self._segment_lines += len(batch.lines)
        with self._lock:
            batch.settle(self._homes, self._segment)
            self._written += len(batch.lines)
            if self._by_interval:
                self._sync.wrote(len(batch.lines))
            if batch.lines:
                self._waiting.done()
        if self._always:
            self._sync.sync(None, len(batch.lines))

    def _make_ready(self) -> None:
        """See that the file can be appended to, and begin a new one by its header."""
        try:
            if self._file.ready():
                self._opened()
        except FileNotFoundError:  # somebody removed what this run has written there
            with self._lock:
                self._lost += self._segment_lines
            self._segment_lines = 0
            raise
        if self._file.size == 0 and self._written:
            self._file.put(self._header(self._segment, self._oldest_needed(), self._read_from))

    def _opened(self) -> None:
        """Take note of a newly opened segment."""
        with self._lock:
            if self._file.number != self._segment:
                self._segment, self._segment_lines = self._file.number, 0
            if self._by_interval:
                self._sync.opened(self._file.handle())
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
