"""Builds recorded lives of an engine for the classifier: who did what from when to when, on a virtual clock.

A `Life` is played tick by tick; a test changes its fields between two `run`s, and reads as a table of what happened.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from vllm_supervisor.core.health import Judgement, Memory, judge
from vllm_supervisor.core.samples import (
    BeaconSample,
    DoorSample,
    EngineSeries,
    MetricsSample,
    Observation,
    ProbeSample,
    ProcessSample,
    ScrapeFault,
)
from vllm_supervisor.core.situation import HealthPolicy
from vllm_supervisor.core.words import Verdict

INTERVAL = 5.0
START = 10_000.0  # the machine has been up for a while
SETTLED = START - 3600.0  # ready for an hour


@dataclass
class Engine:
    """One engine and what it does a second; all rates 0 is an engine that stands still."""

    label: str = "0"
    running: int = 0
    waiting: int = 0
    tokens_s: float = 0.0  # computed and put out
    steps_s: float = 0.0  # steps with tokens
    empty_steps_s: float = 0.0
    prompt_tokens_s: float = 0.0  # prompts whose first output has come
    kv_s: float = 0.0
    finished_s: float = 0.0
    open_tokens: int = 0  # of a step that is open at each look; such a step never ends within a tick
    open_prefill: bool = False
    paused: bool = False
    asleep: bool = False
    gauges: tuple[int, int] | None = None  # stale (running, waiting) of the metrics
    steps: float = 0.0
    begun: float = 0.0
    ended: float = 0.0
    tokens: float = 0.0
    output: float = 0.0
    prompts: float = 0.0
    kv: float = 0.1
    finished: float = 0.0
    worked_at: float = START
    changed_at: float = START
    open_since: float = START

    def stop(self) -> None:
        """Stand still from now on, whatever is in there."""
        self.tokens_s = self.steps_s = self.empty_steps_s = self.prompt_tokens_s = self.kv_s = self.finished_s = 0.0

    def play(self, now: float, seconds: float) -> None:
        """Let `seconds` pass, up to `now`."""
        self.steps += self.steps_s * seconds
        self.ended += (self.steps_s + self.empty_steps_s) * seconds
        self.tokens += (self.tokens_s + self.prompt_tokens_s) * seconds
        self.output += self.tokens_s * seconds
        self.prompts += self.prompt_tokens_s * seconds
        self.kv += self.kv_s * seconds
        self.finished += self.finished_s * seconds
        if self.steps_s:
            self.worked_at = now
        if self.steps_s or self.empty_steps_s:
            self.changed_at = self.open_since = now

    def beacon(self) -> BeaconSample:
        """Return what the beacon would say."""
        opened = 1 if self.open_tokens else 0
        return BeaconSample(
            engine=self.label,
            pid=100 + int(self.label or 0),
            begun=int(self.ended) + opened,
            ended=int(self.ended),
            worked=int(self.steps),
            tokens=int(self.tokens),
            open_tokens=self.open_tokens,
            open_prefill=self.open_prefill,
            running=self.running,
            waiting=self.waiting,
            paused=self.paused,
            events=0,
            changed_at=self.changed_at,
            worked_at=self.worked_at,
            open_since=self.open_since,
        )

    def series(self) -> EngineSeries:
        """Return what the metrics would say: batches that carry outputs, not steps."""
        running, waiting = self.gauges or (self.running, self.waiting)
        return EngineSeries(
            engine=self.label,
            running=running,
            waiting=waiting,
            kv_usage=self.kv,
            iterations=float(int(self.steps)) if self.output else 0.0,
            prompt_tokens=self.prompts,
            output_tokens=self.output,
            prefix_queries=self.prompts,
            finished=self.finished,
            asleep=self.asleep,
        )


@dataclass
class Life:
    """A server under judgement. `metrics` None: nobody reads them; a fault: what every read gives."""

    engines: list[Engine] = field(default_factory=lambda: [Engine()])
    beacon: bool = True
    metrics: ScrapeFault | str | None = "read"
    status: int | None = None
    start: float | None = 1_700_000_000.0
    door: DoorSample | None = field(
        default_factory=lambda: DoorSample(
            0, 0, None, None, 0, engine_5xx=0, engine_5xx_since=None, last_success_at=None
        )
    )
    bytes_flow: bool = False
    completions_s: float = 0.0
    processes: ProcessSample | None = field(default_factory=lambda: ProcessSample(alive=True))
    probe: ProbeSample = field(default_factory=ProbeSample)
    ready_at: float | None = SETTLED
    incarnation: int | None = 1
    paused: bool | None = None
    late: float = 0.0
    policy: HealthPolicy = field(default_factory=HealthPolicy)
    interval: float = INTERVAL
    now: float = START
    memory: Memory = field(default_factory=Memory)
    said: list[Judgement] = field(default_factory=list)
    completions: float = 0.0
    shown: Callable[[float, EngineSeries], EngineSeries | None] | None = None  # what the metrics make of a series

    @property
    def last(self) -> Judgement:
        """The last judgement."""
        return self.said[-1]

    @property
    def verdicts(self) -> set[Verdict]:
        """Every verdict since `said` was last cleared."""
        return {one.verdict for one in self.said}

    def users(self, number: int, *, silent: float | None = 0.0) -> None:
        """Put `number` requests of users at the engine, silent for so many seconds (None: bytes flow)."""
        if self.door is None:
            return
        since = None if number == 0 else self.now - (silent or 0.0)
        self.door = replace(self.door, in_flight=number, at_engine=number, silent_since=since)
        self.bytes_flow = silent is None

    def run(self, seconds: float, each: Callable[[float], None] | None = None) -> Judgement:
        """Let `seconds` pass, judging at every tick; `each(seconds so far)` changes the world before a tick."""
        begin = self.now
        while self.now < begin + seconds - 1e-9:
            self.tick(each, begin)
        return self.last

    def tick(self, each: Callable[[float], None] | None = None, begin: float = 0.0) -> Judgement:
        """Let one interval pass and judge."""
        self.now += self.interval
        if each is not None:
            each(self.now - begin)
        for engine in self.engines:
            engine.play(self.now, self.interval)
        self.completions += self.completions_s * self.interval
        if self.door is not None:
            self.door = replace(
                self.door,
                completions=int(self.completions),
                served=int(self.completions),
                last_byte_at=self.now if self.bytes_flow else self.door.last_byte_at,
                last_success_at=self.now if self.completions_s else self.door.last_success_at,
            )
        self.memory, judgement = judge(self.memory, self.observation(), self.policy)
        self.said.append(judgement)
        self.late = 0.0
        return judgement

    def observation(self) -> Observation:
        """Return what is seen at this tick."""
        metrics = None
        if self.metrics == "read":
            series = [engine.series() for engine in self.engines]
            if self.shown is not None:
                series = [one for each in series if (one := self.shown(self.now, each)) is not None]
            metrics = MetricsSample(self.now, tuple(series), self.start)
        elif isinstance(self.metrics, ScrapeFault):
            metrics = MetricsSample(self.now, fault=self.metrics, status=self.status)
        return Observation(
            at=self.now,
            ready_at=self.ready_at,
            incarnation=self.incarnation,
            beacons=tuple(engine.beacon() for engine in self.engines) if self.beacon else (),
            metrics=metrics,
            door=self.door,
            processes=self.processes,
            probe=self.probe,
            paused=self.paused,
            late=self.late,
        )
