"""Our own metrics in Prometheus' text format (version 0.0.4), rendered from plain values: one row a family.

Rules:
* Labels are bounded: every one comes from a fixed set and is shown from the first scrape on, zeros included, so that a
  rate never misses its first event. What is outside its set counts as "other". Only `build_info` holds free text, and
  that never changes within a run.
* A value that is not known is left out, never shown as 0.
* State sets show 1 for the state of the moment and 0 for every other.
* Written by hand on purpose: prometheus_client takes 25 to 50 ms and 2.4 MiB to import and brings an HTTP server along;
  such a pause on the first scrape would show in every open stream. The tests hold this file to that library's parser.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from vllm_supervisor.core.admission import CODES, SATURATED
from vllm_supervisor.core.ledger import LedgerHealth
from vllm_supervisor.core.memory import Level
from vllm_supervisor.core.memory_view import MemoryNumbers
from vllm_supervisor.core.probe import ProbeOutcome
from vllm_supervisor.core.restart import RESTART_CAUSES
from vllm_supervisor.core.samples import ScrapeFault
from vllm_supervisor.core.words import EngineState, ExecutionState, Outcome, Phase, Verdict

PREFIX = "vllm_supervisor_"
OTHER = "other"
REJECTION_REASONS: tuple[str, ...] = tuple(dict.fromkeys([*CODES.values(), SATURATED]))

PROBE_ENDS: tuple[str, ...] = (*(outcome.value for outcome in ProbeOutcome), "withdrawn")
SCRAPE_RESULTS: tuple[str, ...] = ("ok", *(fault.value for fault in ScrapeFault))

Sample = tuple[Mapping[str, str], float]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything our metrics show, at one moment. Counts are those of this run.

    `outcomes`, `rejections`, `executions` and `restarts` may leave out what is zero. `rejections` has the `code` a
    refused client reads, `restarts` what `restart_cause` gives. None is a value that is not known just now.
    """

    version: str
    name: str
    release: str
    phase: Phase
    engine: EngineState
    verdict: Verdict
    admission_open: bool
    in_flight: int
    limit: int
    accepted: int
    outcomes: Mapping[Outcome, int]
    rejections: Mapping[str, int]
    executions: Mapping[ExecutionState, int]
    restarts: Mapping[str, int]
    budget_used: int
    budget_max: int
    stuck_used: int
    stuck_max: int
    uptime_s: float
    incarnation: int
    ledger: LedgerHealth
    verdict_age_s: float | None = None
    progress_age_s: float | None = None
    tokens_per_s: float | None = None
    steps_per_s: float | None = None
    beacons: int = 0
    probes: Mapping[str, int] = field(default_factory=dict)  # by how they ended
    scrapes: Mapping[str, int] = field(default_factory=dict)  # by what they gave
    memory: MemoryNumbers | None = None  # where the machine's memory is guarded


def as_open_metrics(text: bytes) -> bytes:
    """Rewrite our text for OpenMetrics 1.0, whose counters have a family name without the `_total` of their samples."""
    lines = text.split(b"\n")
    counters = {line.split(b" ")[2] for line in lines if line.startswith(b"# TYPE ") and line.endswith(b" counter")}
    for index, line in enumerate(lines):
        if line.startswith((b"# TYPE ", b"# HELP ")):
            hash_, kind, name, rest = line.split(b" ", 3)
            if name in counters:
                lines[index] = b" ".join((hash_, kind, name.removesuffix(b"_total"), rest))
    return b"\n".join(lines)


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: `name` without the prefix, `kind` "gauge" or "counter"."""

    name: str
    kind: str
    help: str
    samples: Callable[[Snapshot], Iterable[Sample]]


def _one(value: Callable[[Snapshot], float]) -> Callable[[Snapshot], Iterable[Sample]]:
    return lambda snapshot: [({}, value(snapshot))]


def _known(value: Callable[[Snapshot], float | None]) -> Callable[[Snapshot], Iterable[Sample]]:
    return lambda snapshot: [] if (known := value(snapshot)) is None else [({}, known)]


def _memory(value: Callable[[MemoryNumbers], float | None]) -> Callable[[Snapshot], Iterable[Sample]]:
    return _known(lambda snapshot: None if snapshot.memory is None else value(snapshot.memory))


def _pressure(snapshot: Snapshot) -> Iterable[Sample]:
    memory = snapshot.memory
    return [] if memory is None else [({"level": level}, level is memory.level) for level in Level]


def _state(label: str, states: Iterable[str], now: Callable[[Snapshot], str]) -> Callable[[Snapshot], Iterable[Sample]]:
    states = tuple(states)
    return lambda snapshot: [({label: state}, state == now(snapshot)) for state in states]


def _counts(
    label: str, known: Iterable[str], counts: Callable[[Snapshot], Mapping[str, int]]
) -> Callable[[Snapshot], Iterable[Sample]]:
    known = tuple(known)

    def samples(snapshot: Snapshot) -> Iterable[Sample]:
        found = counts(snapshot)
        yield from (({label: key}, found.get(key, 0)) for key in known)
        yield {label: OTHER}, sum(count for key, count in found.items() if key not in known)

    return samples


_ENDED = tuple(outcome for outcome in Outcome if outcome is not Outcome.OPEN)

# fmt: off
FAMILIES: tuple[Family, ...] = (
    Family("build_info", "gauge", "Version, instance name and release label; always 1.",
           lambda s: [({"version": s.version, "name": s.name, "release": s.release}, 1)]),
    Family("uptime_seconds", "gauge", "Time since the supervisor started.", _one(lambda s: s.uptime_s)),
    Family("phase", "gauge", "Phase of the supervisor's own life: 1 for the current one.", _state("phase", Phase, lambda s: s.phase)),
    Family("engine_state", "gauge", "State of the engine: 1 for the current one.", _state("state", EngineState, lambda s: s.engine)),
    Family("engine_incarnation", "gauge", "Number of the engine's current life in this run, from 1.", _one(lambda s: s.incarnation)),
    Family("verdict", "gauge", "What the health classifier says: 1 for the current verdict.", _state("verdict", Verdict, lambda s: s.verdict)),
    Family("verdict_age_seconds", "gauge", "How long the verdict has been the same.", _known(lambda s: s.verdict_age_s)),
    Family("progress_age_seconds", "gauge", "Since the last progress that was seen of the engine that waits longest for one.",
           _known(lambda s: s.progress_age_s)),
    Family("engine_tokens_per_second", "gauge", "Output tokens a second between the last two looks.", _known(lambda s: s.tokens_per_s)),
    Family("engine_steps_per_second", "gauge", "Engine steps a second between the last two looks.", _known(lambda s: s.steps_per_s)),
    Family("beacons", "gauge", "Engines whose true steps are seen.", _one(lambda s: s.beacons)),
    Family("probes_total", "counter", "Probes sent, by how they ended.", _counts("outcome", PROBE_ENDS, lambda s: s.probes)),
    Family("scrapes_total", "counter", "Reads of the engine's metrics, by what they gave.", _counts("result", SCRAPE_RESULTS, lambda s: s.scrapes)),
    Family("admission_open", "gauge", "1 while new requests are admitted.", _one(lambda s: s.admission_open)),
    Family("requests_in_flight", "gauge", "Admitted requests that have not ended yet.", _one(lambda s: s.in_flight)),
    Family("requests_in_flight_limit", "gauge", "Most requests that may be in flight at once.", _one(lambda s: s.limit)),
    Family("requests_accepted_total", "counter", "Requests admitted.", _one(lambda s: s.accepted)),
    Family("requests_ended_total", "counter", "Admitted requests that ended, by what their client got.",
           lambda s: [({"outcome": outcome}, s.outcomes.get(outcome, 0)) for outcome in _ENDED]),
    Family("requests_rejected_total", "counter", "Requests refused before any backend work, by reason.",
           _counts("reason", REJECTION_REASONS, lambda s: s.rejections)),
    Family("executions", "gauge", "The engine's work for admitted requests, by what is known of it; never add it to the requests.",
           lambda s: [({"state": state}, s.executions.get(state, 0)) for state in ExecutionState]),
    Family("ledger_failed", "gauge", "1 while the ledger cannot be written.", _one(lambda s: s.ledger.failed)),
    Family("ledger_missing_total", "counter", "Evidence missing from the ledger, in lines: not written, written after the request went on, not safe from power loss.",
           lambda s: [({"kind": "lost"}, s.ledger.lost), ({"kind": "late"}, s.ledger.late), ({"kind": "at_risk"}, s.ledger.at_risk)]),
    Family("restarts_total", "counter", "Restarts of the engine, by cause.", _counts("cause", RESTART_CAUSES, lambda s: s.restarts)),
    Family("restart_budget_used", "gauge", "Crashes that burden the restart budget.", _one(lambda s: s.budget_used)),
    Family("restart_budget_max", "gauge", "Crashes the restart budget allows.", _one(lambda s: s.budget_max)),
    Family("restart_stuck_used", "gauge", "Hangs that burden their own restart budget.", _one(lambda s: s.stuck_used)),
    Family("restart_stuck_max", "gauge", "Hangs their restart budget allows.", _one(lambda s: s.stuck_max)),
    Family("memory_pressure", "gauge", "How the machine's memory stands: 1 for the current level. This and the next only where memory is guarded.", _pressure),
    Family("memory_available_bytes", "gauge", "MemAvailable of the machine.", _memory(lambda m: m.available)),
    Family("memory_floor_bytes", "gauge", "At this level the engine is killed.", _memory(lambda m: m.floor)),
    Family("memory_minimum_bytes", "gauge", "Lowest MemAvailable since the engine was started.", _memory(lambda m: m.minimum)),
    Family("memory_slope_bytes_per_second", "gauge", "How MemAvailable changes; negative while it falls.", _memory(lambda m: m.slope)),
    Family("memory_stalled_percent", "gauge", "Share of the time in which memory stalled everything (PSI full).", _memory(lambda m: m.stalled)),
)
# fmt: on


def render(snapshot: Snapshot) -> bytes:
    """Write `snapshot` in the text format, in UTF-8, ending with a newline; fit to follow the engine's exposition."""
    lines: list[str] = []
    for family in FAMILIES:
        name = PREFIX + family.name
        lines += (f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}")
        lines += (f"{name}{_labels(labels)} {_number(value)}" for labels, value in family.samples(snapshot))
    return ("\n".join(lines) + "\n").encode(errors="replace")


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.3f}"
