"""What `doctor` says of a machine's memory before anything is started."""

from dataclasses import replace

import pytest

from vllm_supervisor.core.memory import GIB, GuardPolicy, Reading
from vllm_supervisor.core.memory_advice import MemoryFacts, findings, highest_utilisation

GOOD = MemoryFacts(
    unified=True,
    reading=Reading(0.0, 120 * GIB, 110 * GIB, free=100 * GIB, cached=8 * GIB),
    policy=GuardPolicy(),
    utilisation=0.75,
    kv_cache_given=True,
    max_model_len_given=True,
)


def test_a_good_machine_is_told_nothing() -> None:
    """Every finding has a cause that is not there."""
    assert findings(GOOD) == []


@pytest.mark.parametrize(
    ("change", "level", "word"),
    [
        ({"utilisation": 0.9, "kv_cache_given": False}, "warning", "--gpu-memory-utilization 0.9 (asked for)"),
        ({"utilisation": None, "kv_cache_given": False}, "warning", "0.9 (vLLM's default)"),
        ({"reading": Reading(0.0, 120 * GIB, 9 * GIB)}, "error", "only 9.0 GiB of 120.0 GiB"),
        ({"reading": replace(GOOD.reading, swap_total=16 * GIB)}, "warning", "swap is on (16.0 GiB)"),
        ({"oom_daemons": ("earlyoom",)}, "warning", "earlyoom runs"),
        ({"reading": Reading(0.0, 120 * GIB, 110 * GIB, 20 * GIB, 90 * GIB)}, "warning", "90.0 GiB are page cache"),
        ({"kv_cache_given": False}, "note", "KV cache"),
        ({"max_model_len_given": False}, "note", "--max-model-len"),
        ({"kernel_log_problem": "/dev/kmsg cannot be read: Operation not permitted"}, "note", "/dev/kmsg"),
    ],
)
def test_each_cause_is_found_with_its_reason_and_mend(change: dict, level: str, word: str) -> None:
    """One cause, each with why and what to do."""
    found = findings(replace(GOOD, **change))
    assert any(finding.level == level and word in finding.what for finding in found)
    assert all(finding.why and finding.mend and finding.check == "unified_memory" for finding in found)


def test_page_cache_that_will_be_given_back_is_no_finding() -> None:
    """The configured eviction takes care of it."""
    full = Reading(0.0, 120 * GIB, 110 * GIB, 20 * GIB, 90 * GIB)
    assert findings(replace(GOOD, reading=full, evicts=True)) == []


def test_nothing_is_said_of_discrete_gpus() -> None:
    """All of this is about one memory for two."""
    assert findings(replace(GOOD, unified=False, utilisation=0.95, kv_cache_given=False)) == []


def test_the_recommended_utilisation_leaves_low_and_the_system_their_room() -> None:
    """With the defaults 0.80; a larger low lowers it."""
    assert highest_utilisation(GuardPolicy()) == pytest.approx(0.8)
    assert highest_utilisation(GuardPolicy(low=0.15)) == pytest.approx(0.75)
