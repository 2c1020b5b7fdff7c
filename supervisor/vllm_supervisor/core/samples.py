"""What the judgement rests on: one typed sample for each of the engine's signals.

Rules:
* A sample is what was seen at one moment, in monotonic seconds; it decides nothing.
* What was not seen is None. A missing series is never 0, because 0 means idle.
* Everything is per engine label (vLLM's data parallel index as a string) where the signal tells the engines apart.
"""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class BeaconSample:
    """The steps of one EngineCore process as its beacon reports them. Exact, not sampled: the scheduler's own counts."""

    engine: str
    pid: int
    begun: int
    ended: int
    worked: int  # steps that ended and had tokens to compute; the others are life of the loop, not progress
    tokens: int  # tokens those steps computed, prompts included
    open_tokens: int  # tokens in the steps that have begun and not ended
    open_prefill: bool  # one of those steps computes prompts
    running: int
    waiting: int
    paused: bool | None
    events: int  # request events written since the engine began
    changed_at: float  # a step began or ended
    worked_at: float  # a step with tokens ended
    open_since: float  # since when the oldest open step has had the workers; means nothing without an open step

    @property
    def in_step(self) -> bool:
        """Whether a step has begun and not ended."""
        return self.begun > self.ended

    @property
    def in_decode(self) -> bool:
        """Whether the open work is of the size of a decode step, which takes milliseconds to seconds."""
        return self.in_step and self.open_tokens > 0 and not self.open_prefill


class EventKind(StrEnum):
    """What a request event of the beacon says."""

    ADDED = "added"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """One request reached the scheduler, or left it: `status` is vLLM's, such as FINISHED_STOPPED or FINISHED_ABORTED.

    `id` is vLLM's request id, cut to 128 bytes; it holds the X-Request-Id the engine was given.
    """

    engine: str
    at: float
    kind: EventKind
    id: str
    status: str
    output_tokens: int


class ScrapeFault(StrEnum):
    """Why a read of /metrics told nothing: four different things, none of them "idle"."""

    REFUSED = "refused"  # nobody listens
    TIMEOUT = "timeout"  # slow: a saturated front end looks like this, and so does a stopped one
    HTTP_ERROR = "http_error"
    NO_SERIES = "no_series"  # answered, without a single series of an engine
    BROKEN = "broken"  # cut short, or not HTTP
    CONTRADICTED = "contradicted"  # its series do not fit our own account: see core/metrics_trust.py


@dataclass(frozen=True, slots=True)
class EngineSeries:
    """The few series of one engine label. Counters are totals; None where the exposition has no such series."""

    engine: str
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None  # 0 to 1
    iterations: float | None = None  # batches that carried outputs: NOT engine steps (a long prefill raises it once)
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    prefix_queries: float | None = None
    finished: float | None = None  # requests finished, whatever the reason
    asleep: bool | None = None


@dataclass(frozen=True, slots=True)
class MetricsSample:
    """One read of /metrics. With a fault there are no engines; `process_start` is the API server's, in Unix seconds."""

    at: float
    engines: tuple[EngineSeries, ...] = ()
    process_start: float | None = None
    fault: ScrapeFault | None = None
    status: int | None = None


@dataclass(frozen=True, slots=True)
class DoorSample:
    """The front door's own account of the engine: what no gauge can falsify."""

    in_flight: int  # every request that holds a place at the gate
    at_engine: int  # of those: the next move is the engine's (no upgraded connections, no calls of an operator)
    silent_since: float | None  # of `at_engine`, the longest silence: since its last byte, or since it was to move
    # The last body byte of a 2xx answer; comments of an event stream do not count, because vLLM can send `: keep-alive`
    # from its front end while the engine hangs.
    last_byte_at: float | None
    completions: int  # 2xx answers that completed
    engine_5xx: int  # in a row, without a success in between
    engine_5xx_since: float | None
    last_success_at: float | None
    served: int = 0  # of `completions`: work of the engine's, which its counters have to show
    admin_calls: int = 0  # an operator's calls that run on the engine's loop (LoRA loads …) and have not ended


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """The engine's processes. CPU seconds are totals of all processes of a kind; None where there is none."""

    alive: bool
    api_cpu: float | None = None
    core_cpu: float | None = None
    worker_cpu: float | None = None
    compilers: int = 0  # nvcc, ptxas, cicc, triton, clang … below the engine


@dataclass(frozen=True, slots=True)
class ProbeSample:
    """The one probe: in flight since `sent_at`, or how the last one ended. All None: there was none."""

    sent_at: float | None = None  # of the probe in flight
    answered_at: float | None = None  # the last one that was answered
    failed_at: float | None = None  # the last one that was answered with 5xx or broke off
    failures: int = 0  # in a row
    failing_since: float | None = None  # when the first of that row failed
    possible: bool = True  # one can be sent; False: probes are off, or the engine offers nothing to ask


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything that was seen at one tick. None: that signal does not exist, or was not read this time."""

    at: float
    ready_at: float | None  # when this incarnation became ready; None while it starts
    incarnation: int | None = None  # of an engine that is ours
    beacons: tuple[BeaconSample, ...] = ()
    metrics: MetricsSample | None = None
    door: DoorSample | None = None
    processes: ProcessSample | None = None
    probe: ProbeSample = ProbeSample()
    paused: bool | None = None  # said by the server itself
    late: float = 0.0  # seconds by which our own tick was late, a suspended machine included
