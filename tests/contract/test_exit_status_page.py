"""The page on exits says what the tables say."""

import re
from pathlib import Path

from vllm_supervisor.core.own_status import MEANINGS
from vllm_supervisor.core.restart import RestartPolicy
from vllm_supervisor.core.signatures import SIGNATURES, Cause

PAGE = (Path(__file__).parents[2] / "docs" / "exit-status.md").read_text(encoding="utf-8")


def again(retries: int | None) -> str:
    """Say a number of further starts as the page does."""
    words = {None: "as often as the budget allows", 0: "no", 1: "once"}
    return words.get(retries, f"{retries} times")


def test_every_status_of_ours_stands_on_the_page() -> None:
    """The table of our statuses is complete, and in the same words as `explain-exit`."""
    listed = dict(re.findall(r"^\| (\d+) \| ([^|]+) \|$", PAGE, re.MULTILINE))
    assert {int(status): meaning for status, meaning in listed.items()} == MEANINGS


def test_every_signature_stands_on_the_page() -> None:
    """The table of known failures has each row with its sentence, tries and mend, and no other."""
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.+) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
    assert [(name, sentence, mend) for name, sentence, _, mend in rows] == [
        (row.id, row.sentence, row.mend) for row in SIGNATURES
    ]
    for row, (_, _, tries, _) in zip(SIGNATURES, rows, strict=True):
        assert tries.partition(",")[0] == again(row.retries), row.id
        assert ("unified" in tries) is (row.unified_retries is not None)
        assert ("apart" in tries) is (row.backoff is not None)


def test_every_cause_stands_on_the_page() -> None:
    """A person who sees a cause in a metric finds it explained."""
    for cause in Cause:
        assert f"`{cause}`" in PAGE or cause is Cause.REQUESTED


def test_the_budgets_on_the_page_are_the_defaults() -> None:
    """Numbers given as defaults are the defaults."""
    policy = RestartPolicy()
    for name in ("max", "stuck_max", "start_attempts"):
        assert f"`{name}` = {getattr(policy, name)}" in PAGE
    assert f"`backoff` = {policy.backoff:g} s" in PAGE
