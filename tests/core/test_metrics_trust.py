"""Metrics that do not fit our own account: who contradicts it, when that is said, and that nobody restarts on it."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from fakes.life import SETTLED, START, Engine, Life
from vllm_supervisor.core.metrics_trust import FROZEN_AFTER, Trust, compare
from vllm_supervisor.core.samples import DoorSample, EngineSeries, MetricsSample, ProcessSample, ScrapeFault
from vllm_supervisor.core.words import Verdict

DOOR = DoorSample(0, 0, None, None, 0, engine_5xx=0, engine_5xx_since=None, last_success_at=None)
RESTARTING = {Verdict.STUCK, Verdict.FAILING}

Read = tuple[int, EngineSeries | ScrapeFault | None]  # requests served so far, and what was read


def one(output: float | None = 0.0, **more: float | None) -> EngineSeries:
    """Give the series of engine 0."""
    return EngineSeries("0", running=0.0, waiting=0.0, output_tokens=output, **more)  # type: ignore[arg-type]


def told(reads: Iterable[Read], *, alternating: bool = False) -> Trust:
    """Compare read by read."""
    trust = Trust()
    for at, (served, read) in enumerate(reads):
        sample = None
        if isinstance(read, ScrapeFault):
            sample = MetricsSample(float(at), fault=read)
        elif read is not None:
            sample = MetricsSample(float(at), (read,))
        trust = compare(trust, sample, replace(DOOR, served=served), alternating=alternating)
    return trust


FITS: dict[str, list[Read]] = {
    "nothing happens": [(0, one())] * 9,
    "every request moves them": [(n, one(float(10 * n))) for n in range(9)],
    "they move a read later": [(0, one()), (1, one()), (1, one(9)), (2, one(9)), (2, one(18))],
    "many requests between two reads": [(0, one(5)), (50, one(500)), (50, one(500)), (50, one(500))],
    "a cache answered two": [(0, one(5)), (2, one(5)), *[(2, one(5))] * 9],
    "nothing was read": [(0, one(5)), *[(n, None) for n in range(9)]],
    "no read succeeded": [(0, one(5)), *[(n, ScrapeFault.TIMEOUT) for n in range(9)]],
    "a counter is missing once": [(0, one(5)), (0, one(None)), (0, one(5)), (0, one(6))],
    "a counter appears with the first request": [(0, one(None)), (1, one(None)), (1, one(9)), (2, one(18))],
    "requests run long": [(0, one(5))] * 500,
}
CONTRADICTS: dict[str, tuple[list[Read], str]] = {
    "zeros": ([(0, one()), (1, one()), (1, one()), (1, one())], "stay at 0 although a request completed"),
    "gauges without any counter": ([(0, one(None)), (1, one(None)), (1, one(None)), (1, one(None))], "stay at 0"),
    "frozen": ([(0, one(5)), *[(FROZEN_AFTER, one(5))] * 3], f"stand still although {FROZEN_AFTER} requests"),
    "frozen later": ([(0, one(5)), (4, one(9)), *[(8, one(9))] * 3], "stand still although 4 requests"),
    "backwards": ([(0, one(100)), (0, one(5))], "a counter fell (output tokens: 100, then 5)"),
    "backwards after a gap": ([(0, one(100)), (0, None), (1, one(5))], "a counter fell"),
    "a jump and back": ([(0, one(1)), (1, one(1e18)), (2, one(3))], "a counter fell"),
}


@pytest.mark.parametrize("name", FITS)
def test_what_fits_is_believed(name: str) -> None:
    """Counters that move with our requests, late ones, and reads that tell nothing contradict nobody."""
    assert told(FITS[name]).dropped == ""


@pytest.mark.parametrize("name", CONTRADICTS)
def test_what_contradicts_is_dropped_with_its_reason(name: str) -> None:
    """Counters that ignore completed requests or fall are dropped, with numbers, and stay so."""
    reads, said = CONTRADICTS[name]
    trust = told(reads)
    assert said in trust.dropped
    assert told([*reads, (99, one(1000)), (99, one(2000))]).dropped == trust.dropped


def test_one_read_too_few_says_nothing_yet() -> None:
    """The metrics may be late: before the second read after a completion nothing is concluded."""
    for reads, _said in (CONTRADICTS["zeros"], CONTRADICTS["frozen"]):
        assert told(reads[:-1]).dropped == ""


def test_alternating_start_times_are_several_processes() -> None:
    """An engine of ours has one start time."""
    assert "alternate" in told([(0, one())], alternating=True).dropped


def test_any_engine_that_moves_speaks_for_the_source() -> None:
    """Of several engines one that moves is enough: the requests may all have gone there."""
    trust = Trust()
    for served in range(20):
        engines = (one(5), replace(one(float(served)), engine="1"))
        trust = compare(trust, MetricsSample(0.0, engines), replace(DOOR, served=served), alternating=False)
    assert trust.dropped == ""


# -- played as lives of an engine: none of these is ever restarted -------------------------------------------------------

WORKS = {"running": 4, "tokens_s": 126, "steps_s": 41, "finished_s": 0.5}


def zeros(_now: float, series: EngineSeries) -> EngineSeries:
    """Show every series, at 0."""
    return EngineSeries(series.engine, 0, 0, 0, 0, 0, 0, 0, 0)


def frozen(_now: float, series: EngineSeries) -> EngineSeries:
    """Show what some other process once counted."""
    return EngineSeries(series.engine, 5, 2, 0.5, 100, 2000, 3000, 100, 40)


def gauges(_now: float, series: EngineSeries) -> EngineSeries:
    """Show nothing but gauges."""
    return EngineSeries(series.engine, running=1, waiting=0)


def jumping(now: float, series: EngineSeries) -> EngineSeries:
    """Show another process's counters at every other read."""
    return series if int(now / 5) % 2 else EngineSeries(series.engine, 5, 0, 0.5, 1e6, 1e6, 1e6, 1e6, 1e6)


def first_alone(_now: float, series: EngineSeries) -> EngineSeries | None:
    """Show the first engine alone, which has not moved for long."""
    return EngineSeries("0", 3, 0, 0.2, 7, 7, 7, 7, 7) if series.engine == "0" else None


Shown = Callable[[float, EngineSeries], EngineSeries | None]


@pytest.mark.parametrize("shown", [zeros, frozen, gauges, jumping, first_alone])
@pytest.mark.parametrize("answers", ["streams", "whole"])
def test_no_restart_on_metrics_that_contradict_us(shown: Shown, answers: str) -> None:
    """Requests complete, then one computes for half an hour in silence: the metrics are dropped and named, no restart."""
    life = Life(
        [Engine("0", **WORKS), Engine("1", **WORKS)] if shown is first_alone else [Engine(**WORKS)],  # type: ignore[arg-type]
        beacon=False,
        completions_s=0.2,
        shown=shown,
    )
    cpu = [0.0]

    def compute(_passed: float) -> None:
        cpu[0] += 5.0
        life.processes = ProcessSample(alive=True, api_cpu=1.0, core_cpu=cpu[0])

    life.users(4, silent=None if answers == "streams" else 0.0)
    life.run(300, compute)
    assert life.last.dropped
    assert life.last.evidence["metrics_dropped"] == life.last.dropped
    assert life.last.source == "front door"
    life.completions_s = 0.0
    begin = life.now
    life.run(1800, lambda passed: (compute(passed), life.users(1, silent=life.now - begin)))  # type: ignore[func-returns-value]
    assert not life.verdicts & RESTARTING
    # Real silence, without a cycle of work, is still a hang by our own account.
    life.run(800, lambda _passed: life.users(1, silent=life.now - begin))
    assert life.last.verdict is Verdict.STUCK


def test_a_first_request_of_half_an_hour_behind_zeros() -> None:
    """Before anything has completed zeros prove nothing either way: an engine that computes has an hour."""
    life = Life([Engine()], beacon=False, shown=zeros, ready_at=SETTLED)
    begin, cpu = life.now, [0.0]

    def wait(_passed: float) -> None:
        cpu[0] += 5.0
        life.processes = ProcessSample(alive=True, core_cpu=cpu[0])
        life.users(1, silent=life.now - begin)

    life.run(1800, wait)
    assert not life.verdicts & RESTARTING
    assert not life.last.dropped


def test_a_stale_gauge_and_a_new_request() -> None:
    """Gauges that stayed up for hours on an idle engine give the next request its whole wait, with no probe at hand."""
    life = Life([Engine(gauges=(5, 0), output=900.0)], beacon=False)
    life.run(4 * 3600)
    begin = life.now
    life.run(700, lambda _passed: life.users(1, silent=life.now - begin))
    assert not life.verdicts & RESTARTING
    life.run(60, lambda _passed: life.users(1, silent=life.now - begin))
    assert life.last.verdict is Verdict.STUCK


def test_an_engine_that_leaves_the_metrics_takes_its_gauges_with_it() -> None:
    """A label that is shown no more holds no demand for ever after."""
    life = Life([Engine("0", **WORKS), Engine("1", running=3)], beacon=False, completions_s=0.2)  # type: ignore[arg-type]
    life.users(2, silent=0.0)
    life.run(60)
    assert life.last.running == 7
    life.shown = lambda _now, series: series if series.engine == "0" else None
    life.run(60)
    assert life.last.running == 4


def test_a_proxy_of_ours_is_no_reason_to_judge_nothing() -> None:
    """Alternating start times of our own engine drop the metrics; the front door's account goes on."""
    life = Life([Engine(**WORKS)], beacon=False, completions_s=0.2)  # type: ignore[arg-type]
    life.users(2, silent=None)
    for start in (1.0, 2.0, 1.0, 2.0):
        life.start = start
        life.run(5)
    assert "alternate" in life.last.dropped
    assert life.last.verdict is Verdict.BUSY


def test_a_beacon_that_stands_still_while_requests_complete() -> None:
    """A step that never ends by the beacon, while answers complete, is the beacon's mistake: dropped, never a restart."""
    life = Life([Engine(running=2, open_tokens=2, output=50.0)], completions_s=0.5)
    life.users(2, silent=None)
    life.run(600, lambda _passed: life.users(2, silent=None))
    assert "no step has ended" in life.last.beacons_dropped
    assert life.last.evidence["beacons_dropped"] == life.last.beacons_dropped
    assert not life.verdicts & RESTARTING


def test_another_engine_begins_with_new_trust() -> None:
    """The next incarnation's metrics are compared from the beginning."""
    life = Life([Engine(**WORKS)], beacon=False, completions_s=0.2, shown=zeros)  # type: ignore[arg-type]
    life.users(2, silent=None)
    life.run(60)
    assert life.last.dropped
    life.incarnation, life.shown, life.now = 2, None, START + 1000.0
    life.run(60)
    assert not life.last.dropped
    assert life.last.source == "metrics"


def test_a_foreign_server_is_never_compared() -> None:
    """`check` has no account of its own, so nothing of what it reads can contradict one."""
    life = Life([Engine(**WORKS)], beacon=False, door=None, incarnation=None, shown=frozen)  # type: ignore[arg-type]
    life.run(600)
    assert not life.last.dropped
