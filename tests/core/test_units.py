"""Durations, sizes and percentages."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_supervisor.core.units import (
    BadValueError,
    parse_duration,
    parse_percent,
    parse_size,
    show_duration,
    show_percent,
    show_size,
)

DURATIONS = [
    ("200ms", 0.2), ("90s", 90.0), ("15m", 900.0), ("6h", 21600.0), ("30d", 2592000.0), ("0s", 0.0), ("1.5h", 5400.0),
    (".5s", 0.5), ("7", 7.0), (" 2 m ", 120.0), (0, 0.0), (3, 3.0), (0.25, 0.25),
]  # fmt: skip
NO_DURATIONS = [
    "",
    "s",
    "-1s",
    "1 week",
    "1M",
    "1e3s",
    "nan",
    "1,5s",
    -1,
    math.nan,
    math.inf,
    True,
    None,
    [1],
    "999999d",
    "²s",
]
SIZES = [
    ("64KiB", 65536), ("8GiB", 8 * 2**30), ("10MB", 10_000_000), ("1.5KiB", 1536), ("5", 5), ("7B", 7), (9, 9), (0, 0),
    (str(2**62 + 1), 2**62 + 1),
]  # fmt: skip
NO_SIZES = ["", "KiB", "-1", "1kib", "1 XB", 1.5, -1, True, None, "9" * 40, "9" * 400 + "TiB", str(2**63)]


@pytest.mark.parametrize(("text", "seconds"), DURATIONS)
def test_duration_spellings(text: object, seconds: float) -> None:
    """Each spelling of a duration means the seconds beside it."""
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", NO_DURATIONS)
def test_no_duration(text: object) -> None:
    """What is no duration is refused with what was expected."""
    with pytest.raises(BadValueError, match="expected a duration such as"):
        parse_duration(text)


@pytest.mark.parametrize(("text", "size"), SIZES)
def test_size_spellings(text: object, size: int) -> None:
    """Each spelling of a size means the bytes beside it, without losing a digit."""
    assert parse_size(text) == size


@pytest.mark.parametrize("text", NO_SIZES)
def test_no_size(text: object) -> None:
    """What is no size is refused with what was expected."""
    with pytest.raises(BadValueError, match="expected a size such as"):
        parse_size(text)


@pytest.mark.parametrize(("text", "fraction"), [("6%", 0.06), ("0%", 0.0), ("100 %", 1.0), ("2.5%", 0.025)])
def test_percent_spellings(text: str, fraction: float) -> None:
    """A percentage is read as a fraction of one."""
    assert parse_percent(text) == pytest.approx(fraction)


@pytest.mark.parametrize("text", ["6", 6, 0.06, "101%", "-1%", "%", None])
def test_no_percent(text: object) -> None:
    """A number without its sign, or above 100, is no percentage."""
    with pytest.raises(BadValueError, match="expected a percentage"):
        parse_percent(text)


@given(st.integers(0, 10**12).map(lambda milliseconds: milliseconds / 1000))
def test_durations_survive_writing(seconds: float) -> None:
    """A duration that is written and read again is the same to the nanosecond."""
    assert parse_duration(show_duration(seconds)) == pytest.approx(seconds, abs=1e-9)


@given(st.integers(0, 2**63 - 1))
def test_sizes_survive_writing(size: int) -> None:
    """A size that is written and read again has not lost a byte."""
    assert parse_size(show_size(size)) == size


@given(st.floats(0, 1))
def test_percentages_survive_writing(fraction: float) -> None:
    """A percentage that is written and read again is the same to ten digits."""
    assert parse_percent(show_percent(fraction)) == pytest.approx(fraction, rel=1e-9, abs=1e-11)


@given(st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none()))
def test_parsers_only_fail_by_saying_so(value: object) -> None:
    """Whatever comes in, a parser returns a number in range or raises BadValueError."""
    for parse, limit in ((parse_duration, 1e10), (parse_size, 2**63), (parse_percent, 1)):
        try:
            number = parse(value)
        except BadValueError:
            continue
        assert 0 <= number <= limit


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.2, "200ms"), (90, "90s"), (900, "15m"), (86400, "1d"), (1.5, "1.5s"), (5400, "90m")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    """A duration is written in the largest unit that keeps it whole."""
    assert show_duration(seconds) == text
