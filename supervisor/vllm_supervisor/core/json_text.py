"""Strict JSON: bytes of a file or a peer become plain values, or an error with the reason in a few words.

Rules:
* Nothing but `JsonError` is raised, whatever the bytes are: Python's own parser answers deep nesting with a
  RecursionError, and a number of more than 4,300 digits with a plain ValueError (both CPython 3.11).
* Stricter than Python's parser: a field that stands twice, `NaN` and `Infinity` are errors, as RFC 8259 allows.
* What is returned is at most `MAX_DEPTH` deep, so that code that walks or writes it needs no guard of its own.
* Linear in the size of the input, which the caller bounds.
"""

import json
from typing import Any

MAX_DEPTH = 16


class JsonError(ValueError):
    """The bytes are no JSON that we take; the text says why, to stand behind "is unreadable: "."""


def parse_json(data: bytes) -> Any:
    """Return the value `data` holds. Raises JsonError."""
    try:
        value = _DECODER.decode(data.decode())
    except UnicodeDecodeError:
        raise JsonError("not UTF-8") from None
    except json.JSONDecodeError:
        raise JsonError("NUL bytes in it" if b"\0" in data else "not JSON") from None
    except RecursionError:
        raise JsonError("nested too deep") from None
    except JsonError:
        raise
    except ValueError:
        raise JsonError("a number has too many digits") from None
    if data.count(b"{") + data.count(b"[") > MAX_DEPTH and _is_deep(value):
        raise JsonError("nested too deep")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise JsonError("a field stands twice")
    return found


def _constant(_name: str) -> float:
    raise JsonError("not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def _is_deep(value: Any) -> bool:
    level = [value] if isinstance(value, dict | list) else []  # the containers of one depth
    for _ in range(MAX_DEPTH):
        inside = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
        level = [inner for inner in inside if isinstance(inner, dict | list)]
        if not level:
            return False
    return True
