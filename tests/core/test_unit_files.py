"""A service's stop limit from its own files: which files, in which order, and what is written in them."""

import pytest

from vllm_supervisor.core.systemd_words import setting_span
from vllm_supervisor.core.unit_files import drop_in_names, drop_ins, file_names, stop_limit


def test_an_instance_has_its_own_file_or_the_template_s() -> None:
    """The instance's file counts before the template's; a plain unit has only its own."""
    assert file_names("vllm-supervisor@8000.service") == ("vllm-supervisor@8000.service", "vllm-supervisor@.service")
    assert file_names("vllm.service") == ("vllm.service",)


def test_drop_ins_are_looked_for_from_the_instance_to_the_type() -> None:
    """Instance, template, the name cut at its dashes, and the type."""
    assert drop_in_names("vllm-supervisor@8000.service") == (
        "vllm-supervisor@8000.service.d",
        "vllm-supervisor@.service.d",
        "vllm-.service.d",
        "service.d",
    )


def test_a_drop_in_hides_one_of_the_same_name_that_counts_less() -> None:
    """What is left comes in the order of the names; files that are no .conf are passed over."""
    assert drop_ins([{"b.conf": "mine", "note.txt": "x"}, {"b.conf": "other", "a.conf": "first"}]) == ["first", "mine"]


@pytest.mark.parametrize(
    ("texts", "manager", "seconds"),
    [
        (["[Service]\nTimeoutStopSec=120s\n"], [], 120.0),
        (["[Service]\nTimeoutStopSec=120s\n", "[Service]\nTimeoutStopSec = 50\n"], [], 50.0),
        (["[Service]\nTimeoutSec=2min 30s\n"], [], 150.0),
        (["[Service]\nTimeoutStopSec=infinity\n"], [], None),
        (["[Service]\nTimeoutStopSec=0\n"], [], None),
        (["[Unit]\nTimeoutStopSec=5s\n[Service]\n#TimeoutStopSec=7s\n"], [], 90.0),
        (["[Service]\n"], ["[Manager]\n#DefaultTimeoutStopSec=90s\n", "[Manager]\nDefaultTimeoutStopSec=45s\n"], 45.0),
    ],
)
def test_the_last_assignment_in_the_right_section_wins(
    texts: list[str], manager: list[str], seconds: float | None
) -> None:
    """A drop-in over the file, the manager's default under both, 90 s where nobody says anything."""
    assert stop_limit(texts, manager) == seconds


@pytest.mark.parametrize("text", ["", "soon", "5 apples", "-3"])
def test_what_is_no_time_is_refused(text: str) -> None:
    """Anything else raises instead of becoming a number."""
    with pytest.raises(ValueError, match="no time limit"):
        setting_span(text)
