"""The budget of a stop: the parts add up, only the drain shrinks, and what does not fit is said."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_supervisor.core.timeouts import Limits, as_json, matrix, plan

LIMITS = Limits(120.0, "test", propagation=5.0, drain=60.0, engine_stop=30.0, documentation=5.0, reserve=5.0)
seconds = st.floats(min_value=0, max_value=1000, allow_nan=False)


def test_everything_fits() -> None:
    """With room enough each part is what was configured."""
    budget = plan(LIMITS)
    assert (budget.drain, budget.fits, budget.total) == (60.0, True, 105.0)
    assert budget.sentence == "105 s needed, 120 s allowed by test: everything fits"


def test_only_the_drain_shrinks() -> None:
    """A limit that is too short takes from the drain alone, and says so."""
    budget = plan(replace(LIMITS, outer=90.0))
    assert (budget.drain, budget.engine_stop, budget.documentation, budget.reserve) == (45.0, 30.0, 5.0, 5.0)
    assert budget.sentence == "105 s needed, 90 s allowed by test: the drain is shortened from 60 s to 45 s"


def test_what_cannot_fit_is_said() -> None:
    """A limit that does not hold even the rest leaves no drain and names what is missing."""
    budget = plan(replace(LIMITS, outer=30.0))
    assert (budget.drain, budget.missing, budget.fits) == (0.0, 15.0, False)
    assert "does not fit by 15 s" in budget.sentence


def test_no_outer_limit() -> None:
    """Without a limit nothing shrinks."""
    assert plan(replace(LIMITS, outer=None)).fits


@given(st.lists(seconds, min_size=7, max_size=7))
def test_the_parts_never_exceed_the_limit(values: list[float]) -> None:
    """Whatever the values, the plan fits into the limit or says by how much it does not."""
    outer, hook, propagation, drain, stop, documentation, reserve = values
    budget = plan(Limits(outer, "test", propagation, drain, stop, documentation, reserve), hook)
    assert 0 <= budget.drain <= drain
    assert (budget.engine_stop, budget.documentation, budget.reserve) == (stop, documentation, reserve)
    assert budget.hook + budget.total <= outer + budget.missing + 1e-6


@pytest.mark.parametrize(
    ("changes", "row", "fits"),
    [
        ({"server_graceful": 60.0}, "server's own graceful time", False),
        ({"server_graceful": 20.0}, "server's own graceful time", True),
        ({"server_graceful": None}, "server's own graceful time", None),
        ({"request_deadline": 300.0}, "request deadline", False),
        ({"request_deadline": 0.0}, "request deadline", None),
        ({"outer": 30.0}, "outer termination limit", False),
        ({"outer": None}, "outer termination limit", None),
        ({"outer": 90.0}, "drain", False),
    ],
)
def test_the_matrix_says_what_fits(changes: dict[str, float | None], row: str, fits: bool | None) -> None:
    """Each row judges its own limit."""
    limits = replace(LIMITS, **changes)
    rows = {one.limit: one for one in matrix(limits, plan(limits))}
    assert rows[row].fits is fits


def test_every_row_is_whole() -> None:
    """Each limit has an owner, says what it covers and what it does not guarantee, and the answer is plain JSON."""
    answer = as_json(LIMITS, plan(LIMITS))
    assert isinstance(answer["rows"], list)
    assert all(row["owner"] and row["covers"] and row["not_guaranteed"] for row in answer["rows"])
    assert len(answer["rows"]) == 9
