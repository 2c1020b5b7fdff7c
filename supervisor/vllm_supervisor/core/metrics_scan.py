"""Finds the few series of an exposition that the judgement needs, without parsing the rest.

Rules:
* An exposition of vLLM has more than a thousand lines, nearly all of them histogram buckets; a general parser costs
  tens of milliseconds on it and would stall the streams that share our loop. Here each needed name is searched for.
* Series are known by both of their names where vLLM renamed them, and told apart by the label `engine` (vLLM has had
  it since 0.10; before, there is one engine, labelled "").
* A value that cannot be one (not finite, negative) is as good as missing.
* A missing series is None. Samples of one engine that differ in other labels (model, reason, process) are added up,
  but of a usage the largest counts.
* `vllm:iteration_tokens_total_count` counts batches that carried outputs. It is not the number of engine steps.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm_supervisor.core.probe import Reach
from vllm_supervisor.core.samples import EngineSeries, MetricsSample, ScrapeFault

# Field of EngineSeries: the names of its series, the newest first. The first that is present is taken.
SERIES: dict[str, tuple[bytes, ...]] = {
    "running": (b"vllm:num_requests_running",),
    "waiting": (b"vllm:num_requests_waiting",),
    "kv_usage": (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"),
    "iterations": (b"vllm:iteration_tokens_total_count",),
    "prompt_tokens": (b"vllm:prompt_tokens_total",),
    "output_tokens": (b"vllm:generation_tokens_total",),
    "prefix_queries": (b"vllm:prefix_cache_queries_total", b"vllm:gpu_prefix_cache_queries_total"),
    "finished": (b"vllm:request_success_total",),
}
_SLEEP = b"vllm:engine_sleep_state"
_AWAKE = b'sleep_state="awake"'
_PROCESS_START = b"process_start_time_seconds"

_FAULTS = {
    Reach.REFUSED: ScrapeFault.REFUSED,
    Reach.NO_ROUTE: ScrapeFault.REFUSED,
    Reach.TIMEOUT: ScrapeFault.TIMEOUT,
    Reach.BROKEN: ScrapeFault.BROKEN,
}


def metrics_sample(at: float, reach: Reach, status: int | None, body: bytes) -> MetricsSample:
    """Type the end of one GET /metrics: a sample, or the kind of its failure."""
    if reach is not Reach.ANSWERED:
        return MetricsSample(at, fault=_FAULTS[reach])
    if status != 200:
        return MetricsSample(at, fault=ScrapeFault.HTTP_ERROR, status=status)
    return scan(at, body)


@dataclass(slots=True)
class _Engine:
    values: dict[str, float] = field(default_factory=dict)
    asleep: bool | None = None


def scan(at: float, body: bytes) -> MetricsSample:
    """Read an exposition as it came over the wire."""
    text = b"\n" + body
    engines: dict[str, _Engine] = {}
    for name, spellings in SERIES.items():
        for spelling in spellings:
            for labels, value in _samples(text, spelling):
                values = engines.setdefault(_engine(labels), _Engine()).values
                before = values.get(name, 0.0)
                values[name] = max(before, value) if name == "kv_usage" else before + value
            if any(name in engine.values for engine in engines.values()):
                break
    for labels, value in _samples(text, _SLEEP):
        if _AWAKE in labels:
            engines.setdefault(_engine(labels), _Engine()).asleep = value == 0
    start = next((value for _labels, value in _samples(text, _PROCESS_START)), None)
    if not engines:
        return MetricsSample(at, process_start=start, fault=ScrapeFault.NO_SERIES, status=200)
    series = tuple(
        EngineSeries(engine=label, asleep=engine.asleep, **engine.values) for label, engine in sorted(engines.items())
    )
    return MetricsSample(at, series, start, status=200)


def _samples(text: bytes, name: bytes) -> Iterator[tuple[bytes, float]]:
    """Yield (labels as written, value) of each sample of one series."""
    at = 0
    wanted = b"\n" + name
    while (at := text.find(wanted, at)) >= 0:
        begin = at + len(wanted)
        end = text.find(b"\n", begin)
        line = text[begin : end if end >= 0 else len(text)]
        at = begin
        if line.startswith(b"{"):
            labels, _, rest = line.rpartition(b"}")
        elif line.startswith(b" "):
            labels, rest = b"", line
        else:
            continue  # a longer name that begins alike
        try:
            value = float(rest.split()[0])
        except (ValueError, IndexError):
            continue
        if math.isfinite(value) and value >= 0:
            yield labels, value


def _engine(labels: bytes) -> str:
    """Read the label `engine` from `{a="b",engine="0"`; "" without one."""
    for opening in (b'{engine="', b',engine="'):
        begin = labels.find(opening)
        if begin >= 0:
            begin += len(opening)
            return labels[begin : labels.find(b'"', begin)].decode("utf-8", "replace")
    return ""
