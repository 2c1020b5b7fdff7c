"""Every configuration key: its section, name, kind, default and meaning, declared once.

Rules:
* One frozen dataclass a section. A key is one field; the parser, `config show`, `config schema` and the test of
  `configs/example.toml` read the fields, so adding a key is adding a field.
* A key is here only when something acts on it; any other name is refused as unknown.
* Durations are seconds, sizes bytes, lists tuples.
"""

from dataclasses import dataclass, field
from typing import Literal

from vllm_supervisor.core.config_kinds import (
    BOOL,
    DURATION,
    PERCENT,
    SIZE,
    STR,
    TABLE,
    above_zero,
    choice,
    integer,
    list_of,
    or_word,
    pair_of,
    setting,
)

_TIME = above_zero(DURATION)
_AMOUNT = above_zero(SIZE)
_SIGNALS = ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT", "SIGALRM", "SIGURG", "SIGIO", "SIGPWR")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine: which program it is and how it is started and stopped."""

    command: str = setting(STR, "vllm", "vLLM for `serve`: a name on PATH or a path")
    transport: Literal["uds", "tcp"] = setting(
        choice("uds", "tcp"), "uds", "how we reach the engine; tcp: a free loopback port"
    )
    env: dict[str, str] = setting(TABLE, {}, "variables added for the engine")  # noqa: RUF009  # it makes a factory
    beacon: Literal["auto", "off", "require"] = setting(
        choice("auto", "off", "require"), "auto", "true engine steps through a plugin: when it works, never, or always"
    )
    ready_probe: bool = setting(BOOL, default=True, doc="ready only after a first one-token completion")
    start_timeout: float = setting(_TIME, "30m", "longest load without visible progress")
    stop_grace: float = setting(DURATION, "30s", "from TERM to KILL")
    root_path: str = setting(
        STR, "", "prefix of the engine's paths, beside the one that a --root-path in its command names"
    )
    sweep: bool = setting(BOOL, default=True, doc="end what an earlier run left before a start; false: refuse instead")
    sweep_domain: str = setting(STR, "", "engines of other killed supervisors are ended if theirs is the same")


@dataclass(frozen=True, slots=True)
class ListenConfig:
    """Where the front door of `run` listens; `serve` takes vLLM's own options and defaults."""

    host: str = setting(STR, "127.0.0.1", "address `run` listens on; empty: every address")
    port: int = setting(integer(0, 65535), 8000, "port `run` listens on")


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """The control socket."""

    group: str = setting(STR, "", "group that may use the control socket; empty: the owner alone")


@dataclass(frozen=True, slots=True)
class FrontDoorConfig:
    """The public listener: limits, patience, and what passes."""

    max_in_flight: int = setting(integer(1, 1_000_000), 4096, "requests admitted at once; the next one reads 429")
    max_connections: int = setting(integer(1, 1_000_000), 4096, "client connections at once")
    max_head: int = setting(_AMOUNT, "64KiB", "largest request head; above it 431")
    max_body: int = setting(_AMOUNT, "1GiB", "largest request body; above it 413")
    head_timeout: float = setting(_TIME, "30s", "time for a whole request head; then 408")
    body_timeout: float = setting(_TIME, "60s", "longest pause without a byte of the request body; then 408")
    body_deadline: float = setting(
        DURATION, "30s", "time for a request body, and a second more for each body_min_rate received; then 408; 0: none"
    )
    body_min_rate: int = setting(SIZE, "16KiB", "bytes of a body that earn it a second more; 0: no body_deadline")
    idle_timeout: float = setting(_TIME, "75s", "how long an idle connection is kept")
    client_stall_timeout: float = setting(_TIME, "5m", "how long a client may take no byte of its answer")
    request_deadline: float = setting(DURATION, "0s", "longest life of a request; 0: no limit")
    hold: float = setting(DURATION, "0s", "how long a request may wait for a starting engine; 0: refused at once")
    health: Literal["ready", "alive"] = setting(
        choice("ready", "alive"), "ready", "what /health and /ping tell: readiness, or liveness"
    )
    allow_paths: tuple[str, ...] = setting(list_of(STR), [], "dangerous paths of the engine that may pass")


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """The judgement: how often it looks, how long it waits, when it probes."""

    interval: float = setting(_TIME, "5s", "between two looks at the engine")
    waits: tuple[float, float] = setting(
        pair_of(_TIME), ["150s", "150s"], "demand without progress: until suspect, and from there until stuck"
    )
    waits_slow: tuple[float, float] = setting(
        pair_of(_TIME), ["360s", "360s"], "the same for prefill steps, metrics alone, and the first 10 minutes"
    )
    compile_extension: float = setting(DURATION, "10m", "added once to the waits while compilers run")
    probe_interval: float = setting(DURATION, "60s", "between probes of an idle engine; 0: never probe")
    failing_after: float = setting(_TIME, "30s", "errors in a row for this long, without a success: failing")


@dataclass(frozen=True, slots=True)
class IncidentsConfig:
    """Evidence bundles."""

    keep: int = setting(integer(1, 10_000), 20, "bundles kept")
    max_size: int = setting(_AMOUNT, "200MiB", "size of all bundles")


@dataclass(frozen=True, slots=True)
class RestartConfig:
    """Restarts: how many, how fast, and what happens when they are spent."""

    max: int = setting(integer(0, 1000), 3, "restarts after a crash")
    within: float = setting(_TIME, "15m", "the window `max` counts in")
    stuck_max: int = setting(integer(0, 1000), 3, "restarts for hangs")
    stuck_within: float = setting(_TIME, "6h", "the window `stuck_max` counts in")
    start_attempts: int = setting(integer(1, 1000), 2, "tries of a start that fails for a reason that may pass")
    backoff: float = setting(DURATION, "1s", "wait before the first restart; doubled for each further one")
    backoff_max: float = setting(DURATION, "60s", "longest wait before a restart")
    healthy_after: float = setting(DURATION, "10m", "ready time after which a crash leaves the tally")
    on_give_up: Literal["auto", "park", "exit"] = setting(
        choice("auto", "park", "exit"), "auto", "stay alive and refuse, or end"
    )
    slow_retry: float = setting(DURATION, "0s", "try again from parked this often; 0: never by ourselves")


@dataclass(frozen=True, slots=True)
class DrainConfig:
    """The drain."""

    budget: float = setting(DURATION, "60s", "time for admitted requests to finish when we are stopped")
    propagation: float = setting(DURATION, "0s", "time for routes to notice before the drain begins; refused meanwhile")
    documentation: float = setting(DURATION, "5s", "time to close the ledgers and write the drain report")
    reserve: float = setting(DURATION, "5s", "time left over for what nobody planned")
    outer: Literal["auto"] | float = setting(
        or_word("auto", _TIME), "auto", "the limit a stop must fit; auto: systemd's, or none"
    )


@dataclass(frozen=True, slots=True)
class LedgerConfig:
    """The two ledgers."""

    sync: Literal["interval", "always", "off"] = setting(
        choice("interval", "always", "off"), "interval", "when lines are forced to the disk"
    )
    interval: float = setting(_TIME, "200ms", "between two of them, for `interval`")
    required: bool = setting(BOOL, default=False, doc="close admission while the ledger cannot be written")
    segment: int = setting(_AMOUNT, "64MiB", "size at which a new file begins")
    max_size: int = setting(_AMOUNT, "2GiB", "size of all files; older ones are removed")
    keep: float = setting(_TIME, "30d", "age at which a file is removed")


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """The machine's memory, where CPU and GPU share it."""

    mode: Literal["auto", "unified", "discrete", "off"] = setting(
        choice("auto", "unified", "discrete", "off"), "auto", "auto: guard it where the GPU shares it; unified: always"
    )
    floor: float = setting(PERCENT, "6%", "share of the memory at which the engine is killed at once")
    low: float = setting(PERCENT, "9%", "share at which admission closes, while memory falls")
    gate_timeout: float = setting(DURATION, "5m", "how long a start waits for memory to come back; then it gives up")
    evict_page_cache: bool = setting(
        BOOL, default=False, doc="before a start, give back the cache of the model's files"
    )
    drop_caches: bool = setting(
        BOOL, default=False, doc="before a start, drop the page cache of the whole machine (root)"
    )
    proc: str = setting(STR, "/proc", "where meminfo, pressure/memory, vmstat and driver/nvidia are read")
    kernel_log: str = setting(STR, "/dev/kmsg", "where the kernel's messages are read")


@dataclass(frozen=True, slots=True)
class SystemdConfig:
    """What systemd is told."""

    ready: Literal["engine", "listening"] = setting(
        choice("engine", "listening"), "engine", "when READY=1 is sent: the engine is ready, or the front door listens"
    )


@dataclass(frozen=True, slots=True)
class SignalsConfig:
    """Signals to the supervisor."""

    forward: tuple[str, ...] = setting(list_of(choice(*_SIGNALS)), [], "signals passed on to the engine's main process")


@dataclass(frozen=True, slots=True)
class ExitConfig:
    """Our own end."""

    reraise: tuple[str, ...] = setting(
        list_of(choice("SIGINT", "SIGTERM", "SIGHUP")),
        ["SIGINT"],
        "signals we end by, after a clean stop they asked for",
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Our own log, on standard error."""

    format: Literal["auto", "json", "console"] = setting(
        choice("auto", "json", "console"), "auto", "auto: console on a terminal, else JSON"
    )
    level: str = setting(choice("debug", "info", "warning", "error"), "info", "the least that is written")


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration: three keys of its own, and the sections."""

    release: str = setting(STR, "", "label in ledgers and metrics; empty: model and engine version")
    state_dir: str = setting(STR, "", "where ledgers and evidence live; empty: found as systemd and XDG say")
    run_dir: str = setting(STR, "", "where sockets live; empty: found as systemd and XDG say")
    trust_directories: bool = setting(
        BOOL,
        default=False,
        doc="take both as they are, although others can write or replace them; for container volumes",
    )
    engine: EngineConfig = field(default_factory=EngineConfig)
    listen: ListenConfig = field(default_factory=ListenConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    front_door: FrontDoorConfig = field(default_factory=FrontDoorConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    restart: RestartConfig = field(default_factory=RestartConfig)
    incidents: IncidentsConfig = field(default_factory=IncidentsConfig)
    drain: DrainConfig = field(default_factory=DrainConfig)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    systemd: SystemdConfig = field(default_factory=SystemdConfig)
    signals: SignalsConfig = field(default_factory=SignalsConfig)
    exit: ExitConfig = field(default_factory=ExitConfig)
    log: LogConfig = field(default_factory=LogConfig)
