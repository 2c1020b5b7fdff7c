"""Reading the ledger's lines: what we write is read, and whatever else stands there is a reason, never a fault."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.hostile_ledger import GOOD, LINES, READABLE
from vllm_supervisor.core.accounts import Fold
from vllm_supervisor.core.audit import Fate, audit, recover
from vllm_supervisor.core.journal import RequestOutcome
from vllm_supervisor.core.ledger import Clock, Lines
from vllm_supervisor.core.ledger_parser import LONGEST_LINE, read_line
from vllm_supervisor.core.words import EndedBy, Evidence, ExecutionState, Outcome, RequestClass


@pytest.mark.parametrize("name", LINES)
def test_a_line_that_is_none_says_why(name: str) -> None:
    """Each kind has its own reason; what only the run's account can tell is told by it."""
    line, told = LINES[name]
    found = read_line(line)
    if isinstance(found, dict):
        fold = Fold()
        assert fold.add(json.loads(GOOD)) == ""
        found = fold.add(found)
    assert found == told


@pytest.mark.parametrize("name", READABLE)
def test_a_line_that_can_be_read_is_a_record(name: str) -> None:
    """Fields and events of a later version pass, and text is whatever it is."""
    assert isinstance(read_line(READABLE[name]), dict)


texts = st.text(alphabet=st.characters(min_codepoint=1, max_codepoint=0x24F), max_size=9)


@given(texts, st.sampled_from([None, 0, 200]), st.booleans(), st.sampled_from([None, 0.0, 1.5]), st.integers(0, 10**17))
def test_the_usual_lines_are_read_as_json_is(
    text: str, status: int | None, stream: bool, seconds: float | None, size: int
) -> None:
    """What is taken apart by its shape is what a parser of JSON makes of it; what is not, too."""
    made = Lines(Clock(lambda: 1234.5, lambda: 1_700_000_000.25), boot="b-1", run="r1")
    ended = RequestOutcome(
        text, RequestClass.CHAT, Outcome.OPEN, text, status, stream, EndedBy.CLIENT, size, seconds, 2.5, text
    )
    states = [(ExecutionState.RUNNING, Evidence.ANSWER)]
    for line in (made.accepted(3, text, RequestClass.CHAT) + made.ended(0, states, ended)).splitlines():
        assert read_line(line) == json.loads(line)
        assert list(read_line(line)) == list(json.loads(line))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
known = [
    "t", "at", "boot", "run", "inc", "event", "id", "class", "reason", "n", "outcome", "why", "status", "stream", "bytes",
    "state", "evidence", "pid", "start", "processes", "lost", "accepted", "executions", "settled", "by", "format",
]  # fmt: skip
events = ["life", "segment", "accepted", "rejected", "outcome", "execution", "phase", "engine", "gap", "balance"]


@given(st.lists(st.tuples(st.sampled_from(events), st.dictionaries(st.sampled_from(known), json_values, max_size=4))))
def test_any_fields_can_be_folded_audited_and_recovered(lines: list[tuple[str, dict[str, object]]]) -> None:
    """Whatever stands in the fields, what is read can be counted, and recovery adds lines that can be read again."""
    fold = Fold()
    common = {"t": 1.0, "at": "2026-01-01T00:00:00.000Z", "boot": "b", "run": "r", "inc": 1, "id": "r-1"}
    for event, fields in lines:
        record = read_line(
            json.dumps({**common, "outcome": "open", "state": "running", "event": event, **fields}).encode()
        )
        if isinstance(record, dict):
            fold.add(record)
    fold.end()
    audit(fold)
    for entry in recover(fold, dict.fromkeys(fold.runs, Fate.GONE), "me"):
        line = {**common, "run": entry.run, "inc": entry.inc, "event": entry.event, "by": "me", **entry.fields}
        assert isinstance(read_line(json.dumps(line).encode()), dict)


@given(st.binary(max_size=200), st.integers(0, len(GOOD)))
def test_any_bytes_are_a_record_or_a_reason(junk: bytes, at: int) -> None:
    """Nothing is raised for bytes alone, or for bytes put into a line."""
    for line in (junk, GOOD[:at] + junk + GOOD[at:], GOOD[:at] + junk):
        assert isinstance(read_line(line), dict | str)


def test_the_longest_line_is_read() -> None:
    """One byte more is not."""
    pad = LONGEST_LINE - len(GOOD) + 1
    line = GOOD.replace(b',"class"', b',"a":"' + b"x" * (pad - 7) + b'","class"')
    assert len(line) == LONGEST_LINE + 1
    assert isinstance(read_line(line), dict)
    assert read_line(line.replace(b"xx", b"xxx", 1)) == "it is longer than 1 MiB"
