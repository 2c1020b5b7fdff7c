"""When a probe may be sent and when it must go, as a table and under random interleavings."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_supervisor.core.probe import ReadyCheck, ReadyResult, Unready
from vllm_supervisor.core.probe_policy import URGENT_INTERVAL, ProbeOrder, ProbeView, decide
from vllm_supervisor.core.words import Verdict

IDLE = ProbeView(
    Verdict.IDLE, in_flight=0, running=0, waiting=0, moving=False, probing=False, possible=True, last_at=None
)
NOW, INTERVAL = 1000.0, 60.0

TABLE = [
    ("idle, never probed", IDLE, ProbeOrder.SEND),
    ("probed 59 s ago", replace(IDLE, last_at=NOW - 59), ProbeOrder.NOTHING),
    ("probed 60 s ago", replace(IDLE, last_at=NOW - 60), ProbeOrder.SEND),
    ("urgent, probed 6 s ago", replace(IDLE, last_at=NOW - 6, urgent=True), ProbeOrder.SEND),
    ("urgent, probed just now", replace(IDLE, last_at=NOW - 1, urgent=True), ProbeOrder.NOTHING),
    ("a user is there", replace(IDLE, in_flight=1, urgent=True), ProbeOrder.NOTHING),
    ("one in flight", replace(IDLE, probing=True, urgent=True), ProbeOrder.NOTHING),
    ("one in flight and a user comes", replace(IDLE, probing=True, in_flight=1), ProbeOrder.WITHDRAW),
    ("others use the engine", replace(IDLE, running=2, moving=True, verdict=Verdict.BUSY), ProbeOrder.NOTHING),
    ("stale gauges", replace(IDLE, running=106, waiting=15, verdict=Verdict.BUSY), ProbeOrder.SEND),
    (
        "a beacon's counts",
        replace(IDLE, running=1, exact=True, verdict=Verdict.SUSPECT, urgent=True),
        ProbeOrder.NOTHING,
    ),
    ("nobody listens", replace(IDLE, verdict=Verdict.UNREACHABLE, urgent=True), ProbeOrder.SEND),
    ("no gauges", replace(IDLE, running=None, waiting=None), ProbeOrder.SEND),
    ("not possible", replace(IDLE, possible=False), ProbeOrder.NOTHING),
    ("suspect with nobody there", replace(IDLE, verdict=Verdict.SUSPECT, running=4), ProbeOrder.SEND),
    ("failing", replace(IDLE, verdict=Verdict.FAILING), ProbeOrder.SEND),
    *[
        (str(verdict), replace(IDLE, verdict=verdict), ProbeOrder.NOTHING)
        for verdict in (
            Verdict.STARTING,
            Verdict.ASLEEP,
            Verdict.PAUSED,
            Verdict.DEAD,
            Verdict.STUCK,
        )
    ],
]


@pytest.mark.parametrize(("view", "order"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_table(view: ProbeView, order: ProbeOrder) -> None:
    """Each row of the table gets its order."""
    assert decide(view, NOW, INTERVAL) is order


def test_an_interval_of_zero_never_sends() -> None:
    """Probing can be switched off."""
    assert decide(replace(IDLE, urgent=True), NOW, 0.0) is ProbeOrder.NOTHING


@settings(deadline=None)
@given(st.lists(st.sampled_from(["arrive", "leave", "tick", "answer", "alarm"]), max_size=200))
def test_no_interleaving_puts_a_probe_beside_a_user(steps: list[str]) -> None:
    """Whatever the order of arrivals, ends and ticks: never two probes, and none in flight beside a user's request."""
    view, now, sent = IDLE, NOW, []
    for step in steps:
        now += 1.0
        if step == "arrive":
            view = replace(view, in_flight=view.in_flight + 1)
        elif step == "leave":
            view = replace(view, in_flight=max(0, view.in_flight - 1))
        elif step == "answer":
            view = replace(view, probing=False)
        else:
            view = replace(view, urgent=step == "alarm")
        order = decide(view, now, INTERVAL)
        if order is ProbeOrder.SEND:
            assert not view.probing
            assert view.in_flight == 0
            assert not sent or now - sent[-1] >= URGENT_INTERVAL
            sent.append(now)
            view = replace(view, probing=True, last_at=now)
        elif order is ProbeOrder.WITHDRAW:
            view = replace(view, probing=False)
        assert not (view.probing and view.in_flight)


def test_an_engine_that_is_only_late_is_not_named() -> None:
    """Bad answers are told after 20 s of them, then every 5 minutes; while nobody listens they begin anew."""
    unready = Unready()
    bad = ReadyResult(ReadyCheck.NOT_HEALTHY, "bad", 500)
    refused = ReadyResult(ReadyCheck.REFUSED, "the engine does not listen yet")
    seen = [
        (now, unready.look(refused if now == 15 else bad, float(now)))
        for now in (0, 10, 15, 16, 30, 36, 37, 200, 336, 400)
    ]
    assert [now for now, said in seen if said] == [36, 336]
    assert seen[5][1] == "bad; its own lines say why"
