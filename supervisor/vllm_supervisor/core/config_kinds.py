"""The kinds of value a configuration key can hold.

Rules:
* A kind reads what any source can give (a TOML value, or the text of an environment variable or a `--set`) and writes
  it back as TOML. `parse` raises BadValueError with what was expected; whoever calls it adds the key and the source.
* A key is declared once, by `setting(kind, default, doc)` as the field of a section: its default is written as a user
  would write it, and goes through the same parser.
"""

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_supervisor.core import units
from vllm_supervisor.core.units import BadValueError

_INTEGER = re.compile(r"-?\d{1,20}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value: its `name`, what it `expects` in words, how it is read and how it is written."""

    name: str
    expects: str
    parse: Callable[[object], Any]
    show: Callable[[Any], str]
    schema: dict[str, object]  # JSON Schema of what a file may hold


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of one key: its kind, its default as it is written, and one line of explanation."""

    kind: Kind
    default: object
    doc: str


def setting(kind: Kind, default: object, doc: str) -> Any:
    """Declare a key as the field of a section (typed Any, as `dataclasses.field` is, so the annotation rules)."""
    declared = Setting(kind, default, doc)
    if isinstance(default, dict):
        # Tables can hold secrets, so a configuration that is printed does not show them.
        return dataclasses.field(
            default_factory=lambda: kind.parse(default), metadata={"setting": declared}, repr=False
        )
    return dataclasses.field(default=kind.parse(default), metadata={"setting": declared})


def quote(text: str) -> str:
    """Write a TOML basic string (JSON's escapes are a subset of TOML's, but for DEL)."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise BadValueError("expected a string")
    if any(character < " " or character == "\x7f" for character in value):
        raise BadValueError("expected a string without control characters")
    if not _is_text(value):
        raise BadValueError("expected UTF-8")
    return value


def _is_text(value: str) -> bool:
    """Say whether it can be written anywhere: bytes of the environment that are no UTF-8 become surrogates."""
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def _boolean(value: object) -> bool:
    words = {"true": True, "false": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if not isinstance(value, bool):
        raise BadValueError("expected true or false")
    return value


def _quoted(show: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: quote(show(value))


STR = Kind("str", "a string", _string, quote, {"type": "string"})
BOOL = Kind("bool", "true or false", _boolean, lambda value: str(value).lower(), {"type": "boolean"})
DURATION = Kind(
    "duration",
    units.DURATION_HINT,
    units.parse_duration,
    _quoted(units.show_duration),
    {"type": ["string", "number"]},
)
SIZE = Kind("size", units.SIZE_HINT, units.parse_size, _quoted(units.show_size), {"type": ["string", "integer"]})
PERCENT = Kind("percent", units.PERCENT_HINT, units.parse_percent, _quoted(units.show_percent), {"type": "string"})


def above_zero(kind: Kind) -> Kind:
    """Narrow a kind of number to values above zero."""

    def parse(value: object) -> Any:
        number = kind.parse(value)
        if number <= 0:
            raise BadValueError(f"expected {kind.expects}, above zero")
        return number

    return dataclasses.replace(kind, expects=f"{kind.expects}, above zero", parse=parse)


def integer(low: int, high: int) -> Kind:
    """Make the kind of whole numbers from `low` to `high`."""
    expects = f"a whole number from {low} to {high}"

    def parse(value: object) -> int:
        if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise BadValueError(f"expected {expects}")
        return value

    return Kind("int", expects, parse, str, {"type": "integer", "minimum": low, "maximum": high})


def choice(*words: str) -> Kind:
    """Make the kind that is one of `words`."""
    expects = "one of " + ", ".join(f'"{word}"' for word in words)

    def parse(value: object) -> str:
        if value not in words:
            raise BadValueError(f"expected {expects}")
        return str(value)

    return Kind("choice", expects, parse, quote, {"enum": list(words)})


def or_word(word: str, kind: Kind) -> Kind:
    """Make the kind that takes `word` as it stands, and else what `kind` takes."""
    expects = f'"{word}", or {kind.expects}'

    def parse(value: object) -> Any:
        if value == word:
            return word
        try:
            return kind.parse(value)
        except BadValueError:
            raise BadValueError(f"expected {expects}") from None

    def show(value: Any) -> str:
        return quote(word) if value == word else kind.show(value)

    return Kind(kind.name, expects, parse, show, {"anyOf": [{"enum": [word]}, kind.schema]})


def list_of(item: Kind) -> Kind:
    """Make the kind of lists of `item`: a TOML array, or in text a JSON array or values with commas between."""
    expects = f"a list; each entry {item.expects}"

    def parse(value: object) -> tuple[Any, ...]:
        if isinstance(value, str):
            value = _list_from_text(value)
        if not isinstance(value, list | tuple):
            raise BadValueError(f"expected {expects}")
        return tuple(item.parse(entry) for entry in value)

    def show(value: tuple[Any, ...]) -> str:
        return "[" + ", ".join(item.show(entry) for entry in value) + "]"

    return Kind("list", expects, parse, show, {"type": "array", "items": item.schema})


def pair_of(item: Kind) -> Kind:
    """Make the kind of lists of exactly two of `item`."""
    kind = list_of(item)
    expects = f"a list of two; each entry {item.expects}"

    def parse(value: object) -> tuple[Any, ...]:
        entries: tuple[Any, ...] = kind.parse(value)
        if len(entries) != 2:
            raise BadValueError(f"expected {expects}")
        return entries

    return dataclasses.replace(kind, expects=expects, parse=parse)


def _list_from_text(text: str) -> object:
    text = text.strip()
    if text.startswith("["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise BadValueError('expected a list such as ["a", "b"] or a,b') from None
    return [part.strip() for part in text.split(",")] if text else []


def _table(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(entry, str) for entry in value.values()):
        raise BadValueError("expected a table of strings; numbers need quotes as well")
    for name in value:
        if not name or "=" in name or "\0" in name + value[name]:
            raise BadValueError("expected names that can be environment variables")
        if not _is_text(name + value[name]):
            raise BadValueError("expected UTF-8")
    return dict(value)


def _show_table(value: dict[str, str]) -> str:
    return "{" + ", ".join(f"{quote(name)} = {quote(text)}" for name, text in value.items()) + "}"


# Entries of a table are keys of their own: `--set engine.env.NAME=value`.
TABLE = Kind(
    "table",
    "a table of strings",
    _table,
    _show_table,
    {"type": "object", "additionalProperties": {"type": "string"}},
)
