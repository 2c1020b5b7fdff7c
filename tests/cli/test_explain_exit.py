"""`explain-exit` answers a person and a program from the same table as the supervisor."""

import json

import pytest
from click.testing import CliRunner, Result

from vllm_supervisor.cli.explain_exit import explain_exit
from vllm_supervisor.core.own_status import MEANINGS


def run(*arguments: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(explain_exit, list(arguments), catch_exceptions=False)


@pytest.mark.parametrize("spelling", ["-9", "SIGKILL", "sigkill", "KILL"])
def test_a_signal_has_four_spellings(spelling: str) -> None:
    """A number below zero and a name mean the same signal."""
    assert run(spelling).output == run("-9").output
    assert "sender unknown" in run(spelling).output


def test_every_status_is_explained_both_ways() -> None:
    """All codes and signals get an answer, clean if it was requested and a failure if not."""
    for status in range(-64, 256):
        assert "a clean end, whatever the number" in run(str(status), "--requested").output
        plain = run(str(status))
        assert plain.exit_code == 0
        assert "a clean end, whatever the number" not in plain.output


@pytest.mark.parametrize("text", ["256", "-65", "SIGNOTHING", "", "1.5"])
def test_what_is_no_status_is_a_usage_error(text: str) -> None:
    """A wrong status ends with 2 and one line that says what to give."""
    result = run(text)
    assert result.exit_code == 2
    assert "give 0 to 255, -9, or a name like SIGKILL" in result.output


@pytest.mark.parametrize("status", MEANINGS)
def test_our_own_statuses_are_explained(status: int) -> None:
    """A status that the supervisor itself uses is explained as such first, and as an engine's after that."""
    lines = run(str(status)).output.splitlines()
    assert (lines[0][:20], lines[1].strip()) == ("The supervisor that ", MEANINGS[status])
    assert any(line.startswith("An engine that ended with ") for line in lines[2:])
    assert json.loads(run(str(status), "--json").output)["supervisor"] == MEANINGS[status]


def test_both_phases_are_shown_where_they_differ() -> None:
    """Status 2 means a wrong command line before ready and nothing special afterwards."""
    output = run("2").output
    assert "before it was ready: it refused its command line; not started again" in output
    assert "while it served: it ended by itself; worth another start" in output
    assert "before it was ready" not in run("1").output


def test_the_json_form_holds_the_reading_of_both_phases() -> None:
    """A program reads cause, class, sentence and mend for each phase."""
    answer = json.loads(run("-15", "--json").output)
    assert answer["status"] == -15
    assert answer["requested"] is False
    assert answer["supervisor"] is None
    assert answer["engine"]["serving"]["cause"] == "killed"
    assert answer["engine"]["loading"].keys() == {"cause", "clean", "repeat", "sentence", "mend"}
    assert json.loads(run("-15", "--json", "--requested").output)["engine"]["serving"]["clean"] is True


def test_a_requested_kill_was_ours() -> None:
    """`--requested` with SIGKILL means the supervisor's own KILL."""
    assert "we killed it" in run("137", "--requested").output
