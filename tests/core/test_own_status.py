"""Our own exit status, and when we end by a signal instead."""

from itertools import product

import pytest

from vllm_supervisor.core.own_status import MEANINGS, Ending, OwnStatus, own_status


def test_precedence_of_doubt() -> None:
    """A requested stop is 81 before 82 before 80, and 0 only when nothing is left to doubt."""
    for unknown, unremoved, missing, cut in product((0, 2), (0, 1), (False, True), (0, 3)):
        ending = Ending("SIGTERM", cut=cut, unknown_executions=unknown, unremoved_processes=unremoved)
        expected = 81 if unknown or unremoved else 82 if missing else 80 if cut else 0
        stopped = Ending(
            ending.by_signal,
            cut=cut,
            unknown_executions=unknown,
            unremoved_processes=unremoved,
            evidence_missing=missing,
        )
        assert own_status(stopped) == OwnStatus(expected)


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        (Ending(), 0),
        (Ending("SIGTERM"), 0),
        (Ending(fault=True, gave_up=69, cut=1), 1),
        (Ending(gave_up=69, cut=1), 69),
        (Ending(gave_up=75, unknown_executions=1), 75),
        (Ending(gave_up=78, evidence_missing=True), 78),
    ],
)
def test_what_is_no_requested_stop_has_its_own_status(ending: Ending, status: int) -> None:
    """A fault and giving up show themselves, whatever else happened."""
    assert own_status(ending) == OwnStatus(status)
    assert status in MEANINGS


def test_a_clean_interrupt_ends_by_its_signal() -> None:
    """After SIGINT and a clean end a shell must see the command interrupted; PID 1 can only exit with 130."""
    assert own_status(Ending("SIGINT")) == OwnStatus(130, "SIGINT")
    assert own_status(Ending("SIGINT"), is_pid1=True) == OwnStatus(130)


def test_the_signals_that_are_raised_again_can_be_chosen() -> None:
    """`exit.reraise` names them: none, or SIGTERM as well."""
    assert own_status(Ending("SIGINT"), reraise=()) == OwnStatus(0)
    assert own_status(Ending("SIGTERM"), reraise=("SIGINT", "SIGTERM")) == OwnStatus(143, "SIGTERM")
    assert own_status(Ending("SIGTERM"), reraise=("SIGINT", "SIGTERM"), is_pid1=True) == OwnStatus(143)


@pytest.mark.parametrize("doubt", [{"cut": 1}, {"unknown_executions": 1}, {"evidence_missing": True}])
def test_an_unclean_interrupt_keeps_its_status(doubt: dict[str, int]) -> None:
    """What was cut or is in doubt is never hidden behind the signal."""
    assert own_status(Ending("SIGINT", **doubt)).reraise is None
