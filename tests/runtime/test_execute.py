"""The executor's watches: when what is waited for counts as having come."""

from vllm_supervisor.core import facts, orders
from vllm_supervisor.core.admission import Gate, OpenRequest
from vllm_supervisor.core.facts import Fact
from vllm_supervisor.core.words import ClosedReason, Cut, RequestClass
from vllm_supervisor.runtime.execute import Hands


class Stage:
    """Hands over one gate with nothing else behind them; `told` are the facts, `awaited` what the engine still owes."""

    def __init__(self) -> None:
        self.told: list[Fact] = []
        self.awaited = False
        self.leaving = True
        self.gate = Gate(limit=8, new_id=iter("abcdefgh").__next__)
        self.gate.reopen(ClosedReason.STARTING)
        self.hands = Hands(
            gate=self.gate,
            room=None,  # type: ignore[arg-type]  # no order of these tests is about an engine
            record=lambda _order: None,
            tell=self.told.append,
            document=lambda: None,
            enter=lambda _phase: None,
            save_evidence=lambda _cause: None,
            await_memory=lambda _until: None,
            background=list,
            awaited=lambda: self.awaited,
            leaving=lambda: self.leaving,
            now=lambda: 10.0,
        )

    def admit(self) -> OpenRequest:
        """Let in a request whose exchange a cut ends at once, as one does whose client takes all it is sent."""
        request = self.gate.admit(RequestClass.CHAT, 0.0)
        assert isinstance(request, OpenRequest)

        def cut(_cut: Cut) -> bool:
            self.gate.release(request)
            return True

        request.cut = cut
        return request


def test_work_that_ends_by_itself_is_told_once() -> None:
    """The last release is the end of the drain, and nothing after it is."""
    stage = Stage()
    first, last = stage.admit(), stage.admit()
    stage.hands.execute(orders.WatchDrain())
    stage.gate.release(first)
    assert stage.told == []
    stage.gate.release(last)
    stage.hands.look()
    assert stage.told == [facts.Drained()]


def test_a_cut_is_not_the_end_that_a_drain_waited_for() -> None:
    """All exchanges end inside the cut, yet nothing is told before the engine has confirmed what it stopped."""
    stage = Stage()
    stage.admit()
    stage.admit()
    stage.hands.execute(orders.WatchDrain())
    stage.awaited = True
    stage.hands.execute(orders.CutInFlight(Cut.DRAIN_DEADLINE))
    stage.hands.execute(orders.WatchCut())
    stage.hands.look()
    assert stage.told == []
    assert [one.id for one in stage.hands.cut] == ["a", "b"]
    stage.awaited = False
    stage.hands.look()
    assert stage.told == [facts.CutSettled()]


def test_what_a_restart_cuts_is_counted_apart_from_what_a_stop_cuts() -> None:
    """A waiting drain hears of both, the report of the stop only of its own; a dead engine's requests are no cut."""
    stage = Stage()
    for leaving, why in ((False, Cut.DRAIN_DEADLINE), (False, Cut.ENGINE_FAILED), (True, Cut.DRAIN_DEADLINE)):
        stage.admit()
        stage.leaving = leaving
        stage.hands.execute(orders.CutInFlight(why))
    assert stage.hands.cuts == (2, 1)
