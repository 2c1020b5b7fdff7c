"""The text of /metrics, with vLLM's series, types and labels (vLLM 0.32, `vllm/v1/metrics/loggers.py`; captured).

Rules: pure, everything comes in as values; a variant leaves series out or renames them as the deployments do that it
imitates. Help texts are ours. `_created` series carry the time of the start, as the Python client writes them.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_supervisor.mock.stats import Stats


@dataclass(frozen=True, slots=True)
class Variant:
    """What an exposition lacks or names differently."""

    vllm: bool = True  # the engine's series
    process: bool = True  # process_, python_ and _created series: not in multiprocess mode
    renamed: bool = False  # names and labels of releases before 0.10


@dataclass(frozen=True, slots=True)
class Facts:
    """What the process knows of itself: wall-clock start, CPU seconds, resident bytes, open files, level of sleep."""

    model: str
    started_at: float
    cpu_seconds: float
    resident_bytes: int
    open_files: int
    sleep_level: int = 0
    model_len: int = 4096


class _Page:
    """Collects lines; every family has its HELP and TYPE."""

    def __init__(self, variant: Variant, facts: Facts) -> None:
        self.lines: list[str] = []
        self._variant = variant
        self._facts = facts

    def family(self, name: str, kind: str) -> None:
        self.lines += [f"# HELP {name} {name.partition(':')[2] or name}, as vLLM counts it", f"# TYPE {name} {kind}"]

    def sample(self, name: str, labels: dict[str, str], value: float) -> None:
        inner = ",".join(f'{key}="{_escape(text)}"' for key, text in sorted(labels.items()))
        self.lines.append(f"{name}{{{inner}}} {float(value)!r}" if inner else f"{name} {float(value)!r}")

    def created(self, name: str, every: Iterable[dict[str, str]]) -> None:
        if self._variant.process:
            self.family(f"{name}_created", "gauge")
            for labels in every:
                self.sample(f"{name}_created", labels, self._facts.started_at)

    def counter(self, name: str, samples: list[tuple[dict[str, str], float]]) -> None:
        self.family(f"{name}_total", "counter")
        for labels, value in samples:
            self.sample(f"{name}_total", labels, value)
        self.created(name, [labels for labels, _ in samples])

    def gauge(self, name: str, samples: list[tuple[dict[str, str], float]]) -> None:
        self.family(name, "gauge")
        for labels, value in samples:
            self.sample(name, labels, value)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def render(engines: list[Stats], facts: Facts, variant: Variant) -> str:
    """Give the whole exposition of the engines with these counters."""
    page = _Page(variant, facts)
    if variant.process:
        _python(page)
        _process(page, facts)
    if variant.vllm:
        _engine_series(page, engines, facts, variant)
    return "\n".join(page.lines) + "\n"


def _python(page: _Page) -> None:
    version = sys.version_info
    page.gauge(
        "python_info",
        [
            (
                {
                    "implementation": "CPython",
                    "major": str(version.major),
                    "minor": str(version.minor),
                    "patchlevel": str(version.micro),
                    "version": f"{version.major}.{version.minor}.{version.micro}",
                },
                1,
            )
        ],
    )


def _process(page: _Page, facts: Facts) -> None:
    page.gauge("process_resident_memory_bytes", [({}, facts.resident_bytes)])
    page.gauge("process_start_time_seconds", [({}, facts.started_at)])
    page.family("process_cpu_seconds_total", "counter")
    page.sample("process_cpu_seconds_total", {}, facts.cpu_seconds)
    page.gauge("process_open_fds", [({}, facts.open_files)])


def _engine_series(page: _Page, engines: list[Stats], facts: Facts, variant: Variant) -> None:
    model = {"model_name": facts.model}
    labelled = [
        (model if variant.renamed else model | {"engine": str(index)}, stats) for index, stats in enumerate(engines)
    ]

    def each(value: str) -> list[tuple[dict[str, str], float]]:
        return [(labels, getattr(stats, value)) for labels, stats in labelled]

    def zero(**more: str) -> list[tuple[dict[str, str], float]]:
        return [(labels | more, 0.0) for labels, _ in labelled]

    for name in ("flops", "read_bytes", "write_bytes"):
        page.counter(f"vllm:estimated_{name}_per_gpu", zero())
    page.gauge("vllm:num_requests_running", [(labels, stats.gauges.running) for labels, stats in labelled])
    page.gauge("vllm:num_requests_waiting", [(labels, stats.gauges.waiting) for labels, stats in labelled])
    if not variant.renamed:
        page.gauge(
            "vllm:num_requests_waiting_by_reason",
            [
                (labels | {"reason": reason}, stats.gauges.waiting if reason == "capacity" else 0)
                for labels, stats in labelled
                for reason in ("capacity", "deferred")
            ],
        )
        states = {"awake": facts.sleep_level == 0, "weights_offloaded": facts.sleep_level == 1}
        states["discard_all"] = facts.sleep_level > 1
        page.gauge(
            "vllm:engine_sleep_state",
            [(labels | {"sleep_state": state}, float(on)) for labels, _ in labelled for state, on in states.items()],
        )
    usage = "vllm:gpu_cache_usage_perc" if variant.renamed else "vllm:kv_cache_usage_perc"
    page.gauge(usage, [(labels, stats.gauges.kv_usage) for labels, stats in labelled])
    prefix = "vllm:gpu_prefix_cache" if variant.renamed else "vllm:prefix_cache"
    page.counter(f"{prefix}_queries", each("prefix_queries"))
    page.counter(f"{prefix}_hits", zero())
    for name in ("external_prefix_cache_queries", "external_prefix_cache_hits", "mm_cache_queries", "mm_cache_hits"):
        page.counter(f"vllm:{name}", zero())
    page.counter("vllm:num_preemptions", zero())
    page.counter("vllm:prompt_tokens", each("prompt_tokens"))
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    page.counter(
        "vllm:prompt_tokens_by_source",
        [
            (labels | {"source": source}, stats.prompt_tokens if source == sources[0] else 0)
            for labels, stats in labelled
            for source in sources
        ],
    )
    page.counter("vllm:prompt_tokens_cached", zero())
    page.counter(
        "vllm:prompt_tokens_cached_by_source",
        [sample for tier in ("device", "host", "p2p", "disk", "external_unspecified") for sample in zero(source=tier)],
    )
    page.counter("vllm:generation_tokens", each("generation_tokens"))
    page.counter(
        "vllm:request_success",
        [
            (labels | {"finished_reason": reason}, count)
            for labels, stats in labelled
            for reason, count in stats.finished.items()
        ],
    )
    page.counter(
        "vllm:admission_rejections",
        [(model | {"reason": reason}, 0.0) for reason in ("max_num_queued_reqs", "max_num_queued_tokens")],
    )
    for name in engines[0].histograms:
        page.family(name, "histogram")
        for labels, stats in labelled:
            _histogram(page, name, labels, stats)
        page.created(name, [labels for labels, _ in labelled])
    cache = {"block_size": "16", "cache_dtype": "auto", "enable_prefix_caching": "True", "num_gpu_blocks": "4096"}
    page.gauge("vllm:cache_config_info", [(cache | {"engine": str(index)}, 1) for index in range(len(engines))])


def _histogram(page: _Page, name: str, labels: dict[str, str], stats: Stats) -> None:
    histogram = stats.histograms[name]
    seen = 0
    for bound, count in zip([*map(float, histogram.buckets), None], histogram.counts, strict=True):
        seen += count
        page.sample(f"{name}_bucket", labels | {"le": "+Inf" if bound is None else repr(bound)}, seen)
    page.sample(f"{name}_count", labels, seen)
    page.sample(f"{name}_sum", labels, histogram.total)
