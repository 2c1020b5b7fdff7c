"""The ledger's lines: what is written can be read, and a cut end is mended."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_supervisor.core.journal import RequestOutcome
from vllm_supervisor.core.ledger import Clock, Lines, Mend, RequestIds, mend, segment_name, segment_number
from vllm_supervisor.core.ledger_parser import parse
from vllm_supervisor.core.words import EndedBy, Evidence, ExecutionState, Outcome, RequestClass

CLOCK = Clock(monotonic=lambda: 12.5, wall=lambda: 1_700_000_000.25)


def lines() -> Lines:
    """Build the lines of one run at one moment."""
    return Lines(CLOCK, boot="b-1", run="run1")


def outcome(**changes: object) -> RequestOutcome:
    """Build an outcome, a completed stream but for `changes`."""
    fields = {
        "id": "run1-1",
        "request_class": RequestClass.CHAT,
        "outcome": Outcome.COMPLETED,
        "why": "",
        "status": 200,
        "stream": True,
        "ended_by": EndedBy.ENGINE,
        "bytes": 10,
        "first_byte_s": 0.5,
        "duration_s": 1.5,
        "marker": "[DONE]",
    } | changes
    return RequestOutcome(**fields)  # type: ignore[arg-type]


def test_accepted_line_has_the_public_fields() -> None:
    """An acceptance is one JSON object with the six common fields, the id and the class."""
    assert json.loads(lines().accepted(3, "run1-1", RequestClass.CHAT)) == {
        "t": 12.5,
        "at": "2023-11-14T22:13:20.250Z",
        "boot": "b-1",
        "run": "run1",
        "inc": 3,
        "event": "accepted",
        "id": "run1-1",
        "class": "chat",
    }


def test_outcome_line_has_the_public_fields() -> None:
    """An outcome carries every field of the interface, with null for what was not seen."""
    record = json.loads(lines().ended(1, (), outcome(status=None, first_byte_s=None, why='a"b\n')))
    assert {key: record[key] for key in list(record)[6:]} == {
        "id": "run1-1",
        "outcome": "completed",
        "why": 'a"b\n',
        "status": None,
        "stream": True,
        "ended_by": "engine",
        "bytes": 10,
        "first_byte_s": None,
        "duration_s": 1.5,
        "marker": "[DONE]",
    }


def test_execution_line_has_the_public_fields() -> None:
    """An execution line names state and evidence."""
    record = json.loads(lines().execution(2, "x", ExecutionState.RUNNING, Evidence.ABORT_REQUESTED))
    assert (record["event"], record["id"], record["state"], record["evidence"], record["inc"]) == (
        "execution",
        "x",
        "running",
        "abort_requested",
        2,
    )


def test_a_line_for_another_run_is_signed() -> None:
    """What one run writes into the account of another names the writer."""
    record = json.loads(lines().event(4, "balance", {"accepted": 0}, run="lost"))
    assert (record["run"], record["by"], record["inc"], record["accepted"]) == ("lost", "run1", 4, 0)


def test_common_fields_cannot_be_overwritten() -> None:
    """An event that brings a common field of its own is refused."""
    with pytest.raises(ValueError, match="run"):
        lines().event(0, "phase", {"run": "x"})


@given(st.text(), st.text(max_size=300))
def test_every_text_survives_on_one_line(request_id: str, why: str) -> None:
    """Whatever an id or a reason holds, the line is one line and reads back the same."""
    line = lines().ended(0, (), outcome(id=request_id, why=why))
    assert line.count(b"\n") == 1
    assert line.isascii()
    record = parse(line)
    assert record is not None
    assert (record["id"], record["why"]) == (request_id, why)


@pytest.mark.parametrize(
    "line",
    [b"", b"\0\0\0", b"[]", b'{"t":1}', b"{", b"\xff", b'{"t":"1","at":"","boot":"","run":"","inc":0,"event":"x"}'],
)
def test_what_is_not_a_ledger_line_is_none(line: bytes) -> None:
    """A line without the common fields in their types is not read."""
    assert parse(line) is None


@given(st.integers(min_value=0, max_value=10_000))
def test_any_cut_of_a_line_is_mended(cut: int) -> None:
    """A whole record gets its newline, anything shorter goes, and an ended line stays as it is."""
    line = lines().accepted(1, "run1-1", RequestClass.CHAT)
    rest = line[: min(cut, len(line))].removesuffix(b"\n")
    expected = Mend(1000, newline=True) if parse(rest) else Mend(1000 - len(rest), newline=False)
    assert mend(1000, rest) == expected


def test_zeros_after_power_loss_go() -> None:
    """A tail of zero bytes, as file systems leave it after power loss, is cut off."""
    assert mend(5000, bytes(4096)) == Mend(904, newline=False)


@pytest.mark.parametrize("name", ["ledger-1.jsonl", "ledger-00000001.json", "drain.json", "ledger-0000000x.jsonl"])
def test_other_files_are_no_segments(name: str) -> None:
    """Only names of our own making count as segments."""
    assert segment_number(name) is None
    assert segment_number(segment_name(17)) == 17


def test_ids_count_up() -> None:
    """The ids of a run are its name and a number."""
    new_id = RequestIds("run1")
    assert [new_id(), new_id()] == ["run1-1", "run1-2"]


def test_the_end_of_an_exchange_is_the_same_lines_in_one_piece() -> None:
    """Execution lines in order, then the outcome, each as it is when it is built alone."""
    states = [(ExecutionState.RUNNING, Evidence.ANSWER), (ExecutionState.COMPLETED, Evidence.ENGINE_CONFIRMED)]
    alone = [lines().execution(4, "run1-1", *said) for said in states] + [lines().ended(4, (), outcome())]
    assert lines().ended(4, states, outcome()) == b"".join(alone)


def test_stamps_follow_the_clock_to_the_millisecond() -> None:
    """Lines within one millisecond share its name, the next one has the next, also over the end of a second."""
    wall = [1_700_000_000.9981]
    made = Lines(Clock(monotonic=lambda: 1.0, wall=lambda: wall[0]), boot="b", run="r")
    seen = []
    for step in (0.0, 0.0004, 0.001, 0.001):
        wall[0] += step
        seen.append(json.loads(made.accepted(1, "r-1", RequestClass.CHAT))["at"][-8:])
    assert seen == [":20.998Z", ":20.998Z", ":20.999Z", ":21.000Z"]


def test_the_lines_of_a_turn_have_one_stamp() -> None:
    """That of the first; before and after, each line has its own."""
    now = iter(range(10))
    made = Lines(Clock(monotonic=lambda: float(next(now)), wall=lambda: 0.0), boot="b", run="r")
    stamps = []
    for turn in (None, made.begin_turn, None, made.end_turn, None):
        if turn is not None:
            turn()
        stamps.append(json.loads(made.accepted(1, "r-1", RequestClass.CHAT))["t"])
    assert stamps == [0.0, 1.0, 1.0, 2.0, 3.0]
