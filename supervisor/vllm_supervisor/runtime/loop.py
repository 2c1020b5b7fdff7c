"""The one loop: a fact comes in, the lifecycle decides, the orders are carried out, then the next fact.

Rules:
* Facts are taken one at a time and in order; whoever sees something calls `tell`, which never waits.
* Deadlines are kept here, absolute and monotonic, one for each timer name; a due deadline becomes a fact like any other.
* A fact that cannot happen is a fault of ours: it is logged with its traceback and changes nothing.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import Protocol

import trio

from vllm_supervisor.core import orders
from vllm_supervisor.core.cells import TABLE
from vllm_supervisor.core.facts import Fact, Timer, TimerFired
from vllm_supervisor.core.lifecycle import ImpossibleFact, Moment, Policy, State, step
from vllm_supervisor.core.words import Phase


class Executor(Protocol):
    """Carries out orders; adds no decision of its own."""

    def execute(self, order: orders.Order) -> None:
        """Carry out one order, or start the task that does; never blocks."""


class Loop:
    """Owns the state. One task runs it; anybody may read `state` and call `tell`."""

    def __init__(
        self,
        policy: Policy,
        *,
        now: Callable[[], float],
        jitter: Callable[[], float] = random.random,
        on_fault: Callable[[ImpossibleFact], None],
    ) -> None:
        """`now` gives monotonic seconds, on the same clock as trio's deadlines."""
        self.state = State()
        self.timers: dict[Timer, float] = {}
        self._policy = policy
        self._now = now
        self._jitter = jitter
        self._on_fault = on_fault
        self._facts: deque[Fact] = deque()
        self._wake = trio.Event()

    def tell(self, fact: Fact) -> None:
        """Hand in a fact from the trio thread. Facts are few: each watcher tells its own once."""
        self._facts.append(fact)
        self._wake.set()

    async def run(self, executor: Executor, after: Callable[[State], None]) -> State:
        """Take facts until the phase is `ended`; return the last state. `after` sees the state that follows each."""
        while self.state.phase is not Phase.ENDED:
            self._take(await self._next(), executor)
            after(self.state)
        return self.state

    async def _next(self) -> Fact:
        while True:
            now = self._now()
            due = min(self.timers, key=self.timers.__getitem__, default=None)
            if due is not None and self.timers[due] <= now:
                del self.timers[due]
                return TimerFired(due)
            if self._facts:
                return self._facts.popleft()
            self._wake = trio.Event()
            with trio.move_on_after(self.timers[due] - now if due is not None else float("inf")):
                await self._wake.wait()

    def _take(self, fact: Fact, executor: Executor) -> None:
        try:
            self.state, wanted = step(self.state, fact, Moment(self._now(), self._jitter()), self._policy, TABLE)
        except ImpossibleFact as fault:
            self._on_fault(fault)
            return
        for order in wanted:
            if isinstance(order, orders.SetTimer):
                self.timers[order.timer] = order.at
            elif isinstance(order, orders.ClearTimer):
                self.timers.pop(order.timer, None)
            else:
                executor.execute(order)
