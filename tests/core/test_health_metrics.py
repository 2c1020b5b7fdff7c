"""The health part of our own metrics."""

from fakes.life import Engine, Life
from vllm_supervisor.core.health_metrics import health_metrics


def test_rates_ages_and_counts() -> None:
    """Steps a second, the age of the last progress, and reads of the metrics by what they gave."""
    life = Life([Engine(running=1, steps_s=10, tokens_s=10)])
    life.users(1, silent=None)
    life.run(60)
    metrics = {one.name: one for one in health_metrics(life.last, life.now, probes={}, scrapes={"ok": 12}, beacons=1)}
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
