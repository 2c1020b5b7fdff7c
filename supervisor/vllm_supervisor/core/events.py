"""What happened and why: a bounded, numbered memory that `events` and `status` read."""

from collections import deque
from collections.abc import Mapping
from typing import Any

KEPT = 1000


class Events:
    """The newest `KEPT` events; each is a plain mapping with `n`, `at`, `event`, `why`, `level` and its fields."""

    def __init__(self, kept: int = KEPT) -> None:
        """Keep at most `kept` events."""
        self._kept: deque[dict[str, Any]] = deque(maxlen=kept)
        self._next = 1

    def add(self, event: str, why: str, *, at: str, level: str = "info", **fields: Any) -> Mapping[str, Any]:
        """Remember one: `why` is a sentence for a person, `at` its UTC time, ISO 8601."""
        entry = {"n": self._next, "at": at, "event": event, "level": level, "why": why, **fields}
        self._next += 1
        self._kept.append(entry)
        return entry

    @property
    def last(self) -> int:
        """The number of the newest event; 0 before the first."""
        return self._next - 1

    def after(self, number: int, limit: int | None = None) -> list[Mapping[str, Any]]:
        """The events numbered above `number`, oldest first; with `limit`, the newest `limit` of them."""
        newer = [entry for entry in self._kept if entry["n"] > number]
        return list(newer if limit is None else newer[-limit:] if limit else [])
