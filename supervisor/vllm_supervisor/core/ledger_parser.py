"""Reads the ledger's lines back: bytes become a record, or the reason why they are none.

Rules:
* A line is one JSON object that begins with `{` and ends with `}` and one newline, and holds the six common fields.
* A field that is known has its type; a field or an event that is not known is a later version's, and passes unread.
  Only what makes the line what it is (the id of a request, its outcome, its state) has to be there.
* `format` in a `life` or `segment` line names a later way of writing that this version does not read.
* Nearly all lines are the three of a request, as we write them: those are taken apart by their shape, in a third of the
  time that parsing JSON takes. Any other spelling of the same goes the long way, to the same record.
* Numbers are whole numbers from 0 on that fit 63 bits, or finite seconds; texts are bounded. So whoever adds, prints or
  compares them needs no guard of its own. Text may still hold anything a terminal takes for an order: print it printable.
"""

import re
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

from vllm_supervisor.core.json_text import JsonError, parse_json

FORMAT = 1
LONGEST_LINE = 1 << 20  # bytes; a line of ours has a few hundred, one that lists the engine's processes a few thousand
LONGEST_TEXT = 64 * 1024  # characters
LARGEST = (1 << 63) - 1

Record = dict[str, Any]
"""One parsed line; the common fields are there, and every field that is known has its type."""

_STAMP = re.compile(r"\d{4}-\d\d-\d\dT(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d\.\d{3}Z", re.ASCII)


def read_line(line: bytes) -> Record | str:
    """Read one line, with or without its newline; return the reason if it is not a whole ledger line."""
    body = line.removesuffix(b"\n")
    if len(body) > LONGEST_LINE:
        return TOO_LONG
    usual = _read_usual(body)
    if usual is not None:
        return usual
    if not body.startswith(b"{") or not body.endswith(b"}"):
        return _no_object(body)
    try:
        record: Record = parse_json(body)
    except JsonError as error:
        return str(error)
    for name, (is_right, should) in _COMMON.items():
        if name not in record:
            return f"{name} is missing"
        if not is_right(record[name]):
            return f"{name} is not {should}"
    event = record["event"]
    for name, (is_right, should) in _FIELDS.get(event, {}).items():
        if name in record and not is_right(record[name]):
            return f"{name} is not {should}"
    if "by" in record and not _is_name(record["by"]):
        return f"by is not {_NAME.should}"
    for name in _NEEDED.get(event, ()):
        if name not in record:
            return f"{name} is missing"
    return record


TOO_LONG = "it is longer than 1 MiB"


def parse(line: bytes) -> Record | None:
    """Read one line as `read_line` does; None if it is not a whole ledger line."""
    record = read_line(line)
    return None if isinstance(record, str) else record


def _no_object(body: bytes) -> str:
    if not body.strip(b"\0"):
        return "NUL bytes" if body else "it is empty"
    if body.endswith(b"}\r"):
        return "it ends in CR LF: something has converted the file"
    return "not a whole JSON object"


# -- the usual lines, as core.ledger writes them -----------------------------------------------------------------------

_INT = r"(?:0|[1-9]\d{0,14})"
_REAL = r"(?:0|[1-9]\d{0,11})\.\d{6}"
_PLAIN = r"[ !#-\[\]-~]{0,200}"  # printable ASCII without a quote or a backslash
_WORD = r"[!#-\[\]-~]{1,200}"
_HEAD = (
    rf'\{{"t":(?P<t>{_REAL}),"at":"(?P<at>\d{{4}}-\d\d-\d\dT(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d\.\d{{3}}Z)","boot":"(?P<boot>{_WORD})"'
    rf',"run":"(?P<run>{_WORD})","inc":(?P<inc>{_INT}),"event":"(?P<event>'
)
_ID = rf'","id":"(?P<id>{_PLAIN})"'
_ACCEPTED = re.compile(rf'{_HEAD}accepted){_ID},"class":"(?P<class>{_PLAIN})"\}}', re.ASCII)
_EXECUTION = re.compile(
    rf'{_HEAD}execution){_ID},"state":"(?P<state>{_PLAIN})","evidence":"(?P<evidence>{_PLAIN})"\}}', re.ASCII
)
_OUTCOME = re.compile(
    rf'{_HEAD}outcome){_ID},"outcome":"(?P<outcome>{_PLAIN})","why":"(?P<why>{_PLAIN})","status":(?P<status>{_INT}|null)'
    rf',"stream":(?P<stream>true|false),"ended_by":"(?P<ended_by>{_PLAIN})","bytes":(?P<bytes>{_INT})'
    rf',"first_byte_s":(?P<first_byte_s>{_REAL}|null),"duration_s":(?P<duration_s>{_REAL}|null)'
    rf',"marker":"(?P<marker>{_PLAIN})"\}}',
    re.ASCII,
)


def _read_usual(body: bytes) -> Record | None:
    """Read one of a request's three lines, written as we write it; None for any other line."""
    text = body.decode("ascii", "replace")
    pattern = _EXECUTION if '"execution"' in text else _ACCEPTED if '"accepted"' in text else _OUTCOME
    match = pattern.fullmatch(text)
    if match is None:
        return None
    record: Record = match.groupdict()
    if not _is_day(record["at"][:10]):
        return None
    record["t"], record["inc"] = float(record["t"]), int(record["inc"])
    if pattern is _OUTCOME:
        record["bytes"], record["stream"] = int(record["bytes"]), record["stream"] == "true"
        for name, kind in (("status", int), ("first_byte_s", float), ("duration_s", float)):
            record[name] = None if record[name] == "null" else kind(record[name])
    return record


@lru_cache(maxsize=64)
def _is_day(text: str) -> bool:
    """Say whether there is such a day; nearly every line is of the same few."""
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


# -- what the fields hold ----------------------------------------------------------------------------------------------


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 200 and value.isascii() and value.isprintable()


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_TEXT


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST  # a bool is no number here


def _is_seconds(value: object) -> bool:
    return (type(value) is int or type(value) is float) and 0 <= value < 1e15


def _is_flag(value: object) -> bool:
    return type(value) is bool


def _is_stamp(value: object) -> bool:
    if not isinstance(value, str) or not _STAMP.fullmatch(value):
        return False
    return _is_day(value[:10])


def _or_null(is_right: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or is_right(value)


def _are_counts(value: object) -> bool:
    return isinstance(value, dict) and all(_is_count(number) for number in value.values())


def _are_processes(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict) and _is_count(one.get("pid")) and _is_count(one.get("start", 0)) for one in value
    )


def _is_format(value: object) -> bool:
    return type(value) is int and value == FORMAT


class _Kind(NamedTuple):
    is_right: Callable[[object], bool]
    should: str  # be


_NAME, _TEXT, _FLAG = _Kind(_is_name, "a name"), _Kind(_is_text, "text"), _Kind(_is_flag, "true or false")
_COUNT, _COUNT_OR_NULL = _Kind(_is_count, "a whole number"), _Kind(_or_null(_is_count), "a whole number")
_SECONDS, _SECONDS_OR_NULL = _Kind(_is_seconds, "seconds"), _Kind(_or_null(_is_seconds), "seconds")

_COMMON = {
    "t": _SECONDS,
    "at": _Kind(_is_stamp, "a UTC time"),
    "boot": _NAME,
    "run": _NAME,
    "inc": _COUNT,
    "event": _NAME,
}
_NEEDED = {"accepted": ("id",), "outcome": ("id", "outcome"), "execution": ("id", "state")}
_RUN = {
    "format": _Kind(_is_format, f"{FORMAT}: a later version wrote it"),
    "release": _TEXT,
    "version": _TEXT,
    "name": _TEXT,
    "pid": _COUNT,
    "start": _COUNT,
}
_FIELDS: dict[str, dict[str, _Kind]] = {
    "life": _RUN,
    "segment": {**_RUN, "segment": _COUNT, "oldest_needed": _COUNT, "read_from": _COUNT},
    "accepted": {"id": _TEXT, "class": _TEXT},
    "rejected": {"class": _TEXT, "reason": _TEXT, "n": _COUNT},
    "outcome": {
        "id": _TEXT,
        "outcome": _TEXT,
        "why": _TEXT,
        "status": _COUNT_OR_NULL,
        "stream": _FLAG,
        "ended_by": _TEXT,
        "bytes": _COUNT,
        "first_byte_s": _SECONDS_OR_NULL,
        "duration_s": _SECONDS_OR_NULL,
        "marker": _TEXT,
    },
    "execution": {"id": _TEXT, "state": _TEXT, "evidence": _TEXT},
    "phase": {"phase": _TEXT, "why": _TEXT},
    "engine": {"what": _TEXT, "pid": _COUNT_OR_NULL, "processes": _Kind(_are_processes, "a list of processes")},
    "gap": {"lost": _COUNT},
    "balance": {
        "accepted": _COUNT,
        **dict.fromkeys(("completed", "failed", "cancelled", "open", "rejected", "lost"), _COUNT),
        "executions": _Kind(_are_counts, "a table of whole numbers"),
        **dict.fromkeys(("holds", "clean", "settled", "partial"), _FLAG),
    },
}
