"""Requests against the admission stop, ten thousand times: each is in the drain count or refused, never in between."""

import random
from dataclasses import dataclass, field

import trio

from fakes.door import in_trio, open_door
from fakes.raw_engine import Call, ok
from vllm_supervisor.core import facts, orders
from vllm_supervisor.core.admission import Gate, Rejection
from vllm_supervisor.core.cells import TABLE
from vllm_supervisor.core.drain import Stage
from vllm_supervisor.core.ledger import RequestIds
from vllm_supervisor.core.lifecycle import Moment, Node, Policy, State, step
from vllm_supervisor.core.restart import RestartPolicy
from vllm_supervisor.core.timeouts import Limits
from vllm_supervisor.core.words import ClosedReason, Cut, RequestClass
from vllm_supervisor.runtime.execute import Hands

ROUNDS, REQUESTS = 2_000, 5  # stops, and the requests each of them meets: ten thousand meetings
POLICY = Policy(
    restart=RestartPolicy(), limits=Limits(None, "nobody", 0.0, 60.0, 30.0, 5.0, 5.0), start_timeout=1.0, stop_grace=1.0,
    on_terminal=False, has_notify=False, is_pid1=False,
)  # fmt: skip


@dataclass
class Round:
    """One stop against a few requests, with the real gate, the real hands and the real table."""

    chance: random.Random
    state: State = field(default_factory=lambda: State(node=Node.READY, incarnation=1))
    at_engine: list[str] = field(default_factory=list)
    refused: int = 0
    stopped: bool = False  # the engine was told to end

    def __post_init__(self) -> None:
        self.gate = Gate(limit=100, new_id=RequestIds("run"))
        self.gate.reopen(ClosedReason.STARTING)
        self.hands = Hands(
            gate=self.gate, room=self, record=lambda _: None, tell=self.tell, document=lambda: None,
            enter=lambda _: None, save_evidence=lambda _: None, background=list, awaited=lambda: False,
            leaving=lambda: self.state.leaving, await_memory=lambda _: None, now=lambda: 0.0,
        )  # type: ignore[arg-type]  # fmt: skip

    def tell(self, fact: facts.Fact) -> None:
        """Take a fact at once, as the loop does one after the other."""
        self.state, wanted = step(self.state, fact, Moment(0.0), POLICY, TABLE)
        for order in wanted:
            if not isinstance(order, orders.SetTimer | orders.ClearTimer):
                self.hands.execute(order)

    def terminate(self) -> None:
        """Be the engine's room: TERM."""
        self.stopped = True

    async def pause(self) -> None:
        """Let others go first, or not."""
        for _ in range(self.chance.randrange(4)):
            await trio.lowlevel.checkpoint()

    async def request(self) -> None:
        """Ask for admission some time, then be at the engine for a while."""
        await self.pause()
        admitted = self.gate.admit(RequestClass.CHAT, 0.0)
        if isinstance(admitted, Rejection):
            assert self.state.leaving
            self.refused += 1
            return
        assert not self.state.leaving
        admitted.cut = self.cut
        await self.pause()
        assert not self.stopped, "the engine was told to end with an admitted request to come"
        self.at_engine.append(admitted.id)
        await self.pause()
        self.gate.release(admitted)

    def cut(self, _cut: Cut) -> bool:
        """Nobody is cut: every request ends by itself, and the drain has time."""
        raise AssertionError("cut before its end")

    async def stop(self) -> None:
        """Stop some time."""
        await self.pause()
        self.tell(facts.StopRequested("a test"))
        assert self.stopped is (self.gate.in_flight == 0)


def test_no_request_is_between_the_drain_and_the_refusal() -> None:
    """In 10,000 interleavings all admitted requests reach a living engine, the others none, and the drain waits for the last."""
    chance = random.Random(6)
    refused = admitted = 0

    async def main() -> None:
        nonlocal refused, admitted
        for _ in range(ROUNDS):
            one = Round(chance)
            async with trio.open_nursery() as nursery:
                tasks = [one.request] * REQUESTS + [one.stop]
                chance.shuffle(tasks)
                for task in tasks:
                    nursery.start_soon(task)
            assert one.stopped
            assert one.state.drain.stage is Stage.STOPPING
            assert len(one.at_engine) == one.gate.counts.accepted
            assert one.refused == one.gate.counts.rejected == REQUESTS - len(one.at_engine)
            refused += one.refused
            admitted += len(one.at_engine)

    trio.run(main)
    assert min(refused, admitted) > ROUNDS  # both ends of the race were met


@in_trio
async def test_the_front_door_admits_or_refuses_without_backend_work() -> None:
    """Over real connections, with stops at random moments: what the engine saw is exactly what was admitted."""
    seen: list[bytes] = []

    async def script(call: Call) -> None:
        while True:
            head, _ = await call.request()
            seen.append(head.split(b" ", 2)[1])
            await call.send(ok(b"{}"))

    chance = random.Random(7)
    served: list[bytes] = []
    refused: list[bytes] = []
    async with open_door(script) as door:
        numbers = iter(range(4000))
        async with trio.open_nursery() as nursery:

            async def user() -> None:
                client = await door.client()
                for number in numbers:
                    path = b"/v1/chat/completions?%d" % number
                    await client.post(path)
                    head, _ = await client.answer()
                    if head.startswith(b"HTTP/1.1 200"):
                        served.append(path)
                    else:
                        refused.append(path)
                        await client.close()
                        client = await door.client()

            async def stops() -> None:
                while True:
                    for _ in range(chance.randrange(1, 60)):
                        await trio.lowlevel.checkpoint()
                    door.gate.close(ClosedReason.STOPPING)
                    await door.idle()
                    assert len(seen) == door.gate.counts.accepted
                    await trio.lowlevel.checkpoint()
                    door.gate.reopen(ClosedReason.STOPPING)

            async def users() -> None:
                async with trio.open_nursery() as crowd:
                    for _ in range(8):
                        crowd.start_soon(user)
                nursery.cancel_scope.cancel()

            nursery.start_soon(stops)
            nursery.start_soon(users)
    assert sorted(seen) == sorted(served)
    assert len(served) + len(refused) == 4000
    assert min(len(served), len(refused)) > 50
