"""Our own log: one line an event, JSON when standard error is no terminal, readable on one.

Rules: it never blocks and never fails. Lines go to a `sink` that only queues them; a value that cannot be shown is
shown as its type's name rather than raising in the middle of something else.
"""

import logging
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

# structlog imports rich where it is installed, for a renderer of its own that we do not use: 50 ms and 4 MB of a start.
_hidden = "rich" not in sys.modules
if _hidden:
    sys.modules["rich"] = None  # type: ignore[assignment]  # how Python spells "not installed"
import structlog  # noqa: E402

if _hidden:
    del sys.modules["rich"]

from vllm_supervisor.core.priorities import with_priority  # noqa: E402

Sink = Callable[[bytes], None]
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_MARKS = {"debug": "·", "info": " ", "warning": "!", "error": "✗"}


class _SinkLogger:
    """What structlog hands the finished line to."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def msg(self, line: str) -> None:
        self._sink(line.encode("utf-8", "backslashreplace") + b"\n")

    debug = info = warning = error = critical = msg


class _Stamped:
    """Puts the time first, and leaves out what is not known."""

    def __init__(self, stamp: Callable[[], str]) -> None:
        self._stamp = stamp

    def __call__(self, _logger: object, level: str, entry: MutableMapping[str, Any]) -> Mapping[str, Any]:
        ordered = {"at": self._stamp(), "level": level, "event": entry.pop("event"), **entry}
        return {key: value for key, value in ordered.items() if value is not None}


def _readable(_logger: object, _level: str, entry: MutableMapping[str, Any]) -> str:
    """`12:00:01 ! sentence  key=value …`: for eyes, on one line."""
    at, level, event = entry.pop("at"), entry.pop("level"), entry.pop("event")
    sentence = entry.pop("sentence", event)
    extra = entry.pop("exception", "")
    fields = "  ".join(f"{key}={value}" for key, value in entry.items())
    line = f"{at[11:19]} {_MARKS.get(level, ' ')} {sentence}" + (f"  ({fields})" if fields else "")
    return line + (f"\n{extra}" if extra else "")


def _prefixed(render: Any) -> Any:
    def rendered(logger: object, level: str, entry: MutableMapping[str, Any]) -> str:
        return with_priority(render(logger, level, entry), level)

    return rendered


def build(sink: Sink, *, json: bool, level: str, stamp: Callable[[], str], journal: bool = False) -> Any:
    """Make the logger. `level` is one of LEVELS; `json` chooses the form; `stamp` tells the time, ISO 8601, UTC.

    `journal`: each line begins with its priority.
    """
    render: Any = structlog.processors.JSONRenderer(default=lambda value: type(value).__name__) if json else _readable
    return structlog.wrap_logger(
        _SinkLogger(sink),
        processors=[_Stamped(stamp), structlog.processors.format_exc_info, _prefixed(render) if journal else render],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        cache_logger_on_first_use=False,
    )
