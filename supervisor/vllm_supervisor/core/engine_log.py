"""What the engine's lines say: the last of them, the first error of an incarnation and its root, how a load goes on.

Rules:
* Prefixes that vLLM, torch and Python logging put before a line are taken off before anything is matched, and so are
  ISO 8601 stamps with a level behind them; of a line that is one JSON object level and message are taken.
* The root cause is the first error, not the last: what follows are wrappers ("Engine core initialization failed").
  A block whose only causes are wrappers counts only while nothing better is known.
* An engine that serves for days logs errors that ended nothing. `error(since)` asks for the first one near its end.
* A line is evidence, never a verdict: a start that succeeds prints errors too.
* Everything is bounded: lines, their length, the blocks kept.

Source of facts: outputs of vLLM 0.32.0 recorded in tests/data; vLLM's logging format (vllm/logger.py).
"""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_supervisor.core.json_text import JsonError, parse_json

_TAIL_LINES = 500
LINE_CHARS = 2000
_HEAD = 60  # lines kept of the beginning of a block
_END = 60  # and of its end, where Python prints the exception
_BLOCKS = 16
_CAUSE_CHARS = 600
_DETAILS = 3  # indented lines below an exception that still explain it (pydantic's do)

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_PROCESS = re.compile(r"\(([\w.:-]+(?: [\w.:-]+)*? pid=\d+)\) ?")
_RANK = re.compile(r"\[(?:default\d+|rank ?\d+)\]: ?")
_LOGGER = re.compile(
    r"(DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL) \d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? \[[^\]\s]+:\d+\] ?"
)
_GLOG = re.compile(r"\[?([DIWEF])\d{4} \d\d:\d\d:\d\d\.\d+ [^\]]*?:\d+\] ?")
_PLAIN = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL): +")  # uvicorn
# 2025-12-01T10:00:00.123Z, [2025-12-01 10:00:00 TP0], 2025-12-01 10:00:00,123 - name - : what stands before a level.
_ISO_STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?: ?(?:Z|[+-]\d\d:?\d\d))?"
_ISO = re.compile(rf"(?:\[{_ISO_STAMP}(?: [^\]\s]{{1,40}}){{0,3}}\]|{_ISO_STAMP})[ :|\-]*")
_ISO_LEVEL = re.compile(
    r"(?:[\w.]{1,80} [-|] )?[\[<]?(TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|CRITICAL|FATAL)\b[\]>]?[ :|\-]*",
    re.IGNORECASE,
)
_LEVELS = {"WARN": "WARNING", "ERR": "ERROR", "PANIC": "FATAL", "SEVERE": "ERROR"}
_GLOG_LEVELS = {"D": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
_ERRORS = frozenset({"ERROR", "CRITICAL", "FATAL"})

_TRACEBACK = re.compile(r"^\s*Traceback \(most recent call last\):")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure)\b(?::|$)")
_START = re.compile(
    r"^(?:usage: |\S.*?: error: |Fatal Python error: |terminate called |\*\*\* Aborted|"
    r"Segmentation fault|Bus error|Killed\b|Error: |error: )|\bCUDA error\b|\bNCCL error\b"
)
_LINKS = ("During handling of the above exception", "The above exception was the direct cause")
_DECORATION = re.compile(r"^[\s^~|+\-]*$")
_RETRIED = re.compile(r"\bretrying \d+ of \d+", re.IGNORECASE)
_NOISE = re.compile(r"resource_tracker\.py|leaked (?:shared_memory|semaphore) objects")
_WRAPPER = re.compile(
    r"Engine core initialization failed|EngineDeadError|EngineCore encountered|EngineCore failed to start"
    r"|WorkerProc (?:failed|hit|initialization failed)|AsyncLLM output_handler failed|died unexpectedly"
    r"|Failed core proc|Engine process failed|See (?:root cause|stack trace) "
)


# What vLLM prints when its engine is dead and nothing will ever be answered again (vllm/v1/engine/exceptions.py).
_DEAD = re.compile(r"EngineDeadError\b|EngineCore encountered a fatal error")


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its prefixes: `source` such as "EngineCore pid=68" or "", `level` or "", and the `text`."""

    source: str
    level: str
    text: str


def plain(raw: str) -> str:
    """Remove escape sequences, which may stand in the middle of a word, and NUL bytes."""
    return _ANSI.sub("", raw).replace("\0", "")


def strip(raw: str) -> Line:
    """Take prefixes and escape sequences off a line."""
    rest = plain(raw)
    if rest.startswith("{") and (line := _json_line(rest)) is not None:
        return line
    source = level = ""
    while True:
        if found := _PROCESS.match(rest):
            source = source or found[1]
        elif found := _LOGGER.match(rest):
            level = level or found[1]
        elif found := _GLOG.match(rest):
            level = level or _GLOG_LEVELS[found[1]]
        elif found := _PLAIN.match(rest):
            level = level or found[1]
        elif found := _ISO.match(rest):
            if after := _ISO_LEVEL.match(rest, found.end()):
                level, found = level or _level(after[1]), after
        else:
            found = _RANK.match(rest)
        if found is None or not found.end():
            return Line(source, level, rest.rstrip())
        rest = rest[found.end() :]


def _json_line(raw: str) -> Line | None:
    """Read a line that is one JSON object with a message; None if it is none."""
    try:
        found = parse_json(raw.encode(errors="replace"))
    except JsonError:
        return None
    message = _first_text(found, ("message", "msg", "event"))
    if message is None:
        return None
    level = _first_text(found, ("level", "levelname", "severity", "lvl")) or ""
    error = (_first_text(found, ("exc_info", "exception", "error", "stack")) or "").strip()
    told = [message, *error.splitlines()[-1:]]
    return Line("", _level(level), " ".join(": ".join(told).split()))


def _first_text(found: Mapping[str, object], names: Sequence[str]) -> str | None:
    return next((value for name in names if isinstance(value := found.get(name), str)), None)


def _level(word: str) -> str:
    return _LEVELS.get(word.upper(), word.upper())


@dataclass(slots=True)
class ErrorBlock:
    """One error as it was printed. `at` is when it began (monotonic seconds), `lines` come without prefixes."""

    at: float
    source: str
    level: str
    head: list[str] = field(default_factory=list)
    end: deque[str] = field(default_factory=lambda: deque(maxlen=_END))
    causes: list[str] = field(default_factory=list)  # exceptions and error lines in order, each one line

    @property
    def lines(self) -> list[str]:
        """The block; of a very long one its beginning and its end."""
        return [*self.head, *self.end]

    @property
    def cause(self) -> str:
        """The first exception or error that is no wrapper, else the last of the wrappers, on one line."""
        return next((cause for cause in self.causes if not is_wrapper(cause)), self.causes[-1] if self.causes else "")

    @property
    def wrapper(self) -> bool:
        """True while all that is known only says that something else failed."""
        return not self.cause or is_wrapper(self.cause)

    def _append(self, text: str) -> None:
        (self.head if len(self.head) < _HEAD else self.end).append(text)


def says_dead(raw: str) -> bool:
    """Say whether an engine calls itself dead in this line: as an error or an exception, never in what it quotes."""
    if not _DEAD.search(raw):
        return False
    line = strip(raw)
    return line.level in _ERRORS or (not line.level and bool(_EXCEPTION.match(line.text)))


def is_wrapper(text: str) -> bool:
    """Say whether an error's sentence only points at another one."""
    return bool(_WRAPPER.search(text))


class EngineLog:
    """The lines of one incarnation. Feed `add`; ask the rest."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._first: list[ErrorBlock] = []  # the first, and the first that is no wrapper
        self._recent: deque[ErrorBlock] = deque(maxlen=_BLOCKS)
        self._open: dict[str, _Reading] = {}

    def add(self, raw: str, now: float) -> None:
        """Take one line without its end; `now` in monotonic seconds."""
        raw = raw[:LINE_CHARS]
        self._tail.append(raw)
        line = strip(raw)
        reading = self._open.get(line.source)
        if reading is not None:
            if reading.take(line):
                return
            del self._open[line.source]
        if _begins(line):
            block = ErrorBlock(now, line.source, line.level)
            reading = _Reading(block)
            reading.begin(line)
            if len(self._open) >= _BLOCKS:
                self._open.pop(next(iter(self._open)))
            self._open[line.source] = reading
            self._keep(block)

    def _keep(self, block: ErrorBlock) -> None:
        if not any(_counts(one) and not one.wrapper for one in self._first):
            # A wrapper is followed by a better one at most once; noise is only known to be noise by its later lines.
            self._first = [one for one in self._first if _counts(one)][:1]
            self._first.append(block)
        self._recent.append(block)

    def tail(self, count: int = _TAIL_LINES) -> list[str]:
        """Return the last lines as they were printed."""
        return list(self._tail)[-count:] if count else []

    def error(self, since: float | None = None) -> ErrorBlock | None:
        """Return the first error, or the first one since a time; a wrapper only if there is nothing better."""
        found: Sequence[ErrorBlock] = (
            self._first if since is None else [block for block in self._recent if block.at >= since]
        )
        found = [block for block in found if _counts(block)]
        return next((block for block in found if not block.wrapper), found[0] if found else None)


def _begins(line: Line) -> bool:
    if _RETRIED.search(line.text) or _NOISE.search(line.text) or not line.text:
        return False
    if line.level and line.level not in _ERRORS:
        return False
    return bool(line.level in _ERRORS or _opens(line.text))


def _opens(text: str) -> bool:
    """Say whether a line looks like the beginning of an error by itself."""
    return bool(_TRACEBACK.match(text) or _EXCEPTION.match(text) or _START.search(text))


def _counts(block: ErrorBlock) -> bool:
    """Say whether a block is an error at all; Python's resource tracker prints tracebacks that mean nothing."""
    return not any(_NOISE.search(text) for text in block.lines)


class _Reading:
    """A block while its lines come in: which of them belong to it, and which name a cause."""

    def __init__(self, block: ErrorBlock) -> None:
        self._block = block
        self._frames = False  # inside a traceback, before its exception
        self._details = 0  # how many lines may still explain the exception above
        self._ended = False  # its exception has been printed

    def begin(self, line: Line) -> None:
        """Take the first line."""
        self._block._append(line.text)  # noqa: SLF001 - one thing in two classes: the block and its reader
        self._judge(line)

    def take(self, line: Line) -> bool:
        """Take a further line of the same source; False if it does not belong."""
        text = line.text
        if line.level and line.level not in _ERRORS:
            return False
        if text.startswith(_LINKS):
            self._ended = False
        opens = _opens(text) and not self._frames
        if opens and self._ended:
            return False  # another error right below this one
        if not (line.level or self._frames or opens or not text or text[0].isspace() or text.startswith(_LINKS)):
            return False
        self._block._append(text)  # noqa: SLF001 - as above
        self._judge(line)
        return True

    def _judge(self, line: Line) -> None:
        text = line.text
        if _TRACEBACK.match(text):
            self._frames = True
            self._details = 0
        elif self._frames:
            if text and not text[0].isspace() and not _DECORATION.match(text):
                self._frames = False
                self._ended = True
                self._cause(text)
                self._details = _DETAILS
        elif self._details and text.startswith(" ") and not _DECORATION.match(text):
            self._details -= 1
            self._block.causes[-1] = f"{self._block.causes[-1]} {text.strip()}"[:_CAUSE_CHARS]
        elif text.startswith("usage: "):
            self._details = 0
        elif text and not text[0].isspace() and not text.startswith(_LINKS):
            self._ended = bool(_EXCEPTION.match(text))
            self._cause(text)
            self._details = 0

    def _cause(self, text: str) -> None:
        if len(self._block.causes) < _BLOCKS:
            self._block.causes.append(text[:_CAUSE_CHARS])
