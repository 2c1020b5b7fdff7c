"""The health part of our own metrics, as plain values; whoever serves /metrics writes them out.

Rules:
* Labels are bounded: verdicts, probe outcomes and scrape faults are enumerations. No model, address or request in them.
* A value that is not known is left out, never written as 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_supervisor.core.health import Judgement


@dataclass(frozen=True, slots=True)
class Metric:
    """One family: `kind` is `gauge` or `counter`, `values` are (labels, value)."""

    name: str
    kind: str
    text: str
    values: tuple[tuple[Mapping[str, str], float], ...]


def health_metrics(
    judgement: Judgement, now: float, *, probes: Mapping[str, int], scrapes: Mapping[str, int], beacons: int
) -> list[Metric]:
    """Return the families. `probes` and `scrapes` are counts by outcome, `beacons` how many engines report steps."""

    def gauge(name: str, text: str, value: float | None) -> list[Metric]:
        return [] if value is None else [Metric(f"vllm_supervisor_{name}", "gauge", text, (({}, value),))]

    def counter(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
        values = tuple(({label: key}, float(count)) for key, count in sorted(counts.items()))
        return Metric(f"vllm_supervisor_{name}_total", "counter", text, values)

    age = None if judgement.progress_at is None else max(0.0, now - judgement.progress_at)
    return [
        *gauge("verdict_age_seconds", "How long the verdict has been the same.", now - judgement.since),
        *gauge("progress_age_seconds", "Since the last progress that was seen of the slowest engine with work.", age),
        *gauge(
            "engine_tokens_per_second", "Output tokens a second between the last two looks.", judgement.tokens_per_s
        ),
        *gauge("engine_steps_per_second", "Engine steps a second between the last two looks.", judgement.steps_per_s),
        *gauge("beacons", "Engines whose true steps are seen.", float(beacons)),
        counter("probes", "Probes sent, by how they ended.", "outcome", probes),
        counter("scrapes", "Reads of the engine's metrics, by what they gave.", "result", scrapes),
    ]
