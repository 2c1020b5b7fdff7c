"""The pump: one inner epoll for every socket of the front door, served by one trio task in one tight loop.

Why: trio schedules a task for each wait on a socket, two or three passes a chunk. An epoll descriptor can itself be
polled (epoll(7)), so one task waits for the inner epoll and then serves all that is ready by plain calls. Other tasks
own the lifetimes and do what must wait; none of them waits for bytes.

What it serves often leads to the next event within microseconds (a request sent, its answer, the next request), so the
pump lingers: it waits in the inner epoll itself for up to a millisecond before it goes back to trio. Nobody waits for
that: it never lingers when a task of the front door has something to do, nor beyond a turn of two milliseconds.

A turn is over after ten milliseconds, or after the one call that goes beyond it. What it has no time for waits in two
queues. In the first are sockets that have not been served for a while: they go first, in order, and what asks little is
done with each of them. In the second is who was served a moment ago, and work that handlers have put off because it
takes long; it has what is left of the turn, at least one call. So a client that asks little is served within a few
turns, however many others ask much, those wait for each other alone, and the rest of the program never waits long.

The opposite is a torrent: reading every few bytes at once would wake the sender's and our processor for each. Who is
fed by one dozes, and all that doze are woken together a few milliseconds later, when there is much to read at once.

Contract:
* `add`/`change`/`forget` register a descriptor with its handler; registrations are level-triggered.
* A handler is a plain function of the event mask; it must not block, must cope with an event that is no longer true,
  and must not raise: it tells `on_fault` of its faults.
* `defer` puts work off; it must not raise either, and should be bounded: a few milliseconds.
* `Parking` is how a task waits for a handler: one task, one wake-up, no event lost. While a task does what must wait,
  it counts itself in `at_work`.
"""

import os
import select
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

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
FIRST_S = 0.006  # for those that have not been served for a while
BATCH_S = 0.010  # for them and the second queue
MOMENT_S = 0.25  # after being served, in which one goes to the second queue if anything waits
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
        self._first: OrderedDict[int, int] = OrderedDict()  # descriptors with their events
        self._second: OrderedDict[int | Callable[[], None], int] = OrderedDict()  # also put-off work, with 0
        self._lately: set[int] = set()  # descriptors served since `_lately_since`, while anything waited
        self._lately_since = 0.0
        self._serving = False
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.add(self._waker, select.EPOLLIN, self._woken)
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
        if self._first or self._second or self._lately:
            self._first.pop(descriptor, None)
            self._second.pop(descriptor, None)
            self._lately.discard(descriptor)

    def defer(self, work: Callable[[], None]) -> None:
        """Do `work` once, in the second queue."""
        if not (self._second or self._serving):
            os.eventfd_write(self._waker, 1)
        self._second[work] = 0

    def _woken(self, _events: int) -> None:
        os.eventfd_read(self._waker)

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
            while events or self._first or self._second:
                self._serve(events)
                self._wake_dozing()
                if self.hurry or self.at_work or self._first or self._second or self.now - began > _TURN_S:
                    break
                events = self._epoll.poll(_LINGER_S, _BATCH)
                self.now = self._clock()
            self.hurry = False

    def close(self) -> None:
        """Let go of the epoll, once no link is left."""
        self._epoll.close()
        os.close(self._waker)

    async def _wait(self) -> None:
        """Wait until a socket is ready, or a doze over; a checkpoint in any case."""
        if self._first or self._second:
            await trio.lowlevel.checkpoint()
            return
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
        self._serving = True
        self._begin_turn()
        try:
            if self._first or self._second:
                self._queue(events)
                self._work_off(self._first, self.now + FIRST_S)
            else:
                self._lately.clear()
                self._at_once(events, self.now + FIRST_S)
            if self._second:
                self._work_off(self._second, self.now + BATCH_S)
        finally:
            self._end_turn()
            self._serving = False

    def _at_once(self, events: list[tuple[int, int]], until: float) -> None:
        """Serve all that is ready, as nothing waits; what there is no time for begins to."""
        handlers, clock = self._handlers, self._clock
        served = 0
        for descriptor, mask in events:
            served += 1
            handler = handlers.get(descriptor)
            if handler is not None:  # else closed by an earlier handler of this batch
                handler(mask)
                if clock() > until:
                    break
        if served < len(events):
            self._lately_since = self.now
            self._lately.update(descriptor for descriptor, _ in events[:served] if descriptor in handlers)
            self._first.update((descriptor, mask) for descriptor, mask in events[served:] if descriptor in handlers)

    def _queue(self, events: list[tuple[int, int]]) -> None:
        """Let what is ready wait, behind all that waits already."""
        first, second, lately = self._first, self._second, self._lately
        if self.now - self._lately_since > MOMENT_S:
            self._lately_since = self.now
            lately.clear()
        for descriptor, mask in events:
            if descriptor in lately:
                second.setdefault(descriptor, mask)
            elif descriptor not in second:
                first.setdefault(descriptor, mask)

    def _work_off(self, queue: OrderedDict[Any, int], until: float) -> None:
        """Do what is in `queue`, at least one thing, until the time is over."""
        handlers, lately, clock = self._handlers, self._lately, self._clock
        while queue:
            what, mask = queue.popitem(last=False)
            if mask:
                lately.add(what)
                handlers[what](mask)  # `forget` takes both away
            else:
                what()
            if clock() > until:
                break


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
