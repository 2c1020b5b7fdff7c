"""Carries out the lifecycle's orders. It adds no decision: each order has one hand that does it."""

from collections.abc import Callable

from vllm_supervisor.core import facts, orders
from vllm_supervisor.core.admission import Gate
from vllm_supervisor.core.drain_report import CutRequest
from vllm_supervisor.core.facts import Fact
from vllm_supervisor.core.words import Cut, Phase, RequestClass
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
        enter: Callable[[Phase], None],
        save_evidence: Callable[[str], None],
        await_memory: Callable[[float], None],
        background: Callable[[], list[tuple[str, float]]],
        awaited: Callable[[], bool],
        leaving: Callable[[], bool],
        now: Callable[[], float],
    ) -> None:
        """`record` says an event once; `document` writes down how everything ended and then tells `Documented`.

        `enter` takes the new phase; `save_evidence` writes a bundle for a cause and then tells `EvidenceSaved`. `background`
        lists the answered requests that run on (id, admitted at); `awaited` says whether the engine may still confirm an end.
        `await_memory` waits until the moment it is given at most, and then tells whether there is memory for an engine.
        """
        self._gate = gate
        self._room = room
        self._record = record
        self._tell = tell
        self._document = document
        self._enter = enter
        self._save_evidence = save_evidence
        self._await_memory = await_memory
        self._now = now
        self._background = background
        self._awaited = awaited
        self._leaving = leaving
        self.cut: list[CutRequest] = []  # by the end of our own drain, at most what may be in flight at once
        self._cut_ever = 0  # by the end of any drain, an ordered restart's as well
        self._watched: tuple[Callable[[], bool], Fact] | None = None
        gate.on_release(lambda _request: self.look())

    def execute(self, order: orders.Order) -> None:
        """Carry out one order."""
        match order:
            case orders.Sweep():
                self._room.sweep()
            case orders.AwaitMemory(until=until):
                self._await_memory(until)
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
                self._cut(cut)
            case orders.WatchDrain():
                self._watch(self._empty, facts.Drained())
            case orders.WatchCut():
                self._watch(self._accounted, facts.CutSettled())
            case orders.Record():
                self._record(order)
            case orders.EnterPhase(phase=phase):
                self._enter(phase)
            case orders.SaveEvidence(cause=cause):
                self._save_evidence(cause)
            case orders.Document():
                self._document()
            case orders.End():
                pass

    @property
    def cuts(self) -> tuple[int, int]:
        """How many requests the end of a drain has cut: in this run, and of these by the end of our own."""
        return self._cut_ever, len(self.cut)

    def look(self) -> None:
        """See whether what is watched for holds by now; called whenever something ended here or in the engine."""
        if self._watched is None:
            return
        condition, fact = self._watched
        if condition():
            self._watched = None
            self._tell(fact)

    def _watch(self, condition: Callable[[], bool], fact: Fact) -> None:
        self._watched = condition, fact
        self.look()

    def _empty(self) -> bool:
        return self._gate.in_flight == 0 and not self._background()

    def _accounted(self) -> bool:
        return self._gate.in_flight == 0 and not self._awaited()

    def _cut(self, cut: Cut) -> None:
        """End what is in flight; what the end of our drain cuts is remembered for its report."""
        self._watched = None  # who waits for the work to end by itself must not take the cut for that
        now = self._now()
        running_on = self._background()
        ended = self._gate.cut_all(cut)
        if cut is not Cut.DRAIN_DEADLINE:
            return
        self._cut_ever += len(ended) + len(running_on)
        if not self._leaving():
            return
        self.cut += [CutRequest(request.id, request.request_class, now - request.admitted_at) for request in ended]
        self.cut += [CutRequest(name, RequestClass.RESPONSES, now - admitted_at) for name, admitted_at in running_on]
