"""The health part of our own metrics."""

from fakes.life import Engine, Life
from vllm_supervisor.core.health_metrics import health_metrics
from vllm_supervisor.core.words import Verdict


def test_the_verdict_is_a_state_set() -> None:
    """Exactly one verdict is 1, every other one is 0, and all of them are there."""
    life = Life([Engine(running=1, steps_s=10, tokens_s=10)])
    life.users(1, silent=None)
    life.run(60)
    metrics = {one.name: one for one in health_metrics(life.last, life.now, probes={}, scrapes={"ok": 12}, beacons=1)}
    verdicts = {labels["verdict"]: value for labels, value in metrics["vllm_supervisor_verdict"].values}
    assert set(verdicts) == {one.value for one in Verdict}
    assert [name for name, value in verdicts.items() if value] == ["busy"]
    assert metrics["vllm_supervisor_engine_steps_per_second"].values == (({}, 10.0),)
    assert metrics["vllm_supervisor_progress_age_seconds"].values == (({}, 0.0),)
    assert metrics["vllm_supervisor_scrapes_total"].values == (({"result": "ok"}, 12.0),)


def test_what_is_not_known_is_left_out() -> None:
    """An engine that has never moved has no age of progress, and no rates at the first look."""
    life = Life()
    life.tick()
    names = {one.name for one in health_metrics(life.last, life.now, probes={}, scrapes={}, beacons=0)}
    assert "vllm_supervisor_progress_age_seconds" not in names
    assert "vllm_supervisor_engine_tokens_per_second" not in names
