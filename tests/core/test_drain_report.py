"""The drain report: both registers apart, each phase's time, what was cut, and who settles the rest."""

import json

import pytest

from vllm_supervisor.core import drain, drain_report
from vllm_supervisor.core.drain import DeadlinePassed, DrainFact, DrainState, EngineGone, LateRequest, StopAsked
from vllm_supervisor.core.drain_report import CutRequest, DrainFacts
from vllm_supervisor.core.execution import Change
from vllm_supervisor.core.timeouts import Limits
from vllm_supervisor.core.words import Evidence, ExecutionState


def report(
    *,
    engine_gone: bool = True,
    cut: int = 2,
    unsettled: int = 1,
    balance_holds: bool = True,
    evidence_missing: bool = False,
) -> dict[str, object]:
    """Build the report of a stop that had a second to drain."""
    limits = Limits(None, "nobody", propagation=0.0, drain=1.0, engine_stop=30.0, documentation=5.0, reserve=5.0)
    facts: list[tuple[float, DrainFact]] = [
        (10.0, StopAsked()), (10.25, LateRequest()), (11.0, DeadlinePassed()), (13.0, EngineGone()),
    ]  # fmt: skip
    state = DrainState()
    for now, fact in facts:
        state, _ = drain.step(state, fact, now, limits)
    return drain_report.build(
        state,
        DrainFacts(
            run="r",
            release="v1",
            requests={"accepted": 3, "completed": 1, "cancelled": 2, "rejected": 1},
            executions={"completed": 1, "confirmed_stopped": 1, "unknown": 1},
            cut=[CutRequest(f"r-{n}", "chat", 4.0 + n) for n in range(cut)],
            unsettled=[Change(f"r-{n}", ExecutionState.UNKNOWN, Evidence.NONE) for n in range(unsettled)],
            engine_gone=engine_gone,
            balance_holds=balance_holds,
            evidence_missing=evidence_missing,
            status=80,
        ),
        13.5,
    )


def test_the_report_holds_what_a_reader_asks() -> None:
    """Counts of both registers, the time of each stage, late requests and cuts stand in the report, as plain JSON."""
    found = json.loads(json.dumps(report()))
    assert found["requests"] == {
        "accepted": 3, "completed": 1, "failed": 0, "cancelled": 2, "open": 0, "rejected": 1,
    }  # fmt: skip
    assert found["executions"]["unknown"] == 1
    assert found["took_s"] == {"propagating": 0.0, "finishing": 1.0, "stopping": 2.0, "documenting": 0.5}
    assert found["late_requests"] == {"n": 1, "last_after_s": 0.25}
    assert (found["cut"]["n"], found["cut"]["by_class"], found["cut"]["oldest_s"]) == (2, {"chat": 2}, 5.0)
    assert (found["plan"]["drain"], found["status"]) == (1.0, 80)


@pytest.mark.parametrize(("gone", "who"), [(True, "the next start"), (False, "the operator")])
def test_each_open_item_has_somebody(gone: bool, who: str) -> None:
    """What is not settled names who settles it: the next start, or a person if a process cannot be removed."""
    found = json.loads(json.dumps(report(engine_gone=gone)))
    (item,) = found["unsettled"]["items"]
    assert (item["id"], item["execution"]) == ("r-0", "unknown")
    assert item["settled_by"].startswith(who)


def test_long_lists_are_counted_not_listed() -> None:
    """However much was cut, the report stays bounded and the count is whole."""
    found = json.loads(json.dumps(report(cut=5000, unsettled=5000)))
    assert (found["cut"]["n"], len(found["cut"]["requests"])) == (5000, drain_report.MAX_ITEMS)
    assert (found["unsettled"]["n"], len(found["unsettled"]["items"])) == (5000, drain_report.MAX_ITEMS)


def test_the_log_line_says_both_registers() -> None:
    """One line holds the counts, the balance, what is not settled, what was cut, and our exit status."""
    assert drain_report.line(report()) == (
        "requests: accepted 3, completed 1, failed 0, cancelled 2, open 0, rejected 1; "
        "executions: completed 1, confirmed_stopped 1, unknown 1; both ledgers balance; 1 not settled; "
        "cut 2 (chat 2, oldest 5.0 s); status 80"
    )
    assert drain_report.line(report(cut=0, unsettled=0)).endswith("; both ledgers balance; status 80")


@pytest.mark.parametrize(
    ("changed", "level"),
    [
        ({"cut": 0, "unsettled": 0}, "info"),
        ({"cut": 1, "unsettled": 0}, "warning"),
        ({"cut": 0, "unsettled": 1}, "warning"),
        ({"cut": 0, "unsettled": 0, "balance_holds": False}, "warning"),
        ({"cut": 0, "unsettled": 0, "evidence_missing": True}, "warning"),
    ],
)
def test_the_log_line_is_a_warning_if_anything_is_amiss(changed: dict[str, int], level: str) -> None:
    """What was cut, is missing, does not balance or is not settled is not told as if all were well."""
    assert drain_report.level(report(**changed)) == level


@pytest.mark.parametrize(
    ("facts", "does"),
    [
        ([], "stopping: what was accepted finishes first"),
        ([StopAsked()], "hurrying: what is still open is cut now"),
        ([StopAsked(), DeadlinePassed()], "hurrying: what is still open is cut now"),
        ([StopAsked(), DeadlinePassed(), DeadlinePassed()], "hurrying: the engine has 5 s to end"),
        ([StopAsked(), StopAsked()], "killing: the engine's processes are killed now"),
        ([StopAsked(), StopAsked(), EngineGone()], "ending: the engine is gone, what is known is being written down"),
    ],
)
def test_a_stop_says_what_it_does(facts: list[DrainFact], does: str) -> None:
    """Each stop is answered with what it does where the drain stands, which is another thing each time."""
    limits = Limits(None, "nobody", propagation=9.0, drain=60.0, engine_stop=30.0, documentation=5.0, reserve=5.0)
    state = DrainState()
    for second, fact in enumerate(facts):
        state, _ = drain.step(state, fact, 10.0 + second, limits)
    assert drain_report.stop_does(state, 20.0) == does
    if state.stops:
        assert drain_report.stop_does(state, state.asked_at + 0.9).startswith("stopping already: ")


def test_progress_is_a_sentence() -> None:
    """The progress names what is in flight, the oldest, what runs on after its answer, and the time left."""
    limits = Limits(None, "nobody", propagation=0.0, drain=60.0, engine_stop=30.0, documentation=5.0, reserve=5.0)
    state, _ = drain.step(DrainState(), StopAsked(), 0.0, limits)
    said = drain_report.progress(state, 38.0, in_flight=3, oldest_s=41.0)
    assert said == "draining: 3 in flight, oldest 41 s, 22 s left"
    said = drain_report.progress(state, 38.0, in_flight=0, oldest_s=None, background=2)
    assert said == "draining: 0 in flight, 2 answered and still running, 22 s left"
