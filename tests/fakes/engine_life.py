"""Feeds facts to the lifecycle on a virtual clock, and keeps what it ordered."""

from dataclasses import dataclass, field

from vllm_supervisor.core import facts, orders
from vllm_supervisor.core.cells import TABLE
from vllm_supervisor.core.facts import Timer
from vllm_supervisor.core.lifecycle import Moment, Node, Policy, State, step
from vllm_supervisor.core.restart import RestartPolicy
from vllm_supervisor.core.timeouts import Limits

POLICY = Policy(
    restart=RestartPolicy(),
    limits=Limits(
        outer=None, outer_owner="nobody", propagation=0.0, drain=60.0, engine_stop=30.0, documentation=5.0, reserve=5.0
    ),
    start_timeout=1800.0,
    stop_grace=30.0,
    on_terminal=False,
    has_notify=False,
    is_pid1=False,
)


@dataclass
class Life:
    """Feeds facts, keeps state, timers and every order given."""

    policy: Policy = POLICY
    state: State = field(default_factory=State)
    now: float = 1000.0
    given: list[orders.Order] = field(default_factory=list)
    timers: dict[Timer, float] = field(default_factory=dict)

    def tell(self, *told: facts.Fact) -> list[orders.Order]:
        """Take facts; return what the last one ordered."""
        given: list[orders.Order] = []
        for fact in told:
            self.state, given = step(self.state, fact, Moment(self.now, 0.0), self.policy, TABLE)
            for order in given:
                if isinstance(order, orders.SetTimer):
                    self.timers[order.timer] = order.at
                elif isinstance(order, orders.ClearTimer):
                    self.timers.pop(order.timer, None)
            self.given += given
        return given

    def fire(self) -> list[orders.Order]:
        """Let the earliest deadline pass."""
        timer = min(self.timers, key=self.timers.__getitem__)
        self.now = max(self.now, self.timers.pop(timer))
        return self.tell(facts.TimerFired(timer))

    def ready(self) -> "Life":
        """Bring an engine up."""
        if self.state.node is Node.BOOTING:
            self.tell(facts.Began(), facts.SweepDone())
        self.tell(facts.Spawned(100 + self.state.incarnation), facts.BecameReady())
        return self

    def crash(self, raw: int = 1) -> None:
        """End the incarnation and sweep."""
        self.tell(facts.Exited(raw), facts.SweepDone())


def kinds(given: list[orders.Order]) -> list[type]:
    """The kinds of orders, without words and timers."""
    return [type(o) for o in given if not isinstance(o, orders.Record | orders.SetTimer | orders.ClearTimer)]
