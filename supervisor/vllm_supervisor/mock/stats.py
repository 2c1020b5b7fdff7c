"""What one engine counts, under the names vLLM gives it (vLLM 0.32, `vllm/v1/metrics/loggers.py` and `buckets.py`).

Rules: counters only rise; gauges are a copy taken when a step ends, because vLLM writes them when an engine message
arrives and at no other time; a histogram's buckets are vLLM's, those of token counts end below the model length.
"""

from bisect import bisect_left
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

# Histograms in vLLM's order; None stands for buckets that follow the model length.
HISTOGRAMS: dict[str, tuple[float, ...] | None] = {
    "vllm:request_prompt_tokens": None,
    "vllm:request_generation_tokens": None,
    "vllm:iteration_tokens_total": _ITERATION,
    "vllm:request_max_num_generation_tokens": None,
    "vllm:request_params_n": (1, 2, 5, 10, 20),
    "vllm:request_params_max_tokens": None,
    "vllm:time_to_first_token_seconds": _FIRST_TOKEN,
    "vllm:inter_token_latency_seconds": _BETWEEN_TOKENS,
    "vllm:request_time_per_output_token_seconds": _BETWEEN_TOKENS,
    "vllm:e2e_request_latency_seconds": _LATENCY,
    "vllm:request_queue_time_seconds": _LATENCY,
    "vllm:request_inference_time_seconds": _LATENCY,
    "vllm:request_prefill_time_seconds": _LATENCY,
    "vllm:request_decode_time_seconds": _LATENCY,
    "vllm:request_num_preemptions": (1, 2, 3, 4, 5, 10, 20),
    "vllm:request_prefill_kv_computed_tokens": None,
}
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


def token_buckets(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 … up to the model length."""
    found: list[float] = []
    decade = 1
    while True:
        for step in (1, 2, 5):
            if step * decade > max_model_len:
                return tuple(found)
            found.append(step * decade)
        decade *= 10


@dataclass(slots=True)
class Histogram:
    """Counts by bucket; `counts` has one more entry than `buckets`, for what lies above the last."""

    buckets: Ordered[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.buckets) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.buckets, value)] += 1
        self.total += value


@dataclass(frozen=True, slots=True)
class Gauges:
    """What the last engine message said of the queue; `kv_usage` is a share of 1."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


@dataclass(slots=True)
class Stats:
    """All counters of one engine."""

    max_model_len: int
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))
    histograms: dict[str, Histogram] = field(default_factory=dict)
    gauges: Gauges = Gauges()

    def __post_init__(self) -> None:
        tokens = token_buckets(self.max_model_len)
        self.histograms = {name: Histogram(buckets or tokens) for name, buckets in HISTOGRAMS.items()}

    def observe(self, name: str, value: float) -> None:
        """Count one value in the histogram `vllm:name`."""
        self.histograms[f"vllm:{name}"].observe(value)
