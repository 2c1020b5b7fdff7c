"""The ledger's lines: how a fact becomes bytes, and what a torn end of a file is.

Rules:
* One JSON object a line, ASCII, ending in one newline; no line holds another newline. A line is whole or it is nothing.
* Every line begins with the same six fields: `t` (monotonic seconds), `at` (UTC, ISO 8601, milliseconds), `boot`
  (kernel boot id), `run`, `inc` (incarnation of the engine, 0 before the first), `event`.
* A line belongs to the account of its `run`. A later run that closes what a lost run left open writes into the lost
  run's account and names itself in `by`; `t` and `boot` are then the writer's.
* Nothing of a request but its id and its class is ever written: no prompt, header or address.
* Request ids are `RUN-NUMBER`, so an account of millions needs one bit for each settled request.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from json.encoder import encode_basestring_ascii as quote
from typing import Literal

from vllm_supervisor.core.journal import RequestOutcome
from vllm_supervisor.core.ledger_parser import LONGEST_LINE, parse
from vllm_supervisor.core.words import Evidence, ExecutionState, RequestClass

SEGMENT_PREFIX = "ledger-"
SEGMENT_SUFFIX = ".jsonl"
DIRECTORY = "ledger"

_COMMON = ("t", "at", "boot", "run", "inc", "event")


def segment_name(number: int) -> str:
    """Name the file of segment `number` (from 1); names sort in the order they were written."""
    return f"{SEGMENT_PREFIX}{number:08d}{SEGMENT_SUFFIX}"


def segment_number(name: str) -> int | None:
    """Read the number back from a file name, or None if the file is not a segment."""
    digits = name.removeprefix(SEGMENT_PREFIX).removesuffix(SEGMENT_SUFFIX)
    return int(digits) if digits.isdecimal() and len(digits) <= 12 and name == segment_name(int(digits)) else None


class RequestIds:
    """Gives the ledger ids of one run: `RUN-1`, `RUN-2`, and so on."""

    def __init__(self, run: str) -> None:
        """`run` is the id of this run; it has no hyphen."""
        self._run = run
        self._last = 0

    def __call__(self) -> str:
        """Return the next id."""
        self._last += 1
        return f"{self._run}-{self._last}"


@dataclass(frozen=True, slots=True)
class Clock:
    """Where the stamps come from: both return seconds, `wall` since the epoch and `monotonic` as in CLOCK_MONOTONIC."""

    monotonic: Callable[[], float]
    wall: Callable[[], float]


class Lines:
    """Builds the lines of one writer. Not thread-safe: each thread has its own."""

    def __init__(self, clock: Clock, *, boot: str, run: str) -> None:
        """`boot` is the kernel's boot id, `run` the id of the writing run."""
        self._clock = clock
        self._boot = quote(boot)
        self._run = quote(run)
        self._mine = f',"boot":{self._boot},"run":{self._run},"inc":'
        self._millisecond = -1
        self._second = -1
        self._prefix = ""
        self._at = ""
        self._shared: str | None = None  # within a turn its stamp, once there is one

    def begin_turn(self) -> None:
        """Give all lines from now on, until `end_turn`, one stamp, that of the first."""
        self._shared = ""

    def end_turn(self) -> None:
        """Give every line its own stamp."""
        self._shared = None

    def _stamp(self) -> str:
        if self._shared:
            return self._shared
        stamp = self._fresh_stamp()
        if self._shared is not None:
            self._shared = stamp
        return stamp

    def _fresh_stamp(self) -> str:
        millisecond = int(self._clock.wall() * 1000)
        if millisecond != self._millisecond:  # at full load many lines fall into one
            self._millisecond = millisecond
            second, rest = divmod(millisecond, 1000)
            if second != self._second:
                self._second = second
                self._prefix = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
            self._at = f',"at":"{self._prefix}.{rest:03d}Z"'
        return f'{{"t":{self._clock.monotonic():.6f}{self._at}'

    def accepted(self, inc: int, request_id: str, request_class: RequestClass) -> bytes:
        """Build the line that a request was let in."""
        return (
            f'{self._stamp()}{self._mine}{inc},"event":"accepted","id":{quote(request_id)}'
            f',"class":"{request_class}"}}\n'
        ).encode()

    def ended(self, inc: int, states: Iterable[tuple[ExecutionState, Evidence]], outcome: RequestOutcome) -> bytes:
        """Build what is written at the end of an exchange, as one piece with one stamp: execution lines, then outcome."""
        start = f"{self._stamp()}{self._mine}{inc}"
        name = quote(outcome.id)
        text = ""
        for state, evidence in states:
            text += f'{start},"event":"execution","id":{name},"state":"{state}","evidence":"{evidence}"}}\n'
        return (text + start + _outcome_tail(outcome)).encode()

    def execution(self, inc: int, request_id: str, state: ExecutionState, evidence: Evidence) -> bytes:
        """Build the line that says what is now known of the engine's work for a request."""
        return (
            f'{self._stamp()}{self._mine}{inc},"event":"execution","id":{quote(request_id)}'
            f',"state":"{state}","evidence":"{evidence}"}}\n'
        ).encode()

    def event(self, inc: int, event: str, fields: Mapping[str, object], *, run: str | None = None) -> bytes:
        """Build any other line; `fields` are JSON values. With `run` it goes into that run's account, signed by ours."""
        if run is None:
            return (self._stamp() + self._mine + str(inc) + _tail(event, fields)).encode()
        foreign = f',"boot":{self._boot},"run":{quote(run)},"inc":{inc}'
        return (self._stamp() + foreign + _tail(event, fields)[:-2] + f',"by":{self._run}}}\n').encode()


def _outcome_tail(outcome: RequestOutcome) -> str:
    name, _, result, why, status, stream, ended_by, size, first_byte_s, duration_s, marker = outcome
    first = "null" if first_byte_s is None else f"{first_byte_s:.6f}"
    return (
        f',"event":"outcome","id":{quote(name)},"outcome":"{result}","why":{quote(why)}'
        f',"status":{"null" if status is None else status},"stream":{"true" if stream else "false"}'
        f',"ended_by":"{ended_by}","bytes":{size},"first_byte_s":{first},"duration_s":{duration_s:.6f}'
        f',"marker":{quote(marker)}}}\n'
    )


def _tail(event: str, fields: Mapping[str, object]) -> str:
    if clash := fields.keys() & set(_COMMON):
        raise ValueError(f"a ledger line cannot hold {sorted(clash)} twice")
    return (
        f',"event":{quote(event)}'
        + "".join(f",{quote(key)}:{json.dumps(value, separators=(',', ':'))}" for key, value in fields.items())
        + "}\n"
    )


@dataclass(frozen=True, slots=True)
class Mend:
    """What to do to the end of a file before the first append: keep that many bytes, then maybe end the line."""

    keep: int
    newline: bool


def mend(size: int, rest: bytes) -> Mend:
    """Decide about a file of `size` bytes, zero bytes at its end not counted, whose bytes after the last newline are `rest`.

    A whole record that only lacks its newline gets it. What is shorter than a line can be was cut by a crash: nobody was
    ever told that it was written, so it goes, as do the zero bytes that a file system leaves after power loss. More than
    that is nothing that we began to write: it is kept, and ended, so that it counts as a line that cannot be read.
    """
    if not rest:
        return Mend(size, newline=False)
    if len(rest) > LONGEST_LINE or parse(rest) is not None:
        return Mend(size, newline=True)
    return Mend(size - len(rest), newline=False)


@dataclass(frozen=True, slots=True)
class LedgerPolicy:
    """How the ledger is kept, in seconds and bytes.

    `sync`: when lines are forced to the disk: before an acceptance counts, every `interval_s`, or when the kernel likes.
    """

    sync: Literal["always", "interval", "off"] = "interval"
    interval_s: float = 0.2
    max_bytes: int = 2 * 1024 * 1024 * 1024
    keep_s: float = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class LedgerHealth:
    """How the writing goes. `failed` is the state of the moment; `missing` says that evidence is gone for good."""

    failed: bool
    since: float | None  # monotonic seconds, while failed
    error: str  # the last error, "" if there never was one
    lost: int  # lines that are not in the file and never will be
    late: int  # acceptances whose request went on before the line was written
    at_risk: int  # lines whose fsync failed: they may not survive power loss
    written: int  # lines
    queued: int  # bytes that wait to be written
    segment: int  # number of the file being written

    @property
    def missing(self) -> bool:
        """Whether evidence is missing, which shows in our exit status."""
        return self.missing_n > 0

    @property
    def missing_n(self) -> int:
        """How many lines are missing, in whichever way."""
        return self.lost + self.late + self.at_risk


def missing_words(health: LedgerHealth) -> str:
    """Say what is missing, or "" for nothing."""
    parts = {
        "lines not written": health.lost,
        "requests that went on before their line was written": health.late,
        "lines that may not survive power loss": health.at_risk,
    }
    return ", ".join(f"{n} {words}" for words, n in parts.items() if n)
