"""The loop takes facts in order and turns due deadlines into facts, on a virtual clock."""

from collections.abc import Callable

import trio
import trio.testing

from vllm_supervisor.core import facts, orders
from vllm_supervisor.core.lifecycle import ImpossibleFact, Node, Policy, State
from vllm_supervisor.core.restart import RestartPolicy
from vllm_supervisor.core.timeouts import Limits
from vllm_supervisor.runtime.loop import Loop

POLICY = Policy(
    restart=RestartPolicy(),
    limits=Limits(
        outer=None, outer_owner="nobody", propagation=0.0, drain=60.0, engine_stop=30.0, documentation=5.0, reserve=5.0
    ),
    start_timeout=1800.0,
    stop_grace=30.0,
    on_terminal=True,
    has_notify=False,
    is_pid1=False,
)


class Script:
    """An executor that answers orders with the facts a test lists for them, and notes when each came."""

    def __init__(self, answers: dict[type, list[facts.Fact]]) -> None:
        """`answers`: for each kind of order, the facts told when it comes."""
        self.answers = answers
        self.seen: list[tuple[float, str]] = []
        self.tell: Callable[[facts.Fact], None] = lambda _fact: None

    def execute(self, order: orders.Order) -> None:
        """Note the order and tell its facts."""
        if not isinstance(order, orders.Record):
            self.seen.append((trio.current_time() - 1000.0, type(order).__name__))
        for fact in self.answers.get(type(order), []):
            self.tell(fact)


def live(script: Script, *first: facts.Fact) -> tuple[State, list[ImpossibleFact]]:
    """Run a loop on a virtual clock that starts at 1000 s until it ends."""
    faults: list[ImpossibleFact] = []

    async def main() -> State:
        loop = Loop(POLICY, now=trio.current_time, jitter=lambda: 0.0, on_fault=faults.append)
        script.tell = loop.tell
        for fact in first:
            loop.tell(fact)
        return await loop.run(script, after=lambda _state: None)

    clock = trio.testing.MockClock(autojump_threshold=0)
    clock.jump(1000.0 - clock.current_time())
    return trio.run(main, clock=clock), faults


def test_a_deadline_becomes_a_fact_when_it_is_due() -> None:
    """A load nobody hears of ends at its start deadline, and KILL follows the short grace: to the second."""
    script = Script(
        {
            orders.Sweep: [facts.SweepDone()],
            orders.Spawn: [facts.Spawned(100)],
            orders.KillTree: [facts.Exited(-9)],
            orders.Document: [facts.Documented()],
        }
    )
    state, faults = live(script, facts.Began())
    assert faults == []
    assert [at for at, name in script.seen if name == "Terminate"] == [1800.0, 3605.5]
    assert [at for at, name in script.seen if name == "KillTree"] == [1805.0, 3610.5]
    assert (state.node, state.give_up_status) == (Node.GONE, 69)


def test_an_impossible_fact_is_reported_and_the_loop_goes_on() -> None:
    """A fault of ours neither ends the loop nor changes the state."""
    script = Script(
        {orders.Sweep: [facts.StopRequested("pid 1"), facts.SweepDone()], orders.Document: [facts.Documented()]}
    )
    state, faults = live(script, facts.SweepDone(), facts.Began())
    assert [str(fault) for fault in faults] == ["SweepDone cannot happen while booting"]
    assert state.node is Node.GONE
