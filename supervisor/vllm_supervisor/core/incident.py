"""What an incident's bundle says, and which bundles are kept.

Rules:
* `incident.json` is readable by itself: the sentence first, then the numbers it rests on, then what was collected.
* No prompt, header or address is in it. Requests appear by class and age; lines are the engine's own, keys redacted where
  they were taken in.
* Everything is bounded: samples, lines and requests by number here, files by size in the adapter, bundles by number
  and total size. The newest bundle is always kept.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vllm_supervisor.core import redact
from vllm_supervisor.core.admission import OpenRequest
from vllm_supervisor.core.health import Judgement
from vllm_supervisor.core.samples import Observation

SAMPLES_KEPT = 20
LINES_KEPT = 200
REQUESTS_KEPT = 100
LINE_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class Bundle:
    """One bundle on disk: its number and its size in bytes."""

    number: int
    size: int


def surplus(bundles: Iterable[Bundle], keep: int, max_size: int) -> list[int]:
    """Return the numbers of the bundles to remove, the oldest first, so that what stays is within both bounds."""
    size, removed = 0, []
    for kept, bundle in enumerate(sorted(bundles, key=lambda one: one.number, reverse=True), start=1):
        size += bundle.size
        if kept > 1 and (kept > keep or size > max_size):
            removed.append(bundle.number)
    return sorted(removed)


def summary(number: int, cause: str, judgement: Judgement) -> str:
    """Return the one line a person reads first; `number` 0: nothing of it is on the disk."""
    return f"incident {number or 'without a bundle'}: {cause}: {judgement.sentence} [{judgement.verdict}, by {judgement.source}]"


def document(
    *,
    cause: str,
    at: str,
    run: str,
    incarnation: int,
    judgement: Judgement,
    samples: Sequence[Observation],
    requests: Iterable[OpenRequest],
    lines: Sequence[str],
    first_error: Sequence[str],
    memory: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the content of `incident.json`, but for what the adapter collects. `at` is UTC, ISO 8601.

    `cause` is why the bundle is made (`stuck`, `failing`, `signal` …); `lines` are the engine's last ones,
    `memory` the last looks at the machine's memory.
    """
    now = judgement.at
    opened = sorted(requests, key=lambda request: request.admitted_at)
    return {
        "cause": cause,
        "at": at,
        "run": run,
        "incarnation": incarnation,
        "verdict": judgement.verdict.value,
        "sentence": judgement.sentence,
        "evidence": dict(judgement.evidence),
        "open_requests": [
            {
                "class": request.request_class.value,
                "age_s": round(now - request.admitted_at, 1),
                "first_byte": request.first_byte_at is not None,
            }
            for request in opened[:REQUESTS_KEPT]
        ],
        "open_requests_total": len(opened),
        "first_error": _lines(first_error),
        "last_lines": _lines(lines),
        "memory": list(memory),
        "samples": [_sample(sample, now) for sample in samples[-SAMPLES_KEPT:]],
    }


def _lines(lines: Sequence[str]) -> list[str]:
    return [redact.text(line)[:LINE_LENGTH] for line in lines[-LINES_KEPT:]]


def _sample(sample: Observation, now: float) -> Mapping[str, Any]:
    """Return a sample as plain values; `ago_s` is its age when the incident was written."""
    return {"ago_s": round(now - sample.at, 1), **asdict(sample)}
