"""The table of faults: everything the stand-in engine can do wrong, by name.

Rules:
* A fault is one row: name, kind of its parameter, default, one sentence. Code asks for a fault by its name alone and
  takes the value parsed by its kind, so a new fault is one row here and one question where it acts.
* Faults are set at start (`--mock-fault NAME[=VALUE]`) or while running (`POST /mock/fault`); those marked `start`
  describe how the processes are made and take effect only when given at start.
* `FaultSet` knows no clock and no process: who has to act on a change subscribes to it.
"""

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from vllm_supervisor.mock.texts import SIGNATURES


class Kind(StrEnum):
    """What a fault's value looks like."""

    FLAG = "flag"  # no value
    SECONDS = "seconds"  # 2, 2s, 200ms, 5m
    COUNT = "count"  # a whole number, 0 or more
    ENGINE = "engine"  # an engine index, or all
    ENDING = "ending"  # WHAT[@load|@SECONDS|@Nreq], seconds counted from ready


class FaultError(ValueError):
    """An unknown fault or a value that does not fit its kind; the message is one line for a person."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the table. `default` is the value when none is given, `choices` what an ENDING's WHAT may be."""

    name: str
    kind: Kind
    default: str
    sentence: str
    start: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ending:
    """An end of the process and its time: during the load, after `seconds` of ready time, or after `requests` answers."""

    what: str
    load: bool = False
    seconds: float | None = None
    requests: int | None = None


_F = Fault
_SIGNALS = tuple(number.name.removeprefix("SIG") for number in signal.Signals)
FAULTS: tuple[Fault, ...] = (
    # -- starting
    _F("slow_start", Kind.SECONDS, "5s", "The load takes this much longer.", start=True),
    _F(
        "load_progress",
        Kind.FLAG,
        "",
        "The load prints a percentage line that returns with CR, as the shard loader does.",
        start=True,
    ),
    # -- stopping
    _F("ignore_term", Kind.FLAG, "", "TERM and INT are ignored."),
    _F("slow_term", Kind.SECONDS, "5s", "The end comes this much later after TERM."),
    _F(
        "never_exit_with_streams",
        Kind.FLAG,
        "",
        "After TERM the engine is gone, open answers hang, and the process waits until their connections are closed.",
    ),
    # -- ending by itself
    _F(
        "exit",
        Kind.ENDING,
        "1",
        "The process exits with this code at this time, children ended in order.",
        choices=tuple(map(str, range(256))),
    ),
    _F(
        "signal",
        Kind.ENDING,
        "SEGV",
        "The process dies of this signal at this time; its children live on.",
        choices=_SIGNALS,
    ),
    _F(
        "error",
        Kind.ENDING,
        "missing_model@load",
        "vLLM's text of this error signature is printed, then the process exits as vLLM does.",
        choices=tuple(SIGNATURES),
    ),
    _F(
        "engine_core_dies",
        Kind.SECONDS,
        "0s",
        "EngineCore is killed after this time; the main process exits 0 some seconds later.",
    ),
    _F(
        "worker_dies",
        Kind.SECONDS,
        "0s",
        "The Worker is killed after this time; EngineCore follows, then the main process.",
    ),
    _F(
        "wedged_exit",
        Kind.FLAG,
        "",
        "When EngineCore is dead the main process says EngineDeadError and does not exit, TERM or not.",
    ),
    # -- answers
    _F("cut_answers", Kind.COUNT, "3", "The connection is dropped after so many tokens of an answer."),
    _F(
        "no_done",
        Kind.FLAG,
        "",
        "Streams end cleanly but without their last event ([DONE], message_stop, response.completed).",
    ),
    _F(
        "abort_answers",
        Kind.COUNT,
        "3",
        "Generation is aborted after so many tokens: finish_reason abort, then [DONE].",
    ),
    _F(
        "error_event",
        Kind.COUNT,
        "3",
        "After so many tokens a stream carries an error event, then [DONE] where vLLM sends it; a whole answer is 500.",
    ),
    _F("inference_status", Kind.COUNT, "500", "Inference requests are answered with this error status."),
    _F("every_status", Kind.COUNT, "503", "Every path is answered with this status, health and metrics included."),
    # -- output
    _F("log_flood", Kind.COUNT, "1000", "So many log lines a second are printed."),
    _F("log_ansi", Kind.FLAG, "", "A log line with ANSI colours and cursor movements is printed."),
    _F("log_long", Kind.COUNT, "1048576", "One log line of so many bytes is printed."),
    _F("log_invalid", Kind.FLAG, "", "A log line that is not UTF-8, with a NUL in it, is printed."),
    # -- processes
    _F(
        "own_session",
        Kind.FLAG,
        "",
        "The children run in sessions of their own and outlive every end of the main process.",
        start=True,
    ),
    _F(
        "shm",
        Kind.FLAG,
        "",
        "EngineCore maps a /dev/shm/psm_… file, removed at an orderly end and left behind by KILL.",
        start=True,
    ),
    # -- progress
    _F(
        "hang_steps", Kind.ENGINE, "all", "Steps of this engine begin and never end; the gauges keep their last values."
    ),
    _F("hang_scheduling", Kind.ENGINE, "all", "Requests of this engine never leave waiting."),
    _F("hang_first_step", Kind.ENGINE, "all", "The first step after idle never ends: running and waiting read 0."),
    _F("hang_http", Kind.FLAG, "", "Connections are accepted and no request is answered."),
    _F(
        "long_prefill", Kind.SECONDS, "30s", "Each prompt's prefill takes this long in one step, with every count flat."
    ),
    _F(
        "never_finish",
        Kind.FLAG,
        "",
        "Steps go on and tokens are counted, but no token is delivered and no request completes.",
    ),
    _F("keep_running", Kind.FLAG, "", "A request whose client left goes on running in the engine."),
    _F("asleep", Kind.COUNT, "1", "The engine sleeps at this level: requests wait, engine_sleep_state says so."),
    _F("paused", Kind.FLAG, "", "Scheduling is paused: requests wait, no metric says so."),
    # -- metrics
    _F("metrics_absent", Kind.FLAG, "", "/metrics answers 404."),
    _F("metrics_python_only", Kind.FLAG, "", "/metrics has no vllm: series, as with --disable-log-stats."),
    _F(
        "metrics_multiprocess",
        Kind.FLAG,
        "",
        "/metrics has no process_, python_ and _created series, as with several API servers.",
    ),
    _F("metrics_slow", Kind.SECONDS, "10s", "/metrics answers after this time."),
    _F("metrics_status", Kind.COUNT, "500", "/metrics answers with this status."),
    _F(
        "metrics_renamed",
        Kind.FLAG,
        "",
        "/metrics has the names of older releases: gpu_cache_usage_perc, no engine label.",
    ),
    _F("metrics_zero", Kind.FLAG, "", "/metrics has every series, at 0, whatever was done."),
    _F("stale_gauges", Kind.FLAG, "", "The gauges keep the values they have now."),
    _F(
        "start_time_alternates",
        Kind.FLAG,
        "",
        "process_start_time_seconds alternates between two values, as behind a balancing proxy.",
    ),
    # -- health
    _F("health_status", Kind.COUNT, "503", "/health and /ping answer with this status; 404 means not offered."),
    _F("health_slow", Kind.SECONDS, "10s", "/health and /ping answer after this time."),
)
TABLE: dict[str, Fault] = {fault.name: fault for fault in FAULTS}

_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_seconds(text: str) -> float:
    """Seconds from `2`, `2.5s`, `200ms`, `5m`, `1h`; raise FaultError otherwise."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|)", text)
    if match is None:
        raise FaultError(f"{text!r} is no duration; write 2s, 200ms or 5m")
    return float(match[1]) * _UNITS[match[2]]


def parse_count(text: str) -> int:
    """Give a whole number, 0 or more; raise FaultError otherwise."""
    if not text.isascii() or not text.isdigit():
        raise FaultError(f"{text!r} is no whole number")
    return int(text)


def parse_ending(text: str) -> Ending:
    """`WHAT[@load|@SECONDS|@Nreq]`; without a time the end comes at once when ready. Raise FaultError otherwise."""
    what, _, when = text.partition("@")
    if not what:
        raise FaultError(f"{text!r} does not say how to end; write 1@load, SEGV@2s or 3@10req")
    if when == "load":
        return Ending(what, load=True)
    if when.endswith("req"):
        return Ending(what, requests=parse_count(when.removesuffix("req")))
    return Ending(what, seconds=parse_seconds(when or "0"))


def _parse_engine(text: str) -> int | None:
    return None if text == "all" else parse_count(text)


_PARSERS: dict[Kind, Callable[[str], object]] = {
    Kind.SECONDS: parse_seconds,
    Kind.COUNT: parse_count,
    Kind.ENGINE: _parse_engine,
    Kind.ENDING: parse_ending,
}


@dataclass(slots=True)
class FaultSet:
    """The faults that are on, with their texts and parsed values; listeners hear the name of each that changed."""

    texts: dict[str, str] = field(default_factory=dict)
    _values: dict[str, object] = field(default_factory=dict)
    _listeners: list[Callable[[str], None]] = field(default_factory=list)

    def set(self, name: str, value: str | None = None) -> None:
        """Switch a fault on, with its default unless `value` is given. Raise FaultError if it does not exist or fit."""
        fault = TABLE.get(name)
        if fault is None:
            raise FaultError(f"no fault is called {name!r}; there are: {', '.join(TABLE)}")
        if fault.kind is Kind.FLAG:
            if value:
                raise FaultError(f"fault {name} takes no value, got {value!r}")
            parsed: object = True
            text = ""
        else:
            text = value or fault.default
            try:
                parsed = _PARSERS[fault.kind](text)
            except FaultError as error:
                raise FaultError(f"fault {name}: {error}") from None
            if isinstance(parsed, Ending) and parsed.what not in fault.choices:
                known = ", ".join(fault.choices) if len(fault.choices) < 100 else "0 to 255"
                raise FaultError(f"fault {name}: {parsed.what!r} is none of {known}")
        self.texts[name] = text
        self._values[name] = parsed
        self._tell(name)

    def clear(self, name: str) -> None:
        """Switch a fault off; raise FaultError if none has that name."""
        if name not in TABLE:
            raise FaultError(f"no fault is called {name!r}")
        self.texts.pop(name, None)
        self._values.pop(name, None)
        self._tell(name)

    def subscribe(self, listener: Callable[[str], None]) -> None:
        """Call `listener(name)` after each change."""
        self._listeners.append(listener)

    def _tell(self, name: str) -> None:
        for listener in self._listeners:
            listener(name)

    def on(self, name: str) -> bool:
        """Whether the fault is set."""
        return TABLE[name].name in self._values

    def seconds(self, name: str) -> float:
        """Give the duration of a SECONDS fault; 0 while it is off."""
        value = self._values.get(TABLE[name].name, 0.0)
        return value if isinstance(value, float) else 0.0

    def count(self, name: str) -> int | None:
        """Give the number of a COUNT fault; None while it is off."""
        value = self._values.get(TABLE[name].name)
        return value if isinstance(value, int) else None

    def hits(self, name: str, engine: int) -> bool:
        """Whether an ENGINE fault is on for this engine index."""
        return self.on(name) and self._values[name] in (None, engine)

    def ending(self, name: str) -> Ending | None:
        """How and when an ENDING fault ends the process; None while it is off."""
        value = self._values.get(TABLE[name].name)
        return value if isinstance(value, Ending) else None
