"""The targeted scan of an exposition, on one that real vLLM wrote and on the shapes it has had over time."""

import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllm_supervisor.core.metrics_scan import metrics_sample, scan
from vllm_supervisor.core.probe import Reach
from vllm_supervisor.core.samples import EngineSeries, ScrapeFault

REAL = (Path(__file__).parents[1] / "data" / "vllm-0.32.0-metrics.txt").read_bytes()
PYTHON_ONLY = b"# HELP python_info x\n# TYPE python_info gauge\npython_info 1.0\nprocess_start_time_seconds 1.7e9\n"


def parsed(name: str) -> float:
    """Read one series with the general parser, added up over its labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(REAL.decode())
        for sample in family.samples
        if sample.name == name
    )


def test_it_reads_what_the_general_parser_reads() -> None:
    """Every series found in a real exposition has the value the full parser gives it."""
    sample = scan(1.0, REAL)
    (engine,) = sample.engines
    assert engine.engine == "0"
    assert engine.running == parsed("vllm:num_requests_running")
    assert engine.waiting == parsed("vllm:num_requests_waiting")
    assert engine.kv_usage == parsed("vllm:kv_cache_usage_perc")
    assert engine.iterations == parsed("vllm:iteration_tokens_total_count")
    assert engine.prompt_tokens == parsed("vllm:prompt_tokens_total")
    assert engine.output_tokens == parsed("vllm:generation_tokens_total")
    assert engine.prefix_queries == parsed("vllm:prefix_cache_queries_total")
    assert engine.finished == parsed("vllm:request_success_total")
    assert engine.asleep is False
    assert sample.process_start == parsed("process_start_time_seconds")


def test_it_is_far_cheaper_than_the_general_parser() -> None:
    """The scan takes less than a tenth of the general parser's time on the same bytes."""

    def best(call: object) -> float:
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            call()  # type: ignore[operator]
            times.append(time.perf_counter() - begin)
        return min(times)

    text = REAL.decode()
    assert best(lambda: scan(1.0, REAL)) * 10 < best(lambda: list(text_string_to_metric_families(text)))


def test_renamed_series_are_one_series() -> None:
    """An older vLLM's names, without the label `engine`, give the same sample."""
    old = (
        b'vllm:num_requests_running{model_name="m"} 2.0\n'
        b'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\n'
        b'vllm:gpu_prefix_cache_queries_total{model_name="m"} 7\n'
    )
    assert scan(1.0, old).engines == (EngineSeries("", running=2.0, kv_usage=0.5, prefix_queries=7.0),)


def test_what_is_missing_is_none() -> None:
    """A series that is not there is None; nothing becomes 0 by absence."""
    (engine,) = scan(1.0, b'vllm:num_requests_running{engine="0"} 0.0\n').engines
    assert (engine.running, engine.waiting, engine.iterations, engine.asleep) == (0.0, None, None, None)
    assert scan(1.0, b"").process_start is None


def test_engines_are_kept_apart() -> None:
    """Each engine label has values of its own; samples that differ in other labels are added up."""
    text = (
        b'vllm:num_requests_running{engine="0",model_name="m"} 1\n'
        b'vllm:num_requests_running{engine="1",model_name="m"} 5\n'
        b'vllm:request_success_total{engine="1",finished_reason="stop",model_name="m"} 3\n'
        b'vllm:request_success_total{engine="1",finished_reason="length",model_name="m"} 4\n'
        b'vllm:engine_sleep_state{engine="1",sleep_state="awake"} 0.0\n'
        b'vllm:engine_sleep_state{engine="1",sleep_state="weights_offloaded"} 1.0\n'
    )
    first, second = scan(1.0, text).engines
    assert (first.engine, first.running, first.finished, first.asleep) == ("0", 1.0, None, None)
    assert (second.engine, second.running, second.finished, second.asleep) == ("1", 5.0, 7.0, True)


@pytest.mark.parametrize(
    "line",
    [
        b'vllm:num_requests_running_by_reason{engine="0"} 9\n',
        b'# HELP vllm:num_requests_running{engine="0"} 9\n',
        b'vllm:num_requests_running{engine="0"} NaN\n',
        b'vllm:num_requests_running{engine="0"} +Inf\n',
        b'vllm:num_requests_running{engine="0"} -Inf\n',
        b'vllm:num_requests_running{engine="0"} -1\n',
        b'vllm:num_requests_running{engine="0"}\n',
        b'vllm:num_requests_running{engine="0"} many\n',
    ],
)
def test_what_is_not_the_series_is_not_read(line: bytes) -> None:
    """Longer names, comments and values that are no numbers are passed over."""
    assert scan(1.0, line).fault is ScrapeFault.NO_SERIES


def test_odd_label_values_do_not_mislead() -> None:
    """Braces and spaces in a model's name, and a time stamp behind the value, are read for what they are."""
    text = b'vllm:num_requests_running{model_name="a} b,c",engine="3"} 4 1700000000000\n'
    assert scan(1.0, text).engines == (EngineSeries("3", running=4.0),)


@pytest.mark.parametrize(
    ("reach", "status", "body", "fault"),
    [
        (Reach.REFUSED, None, b"", ScrapeFault.REFUSED),
        (Reach.NO_ROUTE, None, b"", ScrapeFault.REFUSED),
        (Reach.TIMEOUT, None, b"", ScrapeFault.TIMEOUT),
        (Reach.BROKEN, None, b"", ScrapeFault.BROKEN),
        (Reach.ANSWERED, 500, REAL, ScrapeFault.HTTP_ERROR),
        (Reach.ANSWERED, 404, b"", ScrapeFault.HTTP_ERROR),
        (Reach.ANSWERED, 200, b"", ScrapeFault.NO_SERIES),
        (Reach.ANSWERED, 200, PYTHON_ONLY, ScrapeFault.NO_SERIES),
        (Reach.ANSWERED, 200, REAL, None),
    ],
)
def test_each_failure_has_its_own_name(
    reach: Reach, status: int | None, body: bytes, fault: ScrapeFault | None
) -> None:
    """Refused, slow, broken, an error status and an exposition without an engine are five different things."""
    sample = metrics_sample(1.0, reach, status, body)
    assert sample.fault is fault
    assert bool(sample.engines) is (fault is None)
