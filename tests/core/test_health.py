"""The classifier, one recorded situation a test, on a virtual clock and at default configuration."""

from dataclasses import replace

import pytest

from fakes.life import START, Engine, Life
from vllm_supervisor.core.samples import ProbeSample, ProcessSample, ScrapeFault
from vllm_supervisor.core.situation import HealthPolicy
from vllm_supervisor.core.words import Verdict

BUSY = Verdict.BUSY
RESTARTING = {Verdict.STUCK, Verdict.FAILING, Verdict.DEAD}
both = pytest.mark.parametrize("beacon", [True, False], ids=["beacon", "metrics"])


def working(**more: object) -> Engine:
    """Make an engine in the middle of serving."""
    return Engine(running=12, waiting=3, tokens_s=126, steps_s=41, finished_s=0.5, **more)  # type: ignore[arg-type]


@both
def test_idle(beacon: bool) -> None:
    """Nothing runs and nothing waits: idle, and a probe is welcome."""
    life = Life(beacon=beacon)
    assert life.run(60).verdict is Verdict.IDLE
    assert life.last.wants_probe
    assert life.last.sentence == "idle: nothing runs and nothing waits"


@both
def test_busy_carries_rates(beacon: bool) -> None:
    """A busy verdict says how much runs, waits and moves."""
    life = Life([working()], beacon=beacon, bytes_flow=True, completions_s=0.5)
    life.users(15, silent=None)
    assert life.run(600).verdict is BUSY
    assert life.last.sentence == "busy and healthy: 12 running, 3 waiting, 126 tokens/s, 41 steps/s"
    assert life.verdicts == {BUSY}
    assert life.last.source == ("beacon" if beacon else "metrics")


@both
def test_a_long_prefill_with_flat_counts_for_505_s(beacon: bool) -> None:
    """A prefill of many steps that moves no output count for 505 s is never a hang."""
    engine = Engine(running=1, kv=0.1)
    life = Life([engine], beacon=beacon)
    life.users(1)
    if beacon:
        engine.steps_s, engine.prompt_tokens_s, engine.open_tokens, engine.open_prefill = 0.1, 0.0, 8192, True
    life.run(505)
    assert not life.verdicts & RESTARTING
    if beacon:
        assert life.verdicts == {BUSY}
    engine.tokens_s, engine.steps_s = 30, 30
    assert life.run(10).verdict is BUSY


@both
def test_a_prefill_that_moves_only_the_kv_usage(beacon: bool) -> None:
    """A rising KV usage alone is progress, for an hour."""
    engine = Engine(running=1, kv=0.0, kv_s=0.0002, open_tokens=8192, open_prefill=True)
    life = Life([engine], beacon=beacon, interval=30.0)
    life.users(1)
    life.run(3600)
    assert life.verdicts == {BUSY}


@both
def test_one_healthy_prefill_step_of_11_minutes(beacon: bool) -> None:
    """A single prefill step of 11 minutes stays below the slow waits: suspect at most, no restart."""
    engine = Engine(running=1, open_tokens=65536, open_prefill=True)
    life = Life([engine], beacon=beacon)
    life.users(1)
    life.run(660)
    assert life.verdicts <= {BUSY, Verdict.SUSPECT}
    engine.open_tokens, engine.tokens_s, engine.steps_s = 0, 30, 30
    assert life.run(5).verdict is BUSY


@pytest.mark.parametrize(("beacon", "waits"), [(True, 300), (False, 720)], ids=["beacon", "metrics"])
def test_a_hang_under_load(beacon: bool, waits: int) -> None:
    """Work without progress through both waits is stuck: after 300 s of an open decode step, 720 s of metrics alone."""
    engine = working()
    life = Life([engine], beacon=beacon)
    life.users(15, silent=None)
    life.run(600)
    engine.stop()
    engine.open_tokens = 12
    life.bytes_flow = False
    life.said.clear()
    life.run(waits - 5)
    assert life.verdicts == {BUSY, Verdict.SUSPECT}
    assert life.run(10).verdict is Verdict.STUCK
    assert life.last.confirmed
    assert life.last.evidence["no_progress_s"] >= waits  # type: ignore[operator]


def test_suspicion_comes_after_the_first_wait() -> None:
    """Between the first and the second wait the verdict is suspect, with the time that is left."""
    life = Life([Engine(running=1, open_tokens=1)])
    life.users(1)
    life.run(150)
    assert life.last.verdict is BUSY
    life.run(5)
    assert life.last.verdict is Verdict.SUSPECT
    assert "stuck in" in life.last.sentence
    assert "a decode step of 1 tokens has been open for" in life.last.sentence


def test_a_hang_in_the_first_ten_minutes_takes_the_slow_waits() -> None:
    """While kernels are still compiled by first requests an open decode step gets the slow waits."""
    life = Life([Engine(running=1, open_tokens=1)], ready_at=START)
    life.users(1)
    life.run(715)
    assert Verdict.STUCK not in life.verdicts
    assert life.run(10).verdict is Verdict.STUCK


@both
def test_a_hang_on_the_first_step_after_idle(beacon: bool) -> None:
    """Running 0 and waiting 0 with our own request unanswered is a hang all the same."""
    life = Life(beacon=beacon)
    life.run(600)
    life.users(1)
    life.run(715)
    assert Verdict.STUCK not in life.verdicts
    assert life.run(10).verdict is Verdict.STUCK
    assert life.last.evidence["what"] == "the server"


@both
def test_requests_that_are_never_scheduled(beacon: bool) -> None:
    """Requests that stay in the waiting queue without a step are a hang although nothing runs."""
    life = Life([Engine(waiting=3)], beacon=beacon)
    life.users(3)
    assert life.run(730).verdict is Verdict.STUCK
    assert life.last.waiting == 3


@both
def test_waiting_without_an_account_of_ours(beacon: bool) -> None:
    """The same for a server that is not ours: running 0, waiting 3 and flat counts."""
    life = Life([Engine(waiting=3)], beacon=beacon, door=None, processes=None, incarnation=None)
    assert life.run(730).verdict is Verdict.STUCK


@both
def test_clients_that_give_up_every_45_s(beacon: bool) -> None:
    """Clients of a hung engine that time out and come again do not stop the clock."""
    engine = Engine(running=1, open_tokens=1)
    life = Life([engine], beacon=beacon)

    def come_and_go(passed: float) -> None:
        gone = passed % 60 >= 45
        life.users(0 if gone else 1, silent=passed % 60)

    limit = 300 if beacon else 720
    life.run(limit - 10, come_and_go)
    assert Verdict.STUCK not in life.verdicts
    life.run(70, come_and_go)
    assert Verdict.STUCK in life.verdicts


def test_giving_up_clients_with_gauges_that_read_zero() -> None:
    """Even when the engine says that nothing runs, clients that come again and again prove the hang."""
    life = Life(beacon=False)
    life.run(720 + 70, lambda passed: life.users(0 if passed % 60 >= 45 else 1, silent=passed % 60))
    assert Verdict.STUCK in life.verdicts


def test_short_visits_far_apart_are_no_hang() -> None:
    """A client that comes for one tick every five minutes, and gives up, proves nothing by itself."""
    life = Life(beacon=False)
    life.run(3600, lambda passed: life.users(1 if passed % 300 < 5 else 0))
    assert Verdict.STUCK not in life.verdicts


def test_stale_gauges_after_a_mass_cancel() -> None:
    """Gauges that say 106 running with nobody there are no proof: a probe decides, and its answer ends the suspicion."""
    engine = Engine(gauges=(106, 15), kv=0.9)
    life = Life([engine], beacon=False)
    life.run(2000)
    assert not life.verdicts & RESTARTING
    assert life.last.verdict is Verdict.SUSPECT
    assert life.last.wants_probe
    engine.gauges = (0, 0)
    life.probe = ProbeSample(answered_at=life.now + 1)
    assert life.run(5).verdict is Verdict.IDLE


def test_the_beacon_sees_through_stale_gauges() -> None:
    """With a beacon the scheduler's own counts hold, whatever the gauges say."""
    assert Life([Engine(gauges=(106, 15))], interval=30.0).run(2000).verdict is Verdict.IDLE


def test_a_hang_with_nobody_there_needs_its_probe() -> None:
    """When all clients have left, the unanswered probe is the demand, and gets waits of its own."""
    life = Life([Engine(gauges=(4, 0))], beacon=False)
    life.run(720)
    life.probe = ProbeSample(sent_at=life.now)
    life.run(715)
    assert Verdict.STUCK not in life.verdicts
    assert life.run(10).verdict is Verdict.STUCK


def test_an_idle_engine_that_hangs_is_found_by_the_probe() -> None:
    """A probe without an answer on an engine that says it is idle becomes a hang after the slow waits."""
    life = Life()
    life.run(60)
    life.probe = ProbeSample(sent_at=life.now)
    life.run(715)
    assert Verdict.STUCK not in life.verdicts
    assert life.run(10).verdict is Verdict.STUCK


def test_a_failed_probe_ends_the_waits() -> None:
    """Demand through the waits plus a probe that broke off is proof."""
    life = Life([Engine(gauges=(4, 0))], beacon=False)
    life.run(725)
    assert life.last.verdict is Verdict.SUSPECT
    life.probe = ProbeSample(failed_at=life.now + 1, failures=1, failing_since=life.now + 1)
    assert life.run(5).verdict is Verdict.STUCK


def test_restarted_between_reads() -> None:
    """Another start time begins a new life: nothing is compared, and an answer is asked for."""
    engine = working(steps=1000.0, output=5000.0)
    life = Life([engine], beacon=False, door=None, processes=None, incarnation=None)
    life.run(5)
    life.engines, life.start = [Engine()], 1_700_000_777.0
    judgement = life.run(5)
    assert (judgement.verdict, judgement.restarted, judgement.wants_probe) == (Verdict.SUSPECT, True, True)
    assert judgement.sentence.startswith("restarted:")
    life.probe = ProbeSample(answered_at=life.now + 1)
    assert life.run(5).verdict is Verdict.IDLE
    assert not life.last.restarted


def test_counters_that_fall_are_another_life() -> None:
    """Where no start time is told, falling counters show the new life."""
    engine = working(output=5000.0)
    life = Life([engine], beacon=False, door=None, incarnation=None, start=None)
    life.run(5)
    life.engines = [working()]
    assert life.run(5).restarted
    assert life.run(5).verdict is BUSY


def test_counters_of_our_own_engine_may_fall() -> None:
    """Of an incarnation we know, a counter that goes back is one process's part of the whole: nothing begins anew."""
    life = Life([working(output=5000.0)], beacon=False, start=None)
    life.users(15, silent=None)
    life.run(5)
    life.engines = [working()]
    assert not life.run(5).restarted
    assert life.last.verdict is BUSY


def test_another_incarnation_is_not_compared() -> None:
    """The clock of a hung engine ends with its incarnation."""
    life = Life([Engine(running=1, open_tokens=1)])
    life.users(1)
    life.run(295)
    life.incarnation = 2
    life.run(145)
    assert Verdict.STUCK not in life.verdicts


def test_a_verdict_holds_since_its_own_incarnation_at_the_longest() -> None:
    """What was said of an engine that is gone adds nothing to how long the same verdict has held of the next one."""
    life = Life()
    life.run(600)
    life.incarnation = 2
    life.run(60)
    assert life.last.verdict is Verdict.IDLE
    assert life.last.at - life.last.since <= 60


@pytest.mark.parametrize("fault", [ScrapeFault.NO_SERIES, ScrapeFault.HTTP_ERROR])
def test_no_metrics_and_nothing_else(fault: ScrapeFault) -> None:
    """Without series, beacon and account, the server cannot be judged; it is not called idle."""
    life = Life(beacon=False, metrics=fault, status=404, door=None, processes=None, incarnation=None)
    assert life.run(2000).verdict is Verdict.UNJUDGEABLE


def test_no_metrics_with_our_account() -> None:
    """Without series our own account judges: busy while bytes flow, idle with nobody there, stuck without an answer."""
    life = Life(beacon=False, metrics=ScrapeFault.NO_SERIES)
    assert life.run(60).verdict is Verdict.IDLE
    assert "judged by the front door" in life.last.sentence
    life.users(2, silent=None)
    assert life.run(2000).verdict is BUSY
    assert "no engine series" in life.last.sentence
    life.users(2)
    life.run(715)
    assert life.last.verdict is Verdict.SUSPECT
    assert life.run(10).verdict is Verdict.STUCK


def test_a_silent_engine_that_computes() -> None:
    """Of an engine without series, CPU time alone buys half an hour of silence; without it the waits hold."""
    life = Life(beacon=False, metrics=ScrapeFault.HTTP_ERROR, status=404)
    life.users(1)

    def compute(passed: float) -> None:
        life.processes = ProcessSample(alive=True, api_cpu=1.5 * passed)

    life.run(2400, compute)
    assert Verdict.STUCK not in life.verdicts
    assert life.run(70).verdict is Verdict.STUCK


def test_cpu_time_is_no_progress_where_better_is_known() -> None:
    """A hung engine that spins is found in the same time as one that sleeps."""
    life = Life([Engine(running=1, open_tokens=1)])
    life.users(1)

    def spin(passed: float) -> None:
        life.processes = ProcessSample(alive=True, core_cpu=passed, worker_cpu=passed)

    assert life.run(305, spin).verdict is Verdict.STUCK


def test_multiprocess_metrics() -> None:
    """Values without a start time are judged like any others, and a hang is found in them."""
    engine = working()
    life = Life([engine], beacon=False, start=None)
    life.users(15, silent=None)
    assert life.run(600).verdict is BUSY
    engine.stop()
    life.bytes_flow = False
    assert life.run(730).verdict is Verdict.STUCK


@both
def test_a_slow_scrape_under_load(beacon: bool) -> None:
    """Reads that time out while bytes flow are a saturated front end: busy, for hours."""
    life = Life([working()], beacon=beacon, interval=30.0)
    life.users(64, silent=None)
    life.run(60)
    life.metrics = ScrapeFault.TIMEOUT
    life.run(7200)
    assert life.verdicts == {BUSY}


def test_a_slow_scrape_alone_is_a_suspicion() -> None:
    """A server that is not ours and gives no answer in time is neither idle nor dead."""
    life = Life(beacon=False, metrics=ScrapeFault.TIMEOUT, door=None, processes=None, incarnation=None)
    life.run(2000)
    assert life.verdicts == {Verdict.SUSPECT}


@both
def test_two_engines_one_hung(beacon: bool) -> None:
    """One engine that stands still with work is a hang, however much the other does."""
    hung = Engine("1", running=3, open_tokens=3)
    life = Life([working(label="0"), hung], beacon=beacon, completions_s=0.5)
    life.run(730, lambda passed: (life.users(18, silent=passed), setattr(life, "bytes_flow", True)))  # type: ignore[func-returns-value]
    assert life.last.verdict is Verdict.STUCK
    assert life.last.evidence["what"] == "engine 1"
    assert "engine 1" in life.last.sentence


def test_two_engines_and_a_stale_gauge() -> None:
    """Without a beacon, a gauge that stands still is no hang while every one of our requests is being answered."""
    life = Life([working(label="0"), Engine("1", gauges=(3, 0))], beacon=False, interval=30.0)
    life.users(15, silent=None)
    life.run(2000, lambda _passed: life.users(15, silent=None))
    assert not life.verdicts & RESTARTING


def test_two_engines_one_idle() -> None:
    """An engine without work beside a busy one is no finding."""
    life = Life([working(label="0"), Engine("1")], interval=30.0)
    life.users(15, silent=None)
    assert life.run(2000).verdict is BUSY
    assert life.verdicts == {BUSY}


def test_asleep() -> None:
    """An engine that was put to sleep is not stuck, and the time it slept does not count after it wakes."""
    engine = Engine(asleep=True, waiting=1)
    life = Life([engine], interval=30.0)
    life.users(1)
    assert life.run(5000).verdict is Verdict.ASLEEP
    assert life.verdicts == {Verdict.ASLEEP}
    engine.asleep = False
    assert life.run(140).verdict is BUSY


@pytest.mark.parametrize("told_by", ["beacon", "server"])
def test_paused(told_by: str) -> None:
    """A paused scheduler is an operator's will, told by the beacon or by the server."""
    life = Life(
        [Engine(running=2, waiting=4, paused=told_by == "beacon")], paused=told_by == "server" or None, interval=30.0
    )
    life.users(6)
    life.run(5000)
    assert life.verdicts == {Verdict.PAUSED}


def test_a_proxy_with_alternating_backends() -> None:
    """A start time that comes back after another one is a proxy's doing, and nothing behind it can be judged."""
    life = Life(beacon=False, door=None, processes=None, incarnation=None)
    for start in (1.0, 2.0, 1.0):
        life.start = start
        life.run(5)
    assert life.last.verdict is Verdict.UNJUDGEABLE
    assert "proxy" in life.last.sentence


def test_a_backend_that_is_gone() -> None:
    """A process that is gone is dead; an address where nobody listens is unreachable, not stuck and not busy."""
    assert Life(processes=ProcessSample(alive=False)).run(5).verdict is Verdict.DEAD
    far = Life(beacon=False, metrics=ScrapeFault.REFUSED, door=None, processes=None, incarnation=None)
    assert far.run(5).verdict is Verdict.UNREACHABLE


def test_refused_while_the_process_lives() -> None:
    """A listener that went away is not saturation; while steps still end it is not even unreachable."""
    engine = working()
    life = Life([engine])
    life.users(15, silent=None)
    life.run(60)
    life.metrics = ScrapeFault.REFUSED
    assert life.run(60).verdict is BUSY
    engine.stop()
    life.bytes_flow = False
    assert life.run(20).verdict is Verdict.UNREACHABLE
    assert "although its process lives" in life.last.sentence


def test_late_ticks_void_the_timers() -> None:
    """A machine that was suspended for an hour, or a loop that stood still, adds nothing to a clock."""
    life = Life([Engine(running=1, open_tokens=1)])
    life.users(1)
    life.run(200)
    assert life.last.verdict is Verdict.SUSPECT
    life.now += 3600
    life.late = 3600.0
    assert life.run(5).verdict is BUSY
    life.run(290)
    assert Verdict.STUCK not in life.verdicts
    assert life.run(15).verdict is Verdict.STUCK


def test_a_jit_compile_extends_the_clock_once() -> None:
    """Compilers below the engine earn one extension of ten minutes, which is said; then the hang is a hang."""
    life = Life([Engine(running=1, open_tokens=1)], processes=ProcessSample(alive=True, compilers=3))
    life.users(1)
    life.run(305)
    assert life.last.verdict is Verdict.SUSPECT
    assert "extended once by 600 s because compilers run" in life.last.sentence
    life.run(595)
    assert Verdict.STUCK not in life.verdicts
    assert life.run(10).verdict is Verdict.STUCK


def test_a_jit_compile_that_ends_well() -> None:
    """When the compiled step ends, the extension is forgotten and the next stall gets its own."""
    engine = Engine(running=1, open_tokens=1)
    life = Life([engine], processes=ProcessSample(alive=True, compilers=3))
    life.users(1)
    life.run(700)
    engine.steps_s = engine.tokens_s = 30
    assert life.run(5).verdict is BUSY
    engine.stop()
    life.run(320)
    assert "extended once" in life.last.sentence


def test_an_operators_call_on_the_engines_loop_takes_the_slow_waits() -> None:
    """While a LoRA load or another call of an operator is out, steps may stand still for longer."""
    life = Life([Engine(running=1, open_tokens=1)])
    life.users(1)
    assert life.door is not None
    life.door = replace(life.door, admin_calls=1)
    life.run(700)
    assert Verdict.STUCK not in life.verdicts


def test_a_deferred_queue_that_makes_empty_steps() -> None:
    """A scheduler that turns and schedules nothing is degraded: alarm and readiness, no restart."""
    life = Life([Engine(waiting=473, empty_steps_s=900)], interval=30.0)
    life.users(473)
    life.run(7200)
    assert life.verdicts == {BUSY, Verdict.SUSPECT, Verdict.DEGRADED}
    assert life.last.verdict is Verdict.DEGRADED
    assert not life.last.confirmed


@both
def test_a_deferred_queue_that_never_completes(beacon: bool) -> None:
    """Steps at 0.2 a second with nothing finished and hundreds waiting are degraded after a quarter of an hour."""
    life = Life([Engine(running=8, waiting=473, steps_s=0.2, tokens_s=0.2)], beacon=beacon, interval=30.0)
    life.users(473)
    life.run(870)
    assert life.verdicts == {BUSY}
    life.run(7200)
    assert life.verdicts == {BUSY, Verdict.DEGRADED}


@both
def test_steps_that_deliver_nothing(beacon: bool) -> None:
    """An engine that computes for two hours without a byte for anybody is degraded, not busy and not restarted."""
    life = Life([Engine(running=2, steps_s=20, tokens_s=40)], beacon=beacon, interval=30.0)
    begin = life.now
    life.run(7170, lambda _passed: life.users(2, silent=life.now - begin))
    assert life.verdicts == {BUSY}
    life.run(7200, lambda _passed: life.users(2, silent=life.now - begin))
    assert life.verdicts == {BUSY, Verdict.DEGRADED}
    assert "nobody has got a byte for" in life.last.sentence


@both
def test_one_long_generation_that_fills_the_only_slot(beacon: bool) -> None:
    """A generation of hours with others waiting behind it is busy, not degraded."""
    life = Life([Engine(running=1, waiting=20, steps_s=8, tokens_s=8)], beacon=beacon, interval=30.0)
    life.users(21, silent=None)
    life.run(4 * 3600)
    assert life.verdicts == {BUSY}


def failing(life: Life, count: int, since: float) -> None:
    """Let users' requests end in errors of the engine."""
    assert life.door is not None
    life.door = replace(life.door, engine_5xx=count, engine_5xx_since=since)


def test_errors_in_a_row_are_failing_and_a_probe_decides() -> None:
    """Engine-side errors for 30 s without a success ask for a probe; its failure confirms, its answer acquits."""
    life = Life()
    life.run(30)
    failing(life, 8, life.now)
    life.run(25)
    assert life.last.verdict is Verdict.IDLE
    life.run(5)
    assert (life.last.verdict, life.last.confirmed, life.last.wants_probe) == (Verdict.FAILING, False, True)
    at = life.now + 1
    life.probe = ProbeSample(failed_at=at, failures=1, failing_since=at)
    life.run(5)
    assert (life.last.verdict, life.last.confirmed) == (Verdict.FAILING, True)
    life.probe = ProbeSample(answered_at=life.now + 1, failed_at=at)
    life.run(600)
    assert life.last.verdict is Verdict.IDLE


def test_without_probes_failing_ends_by_a_trial() -> None:
    """An engine that cannot be probed is tried by requests, after ever longer waits, and a success ends it all."""
    life = Life(probe=ProbeSample(possible=False))
    life.run(30)
    errors, waits = 8, []
    failing(life, errors, life.now)
    last = life.now
    life.run(30)
    for _ in range(8):
        begun = life.now
        while life.last.verdict is Verdict.FAILING and life.now < begun + 5000:
            life.run(5)
        assert life.last.verdict is Verdict.SUSPECT
        assert "let in" in life.last.sentence
        waits.append(life.now - last)
        errors += 1
        assert life.door is not None
        life.door = replace(life.door, engine_5xx=errors)
        life.run(5)
        last = life.now
        assert (life.last.verdict, life.last.confirmed) == (Verdict.FAILING, False)
    assert waits[1:] == [60.0, 120.0, 240.0, 480.0, 600.0, 600.0, 600.0]
    assert waits[0] in {30.0, 35.0}
    life.door = replace(life.door, engine_5xx=0, engine_5xx_since=None, last_success_at=life.now)
    assert life.run(5).verdict is Verdict.IDLE
    failing(life, 3, life.now)
    life.run(30)
    assert life.verdicts & {Verdict.FAILING}
    life.said.clear()
    assert life.run(40).verdict is Verdict.SUSPECT


def test_with_probes_there_is_no_trial() -> None:
    """Where a probe can be sent it decides, however long the last error was ago."""
    life = Life()
    life.run(30)
    failing(life, 8, life.now)
    life.run(3600)
    assert life.last.verdict is Verdict.FAILING


def test_few_errors_are_not_failing() -> None:
    """Two bad requests, or errors with successes in between, are not a sick engine."""
    life = Life()
    failing(life, 2, life.now)
    life.run(600)
    assert life.verdicts == {Verdict.IDLE}
    busy = Life([working()], completions_s=1.0)
    busy.users(15, silent=None)
    failing(busy, 9, busy.now)
    busy.run(600)
    assert busy.verdicts == {BUSY}


def test_refusals_are_proof_when_they_go_on() -> None:
    """Nobody listens although the process lives: unreachable at once, failing when two probes were refused as well."""
    life = Life(beacon=False, metrics=ScrapeFault.REFUSED)
    assert (life.run(5).verdict, life.last.wants_probe) == (Verdict.UNREACHABLE, True)
    at = life.now
    life.probe = ProbeSample(failed_at=at, failures=1, failing_since=at)
    assert life.run(60).verdict is Verdict.UNREACHABLE
    life.probe = ProbeSample(failed_at=life.now, failures=2, failing_since=at)
    assert (life.run(5).verdict, life.last.confirmed) == (Verdict.FAILING, True)


def test_probes_that_fail_in_a_row_are_failing() -> None:
    """One failed probe is a suspicion; two, half a minute apart, are proof, with nobody else there."""
    life = Life()
    at = life.now
    life.probe = ProbeSample(failed_at=at, failures=1, failing_since=at)
    assert life.run(60).verdict is Verdict.SUSPECT
    life.probe = ProbeSample(failed_at=life.now, failures=2, failing_since=at)
    assert (life.run(5).verdict, life.last.confirmed) == (Verdict.FAILING, True)


def test_a_start_is_not_judged_by_steps() -> None:
    """While the engine starts there is no stall, and the clocks begin when it is ready."""
    life = Life([Engine(running=1, open_tokens=1)], ready_at=None, interval=30.0)
    life.users(1)
    life.run(10800)
    assert life.verdicts == {Verdict.STARTING}
    life.ready_at = life.now
    life.run(700)
    assert Verdict.STUCK not in life.verdicts


def test_the_day_of_the_incident() -> None:
    """A batch job that fills every slot for a day, with slow reads and complaints from outside: never a restart."""
    engine = Engine(running=8, waiting=56, tokens_s=180, steps_s=22, finished_s=0.4, kv=0.95)
    life = Life([engine], completions_s=0.4, interval=30.0)

    def day(passed: float) -> None:
        life.users(64, silent=None)
        slow = passed % 3600 < 300
        life.metrics = ScrapeFault.TIMEOUT if slow else "read"
        # Every two hours a prefill of eight minutes holds all counts.
        prefill = passed % 7200 < 480
        engine.tokens_s, engine.steps_s = (0.0, 0.0) if prefill else (180.0, 22.0)
        engine.finished_s = life.completions_s = 0.0 if prefill else 0.4
        engine.open_tokens, engine.open_prefill = (32768, True) if prefill else (0, False)
        life.bytes_flow = not prefill

    life.run(86400, day)
    assert life.verdicts <= {BUSY, Verdict.SUSPECT}


def test_what_is_remembered_does_not_grow() -> None:
    """An hour of ticks leaves as much in memory as a minute."""
    life = Life([working()], interval=30.0)
    life.users(15, silent=None)
    life.run(60)
    before = (len(life.memory.tracks), len(life.memory.starts))
    life.run(3600)
    assert (len(life.memory.tracks), len(life.memory.starts)) == before


def test_short_waits_are_obeyed() -> None:
    """Waits of fractions of a second, as tests from outside set them, work alike."""
    policy = HealthPolicy(waits=(0.5, 0.5), waits_slow=(0.5, 0.5))
    life = Life([Engine(running=1, open_tokens=1)], policy=policy, interval=0.1)
    life.users(1)
    life.run(1.0)
    assert life.last.verdict is Verdict.SUSPECT
    assert life.run(0.3).verdict is Verdict.STUCK
