"""The table of faults: values by kind, refusals that name the mend, the page that lists them."""

from pathlib import Path

import pytest

from vllm_supervisor.mock.faults import FAULTS, TABLE, Ending, FaultError, FaultSet, parse_ending, parse_seconds
from vllm_supervisor.mock.options import help_text
from vllm_supervisor.mock.texts import SIGNATURES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mock-engine.md"


@pytest.mark.parametrize(
    ("text", "seconds"), [("2", 2.0), ("2.5s", 2.5), ("200ms", 0.2), ("5m", 300.0), ("1h", 3600.0)]
)
def test_durations_have_the_units_of_the_configuration(text: str, seconds: float) -> None:
    """Each unit is read as seconds."""
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ("1", Ending("1", seconds=0.0)),
        ("1@load", Ending("1", load=True)),
        ("SEGV@2s", Ending("SEGV", seconds=2.0)),
        ("3@10req", Ending("3", requests=10)),
    ],
)
def test_an_ending_says_how_and_when(text: str, ending: Ending) -> None:
    """An ending is read as what happens and one kind of time."""
    assert parse_ending(text) == ending


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_such_fault", None),
        ("slow_start", "soon"),
        ("cut_answers", "-1"),
        ("ignore_term", "5"),
        ("exit", "256"),
        ("exit", "@load"),
        ("signal", "NOPE"),
        ("error", "no_such_text"),
        ("hang_steps", "first"),
    ],
)
def test_a_fault_that_does_not_exist_or_fit_is_refused(name: str, value: str | None) -> None:
    """Nothing is set by a wrong name or value."""
    faults = FaultSet()
    with pytest.raises(FaultError):
        faults.set(name, value)
    assert faults.texts == {}


def test_every_default_fits_its_own_fault() -> None:
    """Each fault can be set without a value and is on then, and off after it was cleared."""
    for fault in FAULTS:
        faults = FaultSet()
        faults.set(fault.name)
        assert faults.on(fault.name)
        assert faults.texts == {fault.name: fault.default}
        faults.clear(fault.name)
        assert not faults.on(fault.name)


def test_an_engine_fault_hits_one_engine_or_all() -> None:
    """An index hits that engine alone, `all` hits every one."""
    faults = FaultSet()
    faults.set("hang_steps", "1")
    assert [faults.hits("hang_steps", index) for index in (0, 1)] == [False, True]
    faults.set("hang_steps")
    assert faults.hits("hang_steps", 0)


def test_listeners_hear_each_change() -> None:
    """Setting and clearing are told, refusals are not."""
    faults, heard = FaultSet(), []
    faults.subscribe(heard.append)
    faults.set("no_done")
    faults.clear("no_done")
    with pytest.raises(FaultError):
        faults.set("nothing")
    assert heard == ["no_done", "no_done"]


def test_the_page_lists_exactly_the_table() -> None:
    """Every fault stands in docs/mock-engine.md with its kind, default and sentence, and nothing else does."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `") and not line.startswith("| `--")]
    expected = [
        f"| `{fault.name}` | {fault.kind.value}{' (start only)' if fault.start else ''} | "
        f"{f'`{fault.default}`' if fault.default else ''} | {fault.sentence} |"
        for fault in FAULTS
    ]
    assert rows == expected


def test_the_page_lists_every_error_text() -> None:
    """Each signature that `error` can print is named on the page."""
    page = PAGE.read_text()
    assert [name for name in SIGNATURES if f"`{name}`" not in page] == []


def test_help_is_one_screen_and_names_every_fault() -> None:
    """--help fits 40 lines of 120 characters and holds every fault's name."""
    text = help_text()
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 120
    assert [name for name in TABLE if name not in text] == []
