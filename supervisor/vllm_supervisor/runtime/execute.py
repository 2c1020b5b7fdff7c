"""Carries out the lifecycle's orders. It adds no decision: each order has one hand that does it."""

from collections.abc import Callable
from typing import Any

import trio

from vllm_supervisor.adapters import clock
from vllm_supervisor.core import facts, orders
from vllm_supervisor.core.admission import Gate, OpenRequest
from vllm_supervisor.core.events import Events
from vllm_supervisor.core.facts import Fact
from vllm_supervisor.core.lifecycle import State
from vllm_supervisor.core.words import EngineState
from vllm_supervisor.runtime.engine_room import EngineRoom


class Hands:
    """The executor of `loop.Loop`."""

    def __init__(
        self,
        *,
        gate: Gate,
        room: EngineRoom,
        events: Events,
        log: Any,
        tell: Callable[[Fact], None],
        document: Callable[[State], None],
        after: Callable[[State], None],
    ) -> None:
        """`document` starts writing down how everything ended and tells `Documented`; `after` sees each new state."""
        self._gate = gate
        self._room = room
        self._events = events
        self._log = log
        self._tell = tell
        self._document = document
        self._after = after
        self._watching = False
        gate.on_release(self._released)

    def execute(self, order: orders.Order, state: State) -> None:
        """Carry out one order."""
        match order:
            case orders.Sweep():
                self._room.sweep()
            case orders.Spawn(incarnation=number):
                self._room.spawn(number)
            case orders.Terminate():
                self._room.terminate()
            case orders.KillTree():
                self._room.kill_tree()
            case orders.CloseGate(reason=reason, sentence=sentence):
                self._gate.close(reason, sentence)
            case orders.OpenGate(reason=reason):
                self._gate.reopen(reason)
            case orders.CutInFlight(cut=cut):
                self._gate.cut_all(cut)
            case orders.WatchDrain():
                self._watching = True
                self._released(None)
            case orders.Record():
                self.record(order)
            case orders.Document():
                self._document(state)
            case orders.End():
                pass

    def record(self, order: orders.Record) -> None:
        """Say it once: to the log and to `events`."""
        fields = dict(order.fields)
        self._events.add(order.event, order.sentence, at=clock.stamp(), level=order.level, **fields)
        getattr(self._log, order.level)(order.event, sentence=order.sentence, **fields)

    def _released(self, _request: OpenRequest | None) -> None:
        if self._watching and self._gate.in_flight == 0:
            self._watching = False
            self._tell(facts.Drained())
