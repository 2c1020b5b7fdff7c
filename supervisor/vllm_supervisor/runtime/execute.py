"""Carries out the lifecycle's orders. It adds no decision: each order has one hand that does it."""

from collections.abc import Callable

from vllm_supervisor.core import facts, orders
from vllm_supervisor.core.admission import Gate, OpenRequest
from vllm_supervisor.core.facts import Fact
from vllm_supervisor.core.lifecycle import State
from vllm_supervisor.runtime.engine_room import EngineRoom


class Hands:
    """The executor of `loop.Loop`."""

    def __init__(
        self,
        *,
        gate: Gate,
        room: EngineRoom,
        record: Callable[[orders.Record], None],
        tell: Callable[[Fact], None],
        document: Callable[[], None],
    ) -> None:
        """`record` says an event once; `document` writes down how everything ended and then tells `Documented`."""
        self._gate = gate
        self._room = room
        self._record = record
        self._tell = tell
        self._document = document
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
                self._record(order)
            case orders.Document():
                self._document()
            case orders.End():
                pass

    def _released(self, _request: OpenRequest | None) -> None:
        if self._watching and self._gate.in_flight == 0:
            self._watching = False
            self._tell(facts.Drained())
