"""The pump: one inner epoll for every socket of the front door, served by one trio task in one tight loop.

Why: trio schedules a task for each wait on a socket, two or three passes a chunk. An epoll descriptor can itself be
polled (epoll(7)), so one task waits for the inner epoll and then serves all that is ready by plain calls. Other tasks
own the lifetimes and do what must wait; none of them waits for bytes.

What it serves often leads to the next event within microseconds (a request sent, its answer, the next request), so the
pump lingers: it waits in the inner epoll itself for up to a millisecond before it goes back to trio. Nobody waits for
that: it never lingers when a task of the front door has something to do, nor beyond a turn of two milliseconds.

The opposite is a torrent: reading every few bytes at once would wake the sender's and our processor for each. Who is
fed by one dozes, and all that doze are woken together a few milliseconds later, when there is much to read at once.

Contract:
* `add`/`change`/`forget` register a descriptor with its handler; registrations are level-triggered.
* A handler is a plain function of the event mask; it must not block, must cope with an event that is no longer true,
  and must not raise: it tells `on_fault` of its faults.
* `Parking` is how a task waits for a handler: one task, one wake-up, no event lost. While a task does what must wait,
  it counts itself in `at_work`.
"""

import select
from collections.abc import Callable

import trio

Handler = Callable[[int], None]

READABLE = select.EPOLLIN | select.EPOLLRDHUP
HANGUP = select.EPOLLRDHUP
WRITABLE = select.EPOLLOUT
_ALWAYS_TOLD = select.EPOLLHUP | select.EPOLLERR
NOT_WRITABLE = READABLE | _ALWAYS_TOLD
GONE = HANGUP | _ALWAYS_TOLD

_BATCH = 512
_LINGER_S = 0.001  # the shortest an epoll waits for
_TURN_S = 0.002
DOZE_S = 0.003  # at 200 MB/s in 32 streams, about what one read takes of each


def _nothing() -> None: ...


class Pump:
    """See the module's contract."""

    def __init__(
        self,
        *,
        now: Callable[[], float],
        on_fault: Callable[[Exception], None],
        begin_turn: Callable[[], None] = _nothing,
        end_turn: Callable[[], None] = _nothing,
    ) -> None:
        """`now` is the monotonic clock, read once a batch into the attribute `now`."""
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._clock = now
        self.on_fault = on_fault
        self._begin_turn, self._end_turn = begin_turn, end_turn
        self.now = now()
        self.at_work = 0  # tasks of the front door that wait for something else than the pump
        self.hurry = False  # a task was woken: it is its turn
        self._dozing: list[Callable[[], None]] = []
        self._doze_ends = 0.0

    def add(self, descriptor: int, events: int, handler: Handler) -> None:
        """Serve `descriptor` with `handler` from now on."""
        self._epoll.register(descriptor, events)
        self._handlers[descriptor] = handler

    def change(self, descriptor: int, events: int) -> None:
        """Wait for other events of a descriptor that is registered."""
        self._epoll.modify(descriptor, events)

    def forget(self, descriptor: int) -> None:
        """Serve `descriptor` no longer; call it before the descriptor is closed."""
        self._epoll.unregister(descriptor)
        del self._handlers[descriptor]

    def doze(self, wake: Callable[[], None]) -> None:
        """Call `wake` later, together with all others that doze by then."""
        if not self._dozing:
            self._doze_ends = self.now + DOZE_S
        self._dozing.append(wake)

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            await self._wait()
            began = self.now = self._clock()
            self._wake_dozing()
            events = self._epoll.poll(0, _BATCH)
            while events:
                self._serve(events)
                self._wake_dozing()
                if self.hurry or self.at_work or self.now - began > _TURN_S:
                    break
                events = self._epoll.poll(_LINGER_S, _BATCH)
                self.now = self._clock()
            self.hurry = False

    def close(self) -> None:
        """Let go of the epoll, once no link is left."""
        self._epoll.close()

    async def _wait(self) -> None:
        """Wait until a socket is ready, or a doze over."""
        if not self._dozing:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            return
        with trio.move_on_after(max(0.0, self._doze_ends - self._clock())):
            await trio.lowlevel.wait_readable(self._epoll.fileno())

    def _wake_dozing(self) -> None:
        if self._dozing and self.now >= self._doze_ends:
            dozing, self._dozing = self._dozing, []
            for wake in dozing:
                wake()

    def _serve(self, events: list[tuple[int, int]]) -> None:
        handlers = self._handlers
        self._begin_turn()
        try:
            for descriptor, mask in events:
                handler = handlers.get(descriptor)
                if handler is not None:  # else closed by an earlier handler of this batch
                    handler(mask)
        finally:
            self._end_turn()


class Parking:
    """A place where one task waits until a plain function wakes it. A wake-up that comes first is kept."""

    __slots__ = ("_pump", "_task", "_woken")

    def __init__(self, pump: Pump) -> None:
        """Begin empty."""
        self._pump = pump
        self._task: trio.lowlevel.Task | None = None
        self._woken = False

    def wake(self) -> None:
        """Wake the task that waits, or the next one that will."""
        task = self._task
        self._pump.hurry = True
        if task is None:
            self._woken = True
        else:
            self._task = None
            trio.lowlevel.reschedule(task)

    async def wait(self) -> None:
        """Wait for a wake-up; a checkpoint in any case."""
        if self._woken:
            self._woken = False
            await trio.lowlevel.checkpoint()
            return

        def abort(_raise_cancel: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)
