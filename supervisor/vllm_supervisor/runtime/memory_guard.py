"""The guard's thread: looks at the memory four times a second and kills the engine at the floor.

Rules:
* A thread of its own: an event loop that waits for a page, a client or the log must not hold up the kill.
* At the floor the order is: kill, then everything else. No log, no look at /proc, no allocation but the few numbers of the
  look itself comes before it; descriptors and buffers were made beforehand.
* It hands values over by plain assignment and calls `on_news` (which must be safe from a thread and must not wait) when
  the level changed or an engine was killed.
* A fault in here is kept in `fault` and told like news: whoever reads it must not go on as if it were guarded.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from vllm_supervisor.adapters.kernel_log import KernelLog
from vllm_supervisor.adapters.kill_list import KillList
from vllm_supervisor.adapters.memory import MemoryReader
from vllm_supervisor.core.memory import GuardPolicy, GuardState, Reading, step

_ALL_EVERY = 4  # looks between two of pressure and OOM count, which the kernel averages over seconds anyway
_FINE = 240  # looks kept: a minute


@dataclass(frozen=True, slots=True)
class Shot:
    """An engine that was killed: which, on what look, and how long its signals took from that look on (seconds)."""

    incarnation: int
    state: GuardState
    reading: Reading
    took: float


class GuardThread:
    """One for the supervisor's life. `state`, `reading`, `shot` and `fault` may be read from any thread."""

    def __init__(
        self,
        reader: MemoryReader,
        kernel_log: KernelLog,
        kill_list: KillList,
        policy: GuardPolicy,
        on_news: Callable[[], None],
    ) -> None:
        """`policy.interval` is the time between two looks."""
        self.state = GuardState()
        self.reading: Reading | None = None
        self.shot: Shot | None = None
        self.fault: BaseException | None = None
        self.minimum: int | None = None  # lowest available since somebody set it to None
        self.recent: deque[Reading] = deque(maxlen=_FINE)
        self._reader = reader
        self._kernel_log = kernel_log
        self._kill_list = kill_list
        self._policy = policy
        self._on_news = on_news
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="memory-guard", daemon=True)

    def start(self) -> None:
        """Look once, so that `reading` is there, and go on in the thread."""
        self._look(all_of_it=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread at its next look; nobody waits for it."""
        self._stopping = True

    def _run(self) -> None:
        interval = self._policy.interval
        looks = 1
        due = time.monotonic() + interval
        try:
            while not self._stopping:
                time.sleep(max(0.0, due - time.monotonic()))
                self._look(all_of_it=looks % _ALL_EVERY == 0)
                looks += 1
                due = max(due + interval, time.monotonic())  # late looks are not made up for
        except BaseException as fault:  # noqa: BLE001 - handed to the event loop, which ends for it
            self.fault = fault
            self._on_news()

    def _look(self, *, all_of_it: bool) -> None:
        reading = self._reader.read(driver_out=self._kernel_log.look(), all_of_it=all_of_it)
        if reading is None:
            return
        before = self.state
        after = step(before, reading, self._policy)
        incarnation = self._kill_list.incarnation
        killed = after.crossing is not None and self._kill_list.fire() > 0
        self.state, self.reading = after, reading
        self.recent.append(reading)
        self.minimum = reading.available if self.minimum is None else min(self.minimum, reading.available)
        if killed and (self.shot is None or self.shot.incarnation != incarnation):
            self.shot = Shot(incarnation, after, reading, time.monotonic() - reading.at)
            self._on_news()
        if after.level is not before.level:
            self._on_news()
