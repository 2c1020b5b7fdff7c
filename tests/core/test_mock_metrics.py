"""The stand-in engine's exposition against the series of real vLLM 0.32, captured on its CPU build."""

import re
from dataclasses import replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from vllm_supervisor.mock.metrics import Facts, Variant, render
from vllm_supervisor.mock.stats import Gauges, Stats

FACTS = Facts("tiny", 1000.0, 1.5, 1 << 20, 9)
SERIES = Path(__file__).resolve().parents[1] / "fakes" / "vllm_0_32_series.txt"


def series(text: str) -> list[str]:
    """Families in order as NAME|TYPE|LABELS|BUCKETS, as the captured file has them."""
    found = []
    for name, kind in re.findall(r"^# TYPE (vllm:\S+) (\S+)$", text, re.MULTILINE):
        labels: set[str] = set()
        bounds: list[str] = []
        for inner in re.findall(rf"^{re.escape(name)}(?:_bucket)?\{{(.*)\}} ", text, re.MULTILINE):
            pairs = dict(re.findall(r'(\w+)="([^"]*)"', inner))
            labels |= set(pairs)
            if "le" in pairs and pairs["le"] not in bounds:
                bounds.append(pairs["le"])
        found.append("|".join((name, kind, ",".join(sorted(labels)), " ".join(bounds))))
    return [line for line in found if not line.startswith("vllm:cache_config_info")]


def test_series_types_labels_and_buckets_are_vllms() -> None:
    """Names, order, types, labels and bucket bounds equal the capture (the cache's configuration aside)."""
    assert series(render([Stats(2048)], FACTS, Variant())) == SERIES.read_text().splitlines()


def test_the_exposition_is_well_formed_and_carries_the_numbers() -> None:
    """A Prometheus parser reads it, and values land on their series and engine label."""
    second = Stats(2048)
    second.generation_tokens = 7
    second.gauges = Gauges(3, 2, 0.25)
    second.observe("iteration_tokens_total", 9)
    text = render([Stats(2048), second], FACTS, Variant())
    samples = {
        (sample.name, sample.labels.get("engine"), sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["vllm:generation_tokens_total", "1", None] == 7
    assert samples["vllm:num_requests_running", "1", None] == 3
    assert samples["vllm:num_requests_running", "0", None] == 0
    assert samples["vllm:iteration_tokens_total_bucket", "1", "8.0"] == 0
    assert samples["vllm:iteration_tokens_total_bucket", "1", "16.0"] == 1
    assert samples["vllm:iteration_tokens_total_count", "1", None] == 1
    assert samples["process_start_time_seconds", None, None] == 1000.0


def test_variants_leave_out_what_the_deployments_lack() -> None:
    """Multiprocess has no process, python and created series; python-only has no engine series; old names are old."""
    multiprocess = render([Stats(2048)], FACTS, Variant(process=False))
    assert not re.search(r"^(process_|python_)|_created", multiprocess, re.MULTILINE)
    assert "vllm:" not in render([Stats(2048)], FACTS, Variant(vllm=False))
    old = render([Stats(2048)], FACTS, Variant(renamed=True))
    assert 'vllm:gpu_cache_usage_perc{model_name="tiny"} 0.0' in old
    assert "vllm:kv_cache_usage_perc" not in old


def test_sleep_is_a_state_set() -> None:
    """Level 0 is awake, 1 has its weights offloaded, 2 discarded everything."""
    for level, state in enumerate(("awake", "weights_offloaded", "discard_all")):
        text = render([Stats(2048)], replace(FACTS, sleep_level=level), Variant())
        assert f'sleep_state="{state}"}} 1.0' in text
        assert len(re.findall(r'sleep_state="\w+"\} 1\.0', text)) == 1
