"""Our metrics parse as Prometheus reads them, say what the snapshot says, and stay bounded."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from vllm_supervisor.core.admission import CODES
from vllm_supervisor.core.exposition import FAMILIES, PREFIX, REJECTION_REASONS, Snapshot, as_open_metrics, render
from vllm_supervisor.core.ledger import LedgerHealth
from vllm_supervisor.core.restart import RESTART_CAUSES
from vllm_supervisor.core.words import EngineState, ExecutionState, Outcome, Phase, Verdict

SNAPSHOT = Snapshot(
    version="1.2.3",
    name="8000",
    release="tiny",
    phase=Phase.RUNNING,
    engine=EngineState.READY,
    verdict=Verdict.BUSY,
    admission_open=True,
    in_flight=3,
    limit=1024,
    accepted=10,
    outcomes={Outcome.COMPLETED: 5, Outcome.CANCELLED: 2},
    rejections={"saturated": 4, "engine_starting": 1},
    executions={ExecutionState.RUNNING: 3, ExecutionState.COMPLETED: 5, ExecutionState.CONFIRMED_STOPPED: 2},
    restarts={"hang": 1, "out_of_memory": 2},
    budget_used=2,
    budget_max=3,
    stuck_used=1,
    stuck_max=4,
    uptime_s=12.3456,
    incarnation=4,
    verdict_age_s=60.0,
    progress_age_s=1.5,
    steps_per_s=41.25,
    beacons=2,
    probes={"answered": 7, "withdrawn": 1},
    scrapes={"ok": 12, "timeout": 3},
    ledger=LedgerHealth(
        failed=True,
        since=1.0,
        error="No space left on device",
        lost=2,
        late=1,
        at_risk=0,
        written=9,
        queued=0,
        segment=1,
    ),
)

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(snapshot: Snapshot) -> Samples:
    """Read the exposition with Prometheus' own client library."""
    text = render(snapshot).decode()
    return {
        (sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, /, **labels: str) -> float:
    """Look one sample up."""
    return samples[name, tuple(sorted(labels.items()))]


def test_every_value_is_shown() -> None:
    """Each field of the snapshot stands in its own series."""
    got = parsed(SNAPSHOT)
    assert value(got, "build_info", version="1.2.3", name="8000", release="tiny") == 1
    assert value(got, "uptime_seconds") == 12.346
    assert value(got, "verdict_age_seconds") == 60
    assert value(got, "progress_age_seconds") == 1.5
    assert value(got, "engine_steps_per_second") == 41.25
    assert ("engine_tokens_per_second", ()) not in got
    assert value(got, "beacons") == 2
    assert value(got, "probes_total", outcome="answered") == 7
    assert value(got, "probes_total", outcome="failed") == 0
    assert value(got, "scrapes_total", result="timeout") == 3
    assert value(got, "phase", phase="running") == 1
    assert value(got, "engine_state", state="ready") == 1
    assert value(got, "engine_incarnation") == 4
    assert value(got, "verdict", verdict="busy") == 1
    assert value(got, "admission_open") == 1
    assert value(got, "requests_in_flight") == 3
    assert value(got, "requests_in_flight_limit") == 1024
    assert value(got, "requests_accepted_total") == 10
    assert [value(got, "requests_ended_total", outcome=o) for o in ("completed", "failed", "cancelled")] == [5, 0, 2]
    assert value(got, "requests_rejected_total", reason="saturated") == 4
    assert value(got, "requests_rejected_total", reason="draining") == 0
    assert value(got, "executions", state="running") == 3
    assert value(got, "executions", state="unknown") == 0
    assert value(got, "restarts_total", cause="out_of_memory") == 2
    assert value(got, "restarts_total", cause="hang") == 1
    assert value(got, "restart_budget_used") == 2
    assert value(got, "restart_budget_max") == 3
    assert value(got, "restart_stuck_used") == 1
    assert value(got, "restart_stuck_max") == 4


@pytest.mark.parametrize(
    ("name", "label", "states", "field"),
    [
        ("phase", "phase", Phase, "phase"),
        ("engine_state", "state", EngineState, "engine"),
        ("verdict", "verdict", Verdict, "verdict"),
    ],
)
def test_a_state_set_shows_exactly_one_state(name: str, label: str, states: type, field: str) -> None:
    """Whatever the state, it alone is 1 and every other is there with 0."""
    for state in states:
        got = parsed(replace(SNAPSHOT, **{field: state}))
        shown = {dict(labels)[label]: number for (each, labels), number in got.items() if each == name}
        assert shown == {str(other): float(other is state) for other in states}


def test_closed_admission_is_zero() -> None:
    """The gate's state is a plain 0 or 1."""
    assert value(parsed(replace(SNAPSHOT, admission_open=False)), "admission_open") == 0


def test_types_and_help_are_declared() -> None:
    """Each family has a type and help, and only counters end in `_total`."""
    families = {family.name: family for family in text_string_to_metric_families(render(SNAPSHOT).decode())}
    assert len(families) == len(FAMILIES)
    for row in FAMILIES:
        family = families[PREFIX + row.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (row.kind, row.help)
        assert (row.kind == "counter") is row.name.endswith("_total")
    assert render(SNAPSHOT).endswith(b"\n")


def test_unknown_labels_are_folded() -> None:
    """A reason or cause outside the fixed set counts as other: no input can add a series."""
    strange = replace(SNAPSHOT, rejections={"a": 1, "b": 2, "saturated": 4}, restarts={"cosmic": 3})
    got = parsed(strange)
    assert value(got, "requests_rejected_total", reason="other") == 3
    assert value(got, "restarts_total", cause="other") == 3
    assert got.keys() == parsed(SNAPSHOT).keys()
    assert set(CODES.values()) < set(REJECTION_REASONS)
    assert "other" not in (*REJECTION_REASONS, *RESTART_CAUSES)


def test_ours_may_follow_the_engines() -> None:
    """Behind an engine's exposition ours parses as before, and no name clashes with vLLM's."""
    engine = '# HELP vllm:num_requests_running Running.\n# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 1.0\n'
    names = [family.name for family in text_string_to_metric_families(engine + render(SNAPSHOT).decode())]
    assert names[0] == "vllm:num_requests_running"
    assert len(names) == len(set(names)) == len(FAMILIES) + 1
    assert all(name.startswith(PREFIX) for name in names[1:])


@given(st.text(), st.text(), st.floats(0, 1e9), st.integers(0, 2**53))
def test_any_label_text_and_number_survive(release: str, name: str, uptime: float, accepted: int) -> None:
    """Quotes, backslashes, newlines and large numbers come back as they went in."""
    got = parsed(replace(SNAPSHOT, release=release, name=name, uptime_s=uptime, accepted=accepted))
    assert value(got, "build_info", version="1.2.3", name=name, release=release) == 1
    assert value(got, "uptime_seconds") == pytest.approx(uptime, abs=0.0006)
    assert value(got, "requests_accepted_total") == accepted


def test_a_name_that_is_no_utf_8_does_not_break_the_scrape() -> None:
    """Bytes of the command line that are no text are shown as question marks."""
    assert b'release="a?"' in render(replace(SNAPSHOT, release="a\udcff"))


def test_open_metrics_says_the_same() -> None:
    """Read as OpenMetrics, the page holds the same samples, each with its kind and its help."""
    families = list(openmetrics.text_string_to_metric_families(as_open_metrics(render(SNAPSHOT)).decode() + "# EOF\n"))
    samples = {
        (sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }
    assert samples == parsed(SNAPSHOT)
    kinds = {family.name.removesuffix("_total"): family.kind for family in FAMILIES}
    assert all(kinds[family.name.removeprefix(PREFIX)] == family.type for family in families)
    assert all(family.documentation for family in families)
