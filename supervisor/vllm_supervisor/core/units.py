"""Durations, sizes and percentages as people write them.

Rules:
* A duration is `"200ms"`, `"90s"`, `"15m"`, `"6h"`, `"30d"` or a plain number of seconds; the value is seconds as a float.
* A size is `"64KiB"`, `"8GiB"`, `"10MB"` or a plain number of bytes; the value is whole bytes.
* A percentage is `"6%"`; the value is a fraction between 0 and 1.
* Nothing negative, infinite or without a meaning gets through: `BadValueError` says what was expected.
"""

import re
from decimal import Decimal

SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
BYTES = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}

DURATION_HINT = 'a duration such as "200ms", "90s", "15m", "6h", "30d", or seconds'
SIZE_HINT = 'a size such as "64KiB", "8GiB", or bytes'
PERCENT_HINT = 'a percentage such as "6%"'


class BadValueError(ValueError):
    """A text or value that is not what its kind expects; the message begins with "expected"."""


_LONGEST = 100 * 365 * SECONDS["d"]  # what a timer can still be set to
_QUANTITY = re.compile(r"\s*(\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})\s*([A-Za-z%]*)\s*", re.ASCII)


def _split(text: str, hint: str) -> tuple[str, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise BadValueError(f"expected {hint}")
    return match[1], match[2]


def parse_duration(value: object) -> float:
    """Return `value` in seconds; BadValueError when it is no duration between 0 and a hundred years."""
    if isinstance(value, str):
        number, unit = _split(value, DURATION_HINT)
        if unit and unit not in SECONDS:
            raise BadValueError(f"expected {DURATION_HINT}")
        seconds = float(number) * SECONDS[unit or "s"]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value) if abs(value) <= _LONGEST else -1.0  # a whole number can be beyond any float
    else:
        raise BadValueError(f"expected {DURATION_HINT}")
    if not 0 <= seconds <= _LONGEST:  # NaN fails both comparisons
        raise BadValueError(f"expected {DURATION_HINT}, not negative and below a hundred years")
    return seconds


def parse_size(value: object) -> int:
    """Return `value` in bytes; BadValueError when it is no whole number of bytes of at most 2^63 - 1."""
    if isinstance(value, str):
        number, unit = _split(value, SIZE_HINT)
        if unit and unit not in BYTES:
            raise BadValueError(f"expected {SIZE_HINT}")
        size = int(Decimal(number) * BYTES[unit or "B"])
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        raise BadValueError(f"expected {SIZE_HINT}")
    if not 0 <= size < 2**63:
        raise BadValueError(f"expected {SIZE_HINT}, not negative and below 8 EiB")
    return size


def parse_percent(value: object) -> float:
    """Return `value` as a fraction of one; BadValueError when it is no percentage between 0 and 100."""
    if not isinstance(value, str):
        raise BadValueError(f"expected {PERCENT_HINT}")
    number, unit = _split(value, PERCENT_HINT)
    if unit != "%" or float(number) > 100:
        raise BadValueError(f"expected {PERCENT_HINT}, at most 100%")
    return float(number) / 100


def show_duration(seconds: float) -> str:
    """Write seconds in the largest unit that keeps the value exact; `parse_duration` reads it back."""
    for unit in ("d", "h", "m", "s"):
        count = seconds / SECONDS[unit]
        if count >= 1 and count == int(count):
            return f"{int(count)}{unit}"
    if 0 < seconds < 1 and round(seconds * 1000) / 1000 == seconds:
        return f"{round(seconds * 1000)}ms"
    return f"{seconds:.12f}".rstrip("0").rstrip(".") + "s"


def show_size(size: int) -> str:
    """Write bytes in the largest binary unit that divides them; `parse_size` reads it back."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % BYTES[unit] == 0:
            return f"{size // BYTES[unit]}{unit}"
    return f"{size}B"


def show_percent(fraction: float) -> str:
    """Write a fraction as a percentage; `parse_percent` reads it back."""
    return f"{fraction * 100:.9f}".rstrip("0").rstrip(".") + "%"
