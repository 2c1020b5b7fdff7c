"""The page on metrics lists what is exposed."""

import re
from pathlib import Path

from vllm_supervisor.core.exposition import FAMILIES, PREFIX
from vllm_supervisor.core.restart import RESTART_CAUSES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "metrics.md").read_text(encoding="utf-8")


def test_every_metric_stands_on_the_page() -> None:
    """The table has each family with its type and its help, and no other."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| [^|]*\| (.+) \|$", PAGE, re.MULTILINE)
    assert rows == [(PREFIX + family.name, family.kind, family.help) for family in FAMILIES]


def test_queries_name_metrics_that_exist() -> None:
    """No example asks for a metric that is not there."""
    assert set(re.findall(rf"{PREFIX}\w+", PAGE)) == {PREFIX + family.name for family in FAMILIES}


def test_every_restart_cause_is_explained() -> None:
    """A cause in a metric stands on this page or on the one about exits."""
    text = PAGE + (DOCS / "exit-status.md").read_text(encoding="utf-8")
    assert [cause for cause in RESTART_CAUSES if f"`{cause}`" not in text] == []
