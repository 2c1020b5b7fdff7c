"""The watch over a ready engine, with the real gate and prober: never a probe beside a user, whatever the order."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Self

import pytest
import trio

from fakes.door import FakeJournal, in_trio
from fakes.scripted_http import Script, Seen, serving
from vllm_supervisor.adapters import clock, engine_probe
from vllm_supervisor.adapters.engine_probe import Site
from vllm_supervisor.core.address import Address
from vllm_supervisor.core.admission import Gate, OpenRequest
from vllm_supervisor.core.facts import Condemned, Fact
from vllm_supervisor.core.lifecycle import Node
from vllm_supervisor.core.situation import HealthPolicy
from vllm_supervisor.core.words import ClosedReason, RequestClass, Verdict
from vllm_supervisor.runtime import watch as watching
from vllm_supervisor.runtime.door_account import DoorAccount
from vllm_supervisor.runtime.watch import Watch

IDLE = (
    'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{engine="0"} 0\n'
    'vllm:generation_tokens_total{engine="0"} 5\nprocess_start_time_seconds 1\n'
)


class Engine:
    """Answers like an idle vLLM; every field may be changed meanwhile."""

    def __init__(self) -> None:
        self.metrics: object = (200, IDLE)
        self.work: Callable[[], object] = lambda: (200, "{}")

    def __call__(self, seen: Seen) -> object:
        """Answer one request."""
        if seen.path == "/metrics":
            return self.metrics
        if seen.path == "/v1/completions":
            return (405, "") if seen.method == "GET" else self.work()
        return 404, ""


class Ledger:
    """Takes readings and keeps none of them."""

    def counts(self, reported: int, began: float) -> None:
        """Take a reading."""


@dataclass
class Rig:
    """A watch at work, and what it said and did."""

    engine: Engine
    script: Script
    gate: Gate
    watch: Watch
    state: SimpleNamespace
    told: list[Fact] = field(default_factory=list)
    said: list[tuple[str, str]] = field(default_factory=list)

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait until something is so; the test's own time limit ends the wait."""
        while not holds():  # noqa: ASYNC110 - the watch has no event for each of the things a test waits for
            await trio.sleep(0.002)

    async def judged(self, verdict: Verdict) -> None:
        """Wait for a verdict."""
        await self.until(lambda: self.watch.judgement is not None and self.watch.judgement.verdict is verdict)

    def fail(self) -> None:
        """Let five requests of users have ended in errors of the engine, since a second."""
        account = self.watch._account
        account._errors, account._errors_since = 5, clock.monotonic() - 1.0

    def admit(self) -> OpenRequest:
        """Let a user's request in."""
        admitted = self.gate.admit(RequestClass.CHAT, clock.monotonic())
        assert isinstance(admitted, OpenRequest)
        return admitted


@asynccontextmanager
async def rig(
    *, interval: float = 0.01, probe_interval: float = 0.01, failing_after: float = 0.05
) -> AsyncIterator[Rig]:
    """Watch a scripted engine that has been ready for an hour."""
    engine, numbers = Engine(), iter(range(10**6))
    gate = Gate(limit=10, new_id=lambda: f"led-{next(numbers)}")
    gate.reopen(ClosedReason.STARTING)
    told: list[Fact] = []
    said: list[tuple[str, str]] = []
    async with serving(engine) as (script, address):
        child = SimpleNamespace(id=SimpleNamespace(pid=os.getpid()))
        body = SimpleNamespace(number=1, child=child, tree=SimpleNamespace(look=list), address=address, beacon=None)
        state = SimpleNamespace(node=Node.READY, ready_at=clock.monotonic() - 3600.0)
        parts: Any = {
            "state": lambda: state,
            "current": lambda: incarnation,
            "journal": Ledger(),
            "testimony": SimpleNamespace(read=tuple),
        }
        incarnation = SimpleNamespace(body=body, address=address)
        watch = Watch(
            gate=gate,
            account=DoorAccount(FakeJournal(), gate, clock.monotonic, late=lambda: None, ledger_failed=lambda: None),
            policy=HealthPolicy(waits=(60.0, 60.0), waits_slow=(60.0, 60.0), failing_after=failing_after),
            interval=interval,
            probe_interval=probe_interval,
            api_key=None,
            tell=told.append,
            say=lambda event, sentence, _level: said.append((event, sentence)),
            **parts,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.run)
            yield Rig(engine, script, gate, watch, state, told, said)
            nursery.cancel_scope.cancel()


class Arrival(trio.abc.Instrument):
    """Lets a user's request arrive after a given number of steps of the loop, counted from the first probe's start."""

    def __init__(self, rig: Rig, step: int) -> None:
        self.rig = rig
        self.left = step
        self.request: OpenRequest | None = None
        self.came = trio.Event()

    def after_task_step(self, _task: trio.lowlevel.Task) -> None:
        """Count; every order of arrival and probe is one number of steps."""
        prober = self.rig.watch._prober
        if self.request is None and prober is not None and prober.sent:
            if self.left == 0:
                self.request = self.rig.admit()
                assert not prober.probing, "a probe was not withdrawn by the request that came"
                self.came.set()
            self.left -= 1


@pytest.mark.parametrize("third", [0, 1, 2])
@in_trio
async def test_a_user_may_arrive_at_any_step_of_a_probe(third: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever a user's request arrives, nothing of a probe is sent until it has left; then probes go on."""
    connect = engine_probe._connect
    current: list[Rig] = []

    class Spy:
        """A connection that looks at the gate whenever the request of a probe goes out."""

        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aenter__(self) -> Self:
            return self

        async def __aexit__(self, *_: object) -> None:
            await self._stream.aclose()

        async def send_all(self, data: bytes) -> None:
            """Send."""
            await trio.lowlevel.checkpoint_if_cancelled()  # the real one begins with this
            if data.startswith(b"POST"):
                assert not current[-1].gate.open, "a probe was sent beside a user's request"
            await self._stream.send_all(data)

        async def receive_some(self, most: int) -> bytes:
            """Receive."""
            received: bytes = await self._stream.receive_some(most)
            return received

    async def spied(address: Address, site: Site) -> Any:
        return Spy(await connect(address, site))

    monkeypatch.setattr(engine_probe, "_connect", spied)
    for step in range(third, 60, 3):
        async with rig() as one:
            current.append(one)
            arrival = Arrival(one, step)
            trio.lowlevel.add_instrument(arrival)
            try:
                await arrival.came.wait()
            finally:
                trio.lowlevel.remove_instrument(arrival)
            assert arrival.request is not None
            looks = one.watch.samples[-1].at
            await one.until(lambda looks=looks, one=one: sum(look.at > looks for look in one.watch.samples) >= 3)
            posts = one.script.count("POST")
            one.gate.release(arrival.request)
            await one.until(lambda posts=posts, one=one: one.script.count("POST") > posts)


@in_trio
async def test_asked_looks_leave_the_regular_ones_alone() -> None:
    """However often somebody asks, there is one look more in a second, and the regular ones come in time."""
    async with rig(interval=0.3, probe_interval=0) as one:
        await one.until(lambda: one.watch.samples)
        first = one.watch.samples[0].at
        with trio.move_on_after(1.0):
            while True:
                one.watch.look_now()
                await trio.sleep(0.001)
        await one.until(lambda: one.watch.samples[-1].at >= first + 1.2)
        times = [sample.at - first for sample in one.watch.samples]
        assert len(times) <= 8
        assert max(after - before for before, after in pairwise(times)) < 0.9


@in_trio
async def test_lateness_and_suspension_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that stood still, and a machine that slept, both show in the next sample as lateness."""
    slept = [0.0]
    monkeypatch.setattr(watching, "_suspended", lambda: slept[0])
    async with rig(interval=0.05, probe_interval=0) as one:
        await one.until(lambda: one.watch.samples)
        slept[0] = 3600.0
        await one.until(lambda: one.watch.samples[-1].late >= 3600.0)
        clock_now = clock.monotonic()
        while clock.monotonic() < clock_now + 0.4:  # nothing else runs meanwhile, as in a process that was stopped
            pass
        await one.until(lambda: one.watch.samples[-1].at > clock_now)
        assert [look.late >= 0.3 for look in one.watch.samples if look.at > clock_now] == [
            True
        ]  # and no burst after it


@in_trio
async def test_failing_closes_admission_while_the_probe_decides() -> None:
    """Errors in a row close admission; an answered probe opens it again, and nobody is condemned."""
    async with rig() as one:
        await one.judged(Verdict.IDLE)
        one.engine.work = _never
        one.fail()
        await one.judged(Verdict.FAILING)
        assert one.gate.reason is ClosedReason.RESTARTING
        one.engine.work = lambda: (200, "{}")
        one.watch._withdraw()
        await one.judged(Verdict.IDLE)
        assert one.gate.reason is None
        assert not one.told


@in_trio
async def test_failing_without_a_possible_probe_leaves_admission_open() -> None:
    """Where no probe can be sent, users' requests are the only ones that can find the engine well again."""
    async with rig(probe_interval=0) as one:
        await one.judged(Verdict.IDLE)
        one.fail()
        await one.judged(Verdict.FAILING)
        assert one.gate.reason is None
        assert not one.told


@in_trio
async def test_an_engine_that_refuses_is_proven_by_its_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens any more: unreachable, then two refused probes condemn it as failing."""

    async def refuse(_address: Address, _site: Site) -> object:
        await trio.lowlevel.checkpoint()
        raise ConnectionRefusedError

    async with rig(failing_after=0.1) as one:
        await one.judged(Verdict.IDLE)
        monkeypatch.setattr(engine_probe, "_connect", refuse)
        await one.until(lambda: one.told)
        assert [type(fact) for fact in one.told[:1]] == [Condemned]
        assert "probes in a row failed" in one.told[0].sentence  # type: ignore[union-attr]


@in_trio
async def test_a_change_of_verdict_is_said_once() -> None:
    """Going to sleep and waking are one event each, whatever the number of looks; admission follows."""
    async with rig(probe_interval=0) as one:
        await one.judged(Verdict.IDLE)
        one.engine.metrics = (200, IDLE + 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0\n')
        await one.judged(Verdict.ASLEEP)
        assert one.gate.reason is ClosedReason.ASLEEP
        looks = one.watch.samples[-1].at
        await one.until(lambda: one.watch.samples[-1].at > looks + 0.1)
        one.engine.metrics = (200, IDLE)
        await one.judged(Verdict.IDLE)
        assert one.gate.reason is None
        assert [sentence.split(":")[0] for event, sentence in one.said if event == "verdict"] == ["asleep", "idle"]


async def _never() -> object:
    await trio.sleep_forever()
    raise AssertionError
