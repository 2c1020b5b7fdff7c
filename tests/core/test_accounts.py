"""The fold and the audit over synthetic lines: every contradiction is found, and nothing is found that is none."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_supervisor.core import accounts
from vllm_supervisor.core.accounts import FOLLOWS, Fold
from vllm_supervisor.core.audit import Fate, audit, balance_fields, recover
from vllm_supervisor.core.ledger_parser import Record
from vllm_supervisor.core.retention import Segment, prunable
from vllm_supervisor.core.words import ExecutionState, Outcome


def record(event: str, run: str = "r", **fields: object) -> Record:
    """Build a parsed line."""
    common = {"t": 0.0, "at": "2026-01-01T00:00:00.000Z", "boot": "b", "run": run, "inc": 1, "event": event}
    return common | fields


def fold(*lines: Record | None) -> Fold:
    """Fold the lines of a whole run; None is a line that cannot be read."""
    made = Fold()
    made.segment(1)
    for number, line in enumerate((record("life"), *lines), 1):
        if line is None:
            made.unreadable_line(1, number, "not JSON")
        else:
            assert made.add(line) == ""
    made.end()
    return made


def accepted(request_id: str = "r-1") -> Record:
    """Build an acceptance."""
    return record("accepted", id=request_id, **{"class": "chat"})


def ended(request_id: str = "r-1", outcome: str = "completed") -> Record:
    """Build an outcome."""
    return record("outcome", id=request_id, outcome=outcome, why="", stream=False)


def execution(state: str, request_id: str = "r-1") -> Record:
    """Build an execution line."""
    return record("execution", id=request_id, state=state, evidence="answer")


def balance(**counts: int) -> Record:
    """Build the last line of a run."""
    return record("balance", **({"accepted": 0, "completed": 0, "failed": 0, "cancelled": 0, "open": 0} | counts))


@pytest.mark.parametrize(
    ("lines", "violation"),
    [
        ([accepted(), accepted()], "r-1: accepted twice"),
        ([accepted(), ended(), execution("completed"), accepted()], "r-1: accepted twice"),
        ([accepted(), ended(), ended()], "r-1: a second outcome"),
        ([accepted(), ended(), execution("completed"), ended()], "r-1: a second outcome"),
        ([ended()], "r-1: outcome without an acceptance"),
        ([execution("running")], "r-1: execution without an acceptance"),
        ([accepted(), execution("completed"), execution("running")], "r-1: execution running after completed"),
        ([accepted(), ended(outcome="lost")], "r-1: no such outcome as 'lost'"),
        ([accepted(), execution("odd")], "r-1: no such execution state as 'odd'"),
        ([record("gap", lost=3)], "3 lines could not be written"),
        ([accepted(), balance(accepted=1)], "1 accepted, but without an outcome: r-1"),
        ([accepted(), ended(), balance(accepted=1, completed=1)], "1 without an execution state: r-1"),
        (
            [accepted(), ended(), execution("running"), balance(accepted=1, completed=1)],
            "1 still running in the execution register of a run that has ended: r-1",
        ),
        (
            [accepted(), ended(), execution("completed"), balance(accepted=2, completed=1)],
            "the balance line says accepted 2, the lines say 1",
        ),
    ],
)
def test_each_contradiction_is_a_violation(lines: list[Record], violation: str) -> None:
    """Each way in which an account can be wrong is named."""
    assert violation in audit(fold(*lines)).runs[0].violations


def test_a_living_run_may_have_open_requests() -> None:
    """What the youngest run has open is no violation while it has not ended."""
    found = audit(fold(accepted()))
    assert (found.holds, found.runs[0].live) == (True, True)


def test_an_older_run_may_not() -> None:
    """Once another run has begun, what an older one has open is a violation."""
    found = audit(fold(accepted(), record("life", "next")))
    assert not found.runs[0].holds


def test_an_unreadable_line_is_missing_evidence_of_the_run_it_is_in() -> None:
    """It is named, breaks the audit, and counts in its run; what it may have said is not called wrong."""
    found = audit(fold(accepted(), None, execution("completed", "r-7"), balance(accepted=2, completed=2)))
    assert found.evidence == ("segment 1 line 3 is unreadable: not JSON",)
    (run,) = found.runs
    assert (run.violations, run.gone) == (("1 of its lines cannot be read",), "lines of it are missing")


def test_what_came_after_the_damage_is_checked_as_before() -> None:
    """Only ids that were open at the damage may have lines among those that are gone."""
    (run,) = audit(fold(accepted("r-1"), None, accepted("r-2"), balance(accepted=2))).runs
    assert "1 accepted, but without an outcome: r-2" in run.violations


def test_damage_behind_the_end_of_a_run_is_not_its_own() -> None:
    """A run that ended before a line that cannot be read holds, although the ledger does not."""
    found = audit(fold(accepted(), ended(), execution("completed"), balance(accepted=1, completed=1), None))
    assert (found.holds, found.runs[0].holds, found.runs[0].gone) == (False, True, "")


def test_counts_of_a_part_are_not_compared() -> None:
    """A balance that recovery wrote from a part of a run's lines does not contradict the whole."""
    closed = balance(accepted=0) | {"partial": True}
    (run,) = audit(fold(accepted(), ended(), execution("completed"), closed)).runs
    assert (run.holds, run.gone) == (True, "closed from a part of its lines")


def test_a_run_whose_later_lines_are_all_gone_is_partial() -> None:
    """Damage behind its last line counts too, while it has not ended."""
    (run,) = audit(fold(accepted(), None)).runs
    assert (run.gone, run.live) == ("lines of it are missing", True)


def test_a_line_of_another_boot_is_none_of_the_run() -> None:
    """But for one that a later run wrote to close it: that has its own boot, and says who it is."""
    made = fold(accepted())
    stranger = ended() | {"boot": "c"}
    assert made.add(stranger) == "it is of another boot than its run r"
    assert made.add(stranger | {"by": "me"}) == ""
    assert made.runs["r"].boot == "b"


def test_lost_lines_of_a_run_that_ended_close_its_requests_as_what_they_are() -> None:
    """Its supervisor was not lost, the evidence is; and nothing is left to do then."""
    made = fold(accepted(), None, balance(accepted=1, completed=1))
    entries = recover(made, {"r": Fate.GONE}, "me")
    assert [(entry.event, entry.fields.get("why")) for entry in entries] == [
        ("outcome", "evidence_missing"),
        ("execution", None),
    ]
    for entry in entries:
        made.add(record(entry.event, entry.run, by="me", **entry.fields))
    assert recover(made, {"r": Fate.GONE}, "me") == []


def test_damage_shows_in_the_balance_of_a_lost_run() -> None:
    """A run that is closed although lines of it cannot be read does not hold."""
    (entry,) = recover(fold(None), {"r": Fate.GONE}, "me")
    assert (entry.event, entry.fields["lost"], entry.fields["holds"], entry.fields["partial"]) == (
        "balance",
        1,
        False,
        True,
    )


def test_missing_segments_are_named() -> None:
    """One, or a range of them."""
    made = Fold()
    for number in (3, 4, 6, 10):
        made.segment(number)
    assert made.damage == ["segment 5 is missing", "segments 7 to 9 are missing"]
    assert (made.missing_segments, made.damage_count) == (4, 2)


def test_the_memory_of_a_fold_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs, open ids, kinds of a counter and sentences about damage beyond a bound are counted, not kept."""
    for name in ("MAX_RUNS", "MAX_OPEN", "MAX_KINDS", "MAX_DAMAGE", "MAX_PROCESSES", "MAX_VIOLATIONS"):
        monkeypatch.setattr(accounts, name, 3)
    made = Fold()
    for number in range(9):
        made.add(record("rejected", reason=f"r{number}", n=1, **{"class": "chat"}))
        made.add(accepted(f"r-{number}"))
        made.add(record("engine", processes=[{"pid": number, "start": 1}]))
        made.unreadable_line(1, number, "not JSON")
        made.add(record("life", f"run{number}"))
    run = made.runs["r"]
    assert (len(made.runs), len(run.open_ids), len(run.rejected), len(made.damage), len(run.violations)) == (
        3,
        3,
        4,
        3,
        3,
    )
    assert (len(run.engine_processes), run.rejected["other", "other"], run.violation_count) == (3, 6, 6)
    evidence = audit(made).evidence
    assert (len(evidence), evidence[-1]) == (4, "and 6 more")


def test_a_run_without_its_beginning_is_partial() -> None:
    """Where the first segments were pruned, outcomes without acceptances are no violations."""
    made = Fold()
    for line in (record("segment"), ended(), execution("completed"), balance(accepted=9, completed=9)):
        made.add(line)
    found = audit(made)
    assert (found.holds, found.runs[0].partial) == (True, True)


def test_the_window_leaves_out_what_came_before() -> None:
    """Requests accepted before the window are followed and not counted."""
    made = Fold(since="2026-01-02")
    late = accepted("r-2") | {"at": "2026-01-03T00:00:00.000Z"}
    for line in (record("life"), accepted(), ended(), execution("completed"), late, accepted("r-3")):
        made.add(line)
    run = made.runs["r"]
    assert (run.accepted, run.count(Outcome.COMPLETED), run.without_outcome) == (1, 0, 2)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(FOLLOWS, ExecutionState)))
def test_the_register_moves_as_its_table_says(before: ExecutionState | None, after: ExecutionState) -> None:
    """Each pair of states is either allowed and taken, or a violation that changes nothing."""
    first = [] if before is None else [execution(before)]
    run = fold(accepted(), *first, execution(after)).runs["r"]
    allowed = after in FOLLOWS[before]
    assert run.violation_count == (not allowed)
    assert run.executions[after if allowed or before is None else before] == 1
    assert sum(run.executions.values()) == 1


events = st.lists(
    st.tuples(
        st.sampled_from(["accepted", "outcome", "execution"]), st.integers(1, 20), st.sampled_from(list(ExecutionState))
    ),
    max_size=60,
)


@given(events)
def test_a_fold_counts_each_id_once(steps: list[tuple[str, int, ExecutionState]]) -> None:
    """Whatever lines come, accepted ids and outcomes are counted once each, and settled ids are known as such."""
    lines = []
    for event, number, state in steps:
        name = f"r-{number}"
        lines.append({"accepted": accepted(name), "outcome": ended(name), "execution": execution(state, name)}[event])
    run = fold(*lines).runs["r"]
    ids = {line["id"] for line in lines if line["event"] == "accepted"}
    assert run.accepted == len(ids)
    assert run.count(Outcome.COMPLETED) + run.without_outcome == len(ids)
    assert all(run.is_settled(name) != (name in run.open_ids) for name in ids)


@given(events, st.sampled_from([Fate.GONE, Fate.UNPROVEN]))
def test_recovery_is_idempotent(steps: list[tuple[str, int, ExecutionState]], fate: Fate) -> None:
    """The lines that recovery adds leave nothing to recover, and the ledger holds if it held before."""
    lines = []
    for event, number, state in steps:
        name = f"r-{number}"
        lines.append({"accepted": accepted(name), "outcome": ended(name), "execution": execution(state, name)}[event])
    made = fold(*lines)
    held = made.runs["r"].violation_count == 0
    entries = recover(made, {"r": fate}, "me")
    for entry in entries:
        made.add(record(entry.event, entry.run, **entry.fields))
    assert recover(made, {"r": fate}, "me") == []
    assert audit(made).holds == held


def test_ids_of_another_shape_are_settled_too() -> None:
    """An id that is not RUN-NUMBER is remembered whole once settled."""
    run = fold(accepted("x y"), ended("x y"), execution("completed", "x y"), ended("x y")).runs["r"]
    assert run.violations == ["x y: a second outcome"]


def test_a_settled_account_costs_a_bit() -> None:
    """A hundred thousand settled ids take about a bit each."""
    made = Fold()
    made.add(record("life"))
    for number in range(100_000):
        for line in (accepted(f"r-{number}"), ended(f"r-{number}"), execution("completed", f"r-{number}")):
            made.add(line)
    run = made.runs["r"]
    assert (len(run.open_ids), len(run.settled_others)) == (0, 0)
    assert len(run.settled) < 40_000


@pytest.mark.parametrize(
    ("requests", "executions", "lost", "holds"),
    [
        ({"accepted": 2, "completed": 1, "open": 1}, {"completed": 1, "unknown": 1}, 0, True),
        ({"accepted": 2, "completed": 1}, {"completed": 2}, 0, False),
        ({"accepted": 1, "completed": 1}, {}, 0, False),
        ({"accepted": 1, "completed": 1}, {"running": 1}, 0, False),
        ({"accepted": 1, "completed": 1}, {"completed": 1}, 1, False),
    ],
)
def test_the_balance_says_whether_it_holds(
    requests: dict[str, int], executions: dict[str, int], lost: int, holds: bool
) -> None:
    """Both registers must account for every accepted id, nothing may run on, and no line may be missing."""
    assert balance_fields(requests, executions, rejected=0, lost=lost)["holds"] is holds


@pytest.mark.parametrize(
    ("needed", "max_bytes", "keep_s", "removed"),
    [
        (9, 10**9, 10**9, []),
        (9, 250, 10**9, [1, 2]),
        (2, 0, 10**9, [1]),
        (9, 10**9, 95.0, [1]),
        (1, 0, 0.0, []),
    ],
)
def test_only_old_or_excess_segments_go(needed: int, max_bytes: int, keep_s: float, removed: list[int]) -> None:
    """Age and total size remove a prefix, which ends at the first segment that is still needed."""
    segments = [Segment(number, 100, modified=number * 1.0) for number in (3, 1, 2, 4)]
    assert prunable(segments, oldest_needed=needed, now=96.5, keep_s=keep_s, max_bytes=max_bytes) == removed
