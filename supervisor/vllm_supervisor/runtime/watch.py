"""Watch over a running engine: look, judge, probe.

Rules:
* It never uses what it watches: reads of /metrics, /proc and the beacon cost the engine nothing, and a probe is sent
  only where nothing runs.
* A slow scrape holds up no look: it runs beside, one at a time, and its sample counts when it arrives.
* The lifecycle is told one thing: that an engine is condemned. What else a verdict changes (admission while asleep or
  paused, or while a probe settles whether it fails) is done here, and each change of verdict is said once.
* Our own lateness is measured at every look, a suspended machine included: what was not watched counts for nothing.
* Whoever asks for a look gets one, but not two of an engine within a second, and never moves the regular ones.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

import trio

from vllm_supervisor.adapters import clock, engine_probe
from vllm_supervisor.adapters.engine_processes import process_sample
from vllm_supervisor.core import facts, probe_policy
from vllm_supervisor.core.address import Address
from vllm_supervisor.core.admission import Gate
from vllm_supervisor.core.facts import Fact
from vllm_supervisor.core.health import Judgement, Memory, judge
from vllm_supervisor.core.lifecycle import Node, State
from vllm_supervisor.core.metrics_scan import metrics_sample
from vllm_supervisor.core.probe import IS_PAUSED_PATH, ProbeResult, Reach, says_paused
from vllm_supervisor.core.probe_policy import ProbeOrder, ProbeView
from vllm_supervisor.core.samples import BeaconSample, MetricsSample, Observation
from vllm_supervisor.core.situation import HealthPolicy
from vllm_supervisor.core.view import verdict
from vllm_supervisor.core.words import ClosedReason, Verdict, verdict_line
from vllm_supervisor.runtime.door_account import DoorAccount
from vllm_supervisor.runtime.incarnation import Incarnation
from vllm_supervisor.runtime.journal import LedgerJournal
from vllm_supervisor.runtime.prober import Prober
from vllm_supervisor.runtime.testimony import Testimony

SAMPLES_KEPT = 20
SCRAPE_WITHIN = 30.0  # seconds: a saturated front end needs long, and that is no failure
ASKED_APART = 1.0  # seconds between looks that somebody asks for
JUDGED = {Node.READY, Node.EXAMINING, Node.EMPTYING, Node.CUTTING}  # requests may be at the engine
CONDEMNING = {Verdict.STUCK, Verdict.FAILING}
UNREADY = {Verdict.DEGRADED, Verdict.FAILING, Verdict.UNREACHABLE}  # readiness is off
CLOSING = {Verdict.ASLEEP: ClosedReason.ASLEEP, Verdict.PAUSED: ClosedReason.PAUSED}
QUIET = {Verdict.IDLE, Verdict.BUSY}  # going from one to the other is no news


class Watch:
    """Judges whatever incarnation is ready; one for the supervisor's life."""

    def __init__(
        self,
        *,
        state: Callable[[], State],
        current: Callable[[], Incarnation | None],
        gate: Gate,
        account: DoorAccount,
        journal: LedgerJournal,
        testimony: Testimony,
        policy: HealthPolicy,
        interval: float,
        probe_interval: float,
        api_key: str | None,
        tell: Callable[[Fact], None],
        say: Callable[[str, str, str], None],
    ) -> None:
        """`interval` and `probe_interval` in seconds (0: never probe); `say` takes event, sentence and level."""
        self._state = state
        self._current = current
        self._gate = gate
        self._account = account
        self._journal = journal
        self._testimony = testimony
        self._policy = policy
        self._interval = interval
        self._probe_interval = probe_interval
        self._api_key = api_key
        self._tell = tell
        self._say = say
        self._memory = Memory()
        self._watched: Incarnation | None = None
        self._prober: Prober | None = None
        self._scraping = False
        self._scraped: MetricsSample | None = None
        self._paused: bool | None = None
        self._tells_pause = True
        self._offset = 0.0
        self._settling = False  # admission is closed for a probe that is to settle `failing`
        self._wanted = trio.Event()
        self._looked = trio.Event()
        self.samples: deque[Observation] = deque(maxlen=SAMPLES_KEPT)
        self.judgement: Judgement | None = None
        self.beacons: tuple[BeaconSample, ...] = ()
        self.probes: Counter[str] = Counter()
        self.scrapes: Counter[str] = Counter()
        gate.on_admit(self._withdraw)

    async def run(self) -> None:
        """Look every interval, and at once when somebody asks."""
        looked, self._offset = clock.monotonic(), _suspended()
        due = looked + self._interval
        async with trio.open_nursery() as nursery:
            while True:
                self._wanted = trio.Event()
                with trio.move_on_after(max(0.0, due - clock.monotonic())):  # the clock ran on since it was set
                    await self._wanted.wait()
                now = clock.monotonic()
                if now < due and now - looked < ASKED_APART and self.judgement is not None:
                    continue
                self._look(nursery, max(0.0, now - due) + self._slept())
                self._looked.set()
                self._looked = trio.Event()
                looked = now
                if now >= due:  # a late one is not made up for by a burst
                    due = due + self._interval if due + self._interval > now else now + self._interval

    def look_now(self) -> None:
        """Look at once, unless that was done within the last second."""
        self._wanted.set()

    async def judged(self) -> Judgement:
        """Return what the engine is just now; one that nobody has looked at yet is looked at first.

        Of an engine that is not to be judged, its life says what is known, as in the status.
        """
        if self.judgement is None and self._state().node in JUDGED:
            looked = self._looked
            self.look_now()
            with trio.move_on_after(ASKED_APART):  # nobody looks any more once we are ending
                await looked.wait()
        return self.judgement or self._of_its_life()

    def _of_its_life(self) -> Judgement:
        said, sentence = verdict(self._state(), self._gate)
        now = clock.monotonic()
        return Judgement(
            at=now,
            verdict=said,
            sentence=sentence,
            evidence={"in_flight": self._gate.in_flight},
            since=now,
            source="life of the engine",
            confirmed=False,
            wants_probe=False,
            restarted=False,
            running=None,
            waiting=None,
            tokens_per_s=None,
            steps_per_s=None,
            progress_at=None,
        )

    # -- one look ----------------------------------------------------------------------------------------------------

    def _look(self, nursery: trio.Nursery, late: float) -> None:
        current, state, now = self._current(), self._state(), clock.monotonic()
        if current is None or state.ready_at is None or state.node not in JUDGED:
            self.forget()
            return
        if current is not self._watched:
            self._begin(current)
        assert self._prober is not None  # noqa: S101 - made by `_begin`
        seen = self._observe(current, state.ready_at, self._prober, now, late)
        self.samples.append(seen)
        self._memory, judgement = judge(self._memory, seen, self._policy)
        moved = self.judgement is None or judgement.progress_at != self.judgement.progress_at
        self._change(judgement)
        self._probe(nursery, self._prober, judgement, moved=moved, now=now)
        self._scrape(nursery, current)

    def _observe(self, current: Incarnation, ready_at: float, prober: Prober, now: float, late: float) -> Observation:
        main = current.body.child.id.pid
        self.beacons = self._testimony.read()
        if (
            self.beacons and not self._memory.trust.beacons_dropped
        ):  # for requests whose id names none of the scheduler's
            self._journal.counts(sum(one.running + one.waiting for one in self.beacons), now)
        scraped, self._scraped = self._scraped, None
        return Observation(
            at=now,
            ready_at=ready_at,
            incarnation=current.body.number,
            beacons=self.beacons,
            metrics=scraped,
            door=self._account.sample(),
            processes=process_sample(main, [member.id.pid for member in current.body.tree.look()]),
            probe=replace(prober.sample, possible=self._probe_interval > 0 and prober.possible),
            paused=self._paused,
            late=late,
        )

    def _begin(self, current: Incarnation) -> None:
        self.forget()
        self._watched = current
        self._account.begin()
        address = current.address

        async def send(request_id: str) -> ProbeResult:
            assert address is not None  # noqa: S101 - an engine without an address is never probed
            result = await engine_probe.probe(address, self._api_key, request_id=request_id)
            self.probes[result.outcome.value] += 1
            return result

        self._prober = Prober(send, clock.monotonic)
        self._prober.possible = address is not None

    def forget(self) -> None:
        """The engine is gone, or on its way: nothing of it is remembered."""
        self._withdraw()
        for reason in CLOSING.values():
            self._gate.reopen(reason)
        self._watched = self._prober = self._scraped = self.judgement = None
        self._settling = False  # whatever ended the judgement owns the gate now
        self._paused, self._tells_pause = None, True
        self.beacons = ()

    def _change(self, judgement: Judgement) -> None:
        before, self.judgement = self.judgement, judgement
        if judgement.restarted:
            self._say("restarted", "the engine's counters began a new life", "warning")
        for event, source, why, known in (
            ("metrics_dropped", "/metrics", judgement.dropped, before is not None and before.dropped),
            ("beacons_dropped", "beacon", judgement.beacons_dropped, before is not None and before.beacons_dropped),
        ):
            if why and not known:
                said = f"the engine's {source} contradicts our own account and is not judged by any more: {why}"
                self._say(event, said, "warning")
        was = None if before is None else before.verdict
        if judgement.verdict is not was and not (judgement.verdict in QUIET and (was is None or was in QUIET)):
            level = "info" if judgement.verdict in QUIET else "warning"
            self._say("verdict", verdict_line(judgement.verdict, judgement.sentence), level)
        for closing, reason in CLOSING.items():
            if judgement.verdict is closing:
                self._gate.close(reason, judgement.sentence)
            else:
                self._gate.reopen(reason)
        if self._state().node is not Node.READY:
            return
        self._settle(judgement)
        if judgement.confirmed and judgement.verdict in CONDEMNING:
            self._tell(facts.Condemned(judgement.sentence, failing=judgement.verdict is Verdict.FAILING))

    def _settle(self, judgement: Judgement) -> None:
        """Close admission while the engine fails: clients that keep asking would keep the probe away that settles it.

        Where no probe can be sent, their requests are the only ones that can find it well again: they go on.
        """
        can_probe = self._probe_interval > 0 and self._prober is not None and self._prober.possible
        wanted = judgement.verdict is Verdict.FAILING and (judgement.confirmed or can_probe)
        if wanted:
            self._gate.close(ClosedReason.RESTARTING, judgement.sentence)
        elif self._settling:
            self._gate.reopen(ClosedReason.RESTARTING)
        self._settling = wanted

    # -- signals that take time --------------------------------------------------------------------------------------

    def _scrape(self, nursery: trio.Nursery, current: Incarnation) -> None:
        if not self._scraping and current.address is not None:
            self._scraping = True
            nursery.start_soon(self._read_metrics, current)

    async def _read_metrics(self, current: Incarnation) -> None:
        began = clock.monotonic()
        try:
            assert current.address is not None  # noqa: S101 - asked by `_scrape`
            reply = await engine_probe.metrics(current.address, timeout=SCRAPE_WITHIN)
            if current is self._watched and self._tells_pause and not self.beacons:
                await self._ask_paused(current.address)
        finally:
            self._scraping = False
        if current is not self._watched:
            return
        sample = metrics_sample(clock.monotonic(), reply.reach, reply.status, reply.body)
        self.scrapes["ok" if sample.fault is None else sample.fault.value] += 1
        self._scraped = sample
        if sample.engines and not self.beacons and not self._memory.trust.dropped:
            running = [one.running for one in sample.engines]
            waiting = [one.waiting for one in sample.engines]
            if None not in running and None not in waiting:
                self._journal.counts(int(sum(filter(None, running)) + sum(filter(None, waiting))), began)

    async def _ask_paused(self, address: Address) -> None:
        """Ask whether an operator paused it, where no beacon says so; most engines do not offer the question."""
        reply = await engine_probe.exchange(address, "GET", IS_PAUSED_PATH, timeout=SCRAPE_WITHIN)
        if reply.reach is Reach.ANSWERED:
            self._paused = says_paused(reply.status, reply.body)
            self._tells_pause = self._paused is not None

    def _probe(self, nursery: trio.Nursery, prober: Prober, judgement: Judgement, *, moved: bool, now: float) -> None:
        view = ProbeView(
            verdict=judgement.verdict,
            in_flight=self._gate.in_flight,
            running=judgement.running,
            waiting=judgement.waiting,
            exact=judgement.source == "beacon",
            moving=moved,
            probing=prober.probing,
            possible=prober.possible and self._state().node is Node.READY,
            last_at=prober.last_at if prober.last_at is not None else self._state().ready_at,
            urgent=judgement.wants_probe and judgement.verdict not in QUIET,
        )
        match probe_policy.decide(view, now, self._probe_interval):
            case ProbeOrder.SEND:
                prober.start(nursery)
            case ProbeOrder.WITHDRAW:
                self._withdraw()
            case ProbeOrder.NOTHING:
                pass

    def _withdraw(self) -> None:
        if self._prober is not None and self._prober.probing:
            self.probes["withdrawn"] += 1
            self._prober.withdraw()

    def _slept(self) -> float:
        """Seconds the machine was suspended since the last look; the monotonic clock stands still meanwhile."""
        before, self._offset = self._offset, _suspended()
        return max(0.0, self._offset - before)


def _suspended() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
