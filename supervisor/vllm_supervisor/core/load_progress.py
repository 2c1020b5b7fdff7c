"""How a start is going, for people: which line of the engine to show, and how often to say it where nobody watches.

Rules:
* A percentage is taken from any line that prints one; the words before it are its label.
* Lines that say nothing about the load (routes, banners, warnings of libraries) are passed over. Of an engine whose
  lines have no levels every other line is shown.
* In a log the steps between two reports grow with the time a start takes: a long load makes dozens of lines, not thousands.
"""

import re
from dataclasses import dataclass

from vllm_supervisor.core.engine_log import strip
from vllm_supervisor.core.plain_text import printable

_PERCENT = re.compile(r"^(.*?)[:\s|]*\b(\d{1,3})(?:\.\d+)?%")
_PASSED_OVER = re.compile(
    r"^Route: |^Available routes|^non-default args|^[\s█▄▀▐▌]|^Started server|^Waiting for app|^\""
)
_REPORTS = ((60.0, 10.0), (600.0, 30.0), (float("inf"), 60.0))  # (up to this elapsed time, one report every …), seconds
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Progress:
    """A percentage the engine printed, and what it is of."""

    label: str
    percent: int


class LoadProgress:
    """What the engine's lines say of its load."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.line = ""
        self.progress: Progress | None = None
        self.changed_at: float | None = None  # monotonic seconds of the last visible step
        self._levels = False  # the engine's lines have levels

    def add(self, raw: str, now: float) -> None:
        """Take one line of the engine; `now` in monotonic seconds."""
        line = strip(raw)
        self._levels = self._levels or bool(line.level)
        wanted = "INFO" if self._levels else ""
        if found := _PERCENT.match(line.text):
            progress = Progress(found[1].strip()[:60], min(100, int(found[2])))
            if progress != self.progress:
                self.progress, self.changed_at = progress, now
        elif line.level == wanted and line.text not in {"", self.line} and not _PASSED_OVER.match(line.text):
            self.line, self.progress, self.changed_at = line.text, None, now

    def show(self, elapsed_s: float, rss_bytes: int | None, width: int) -> str:
        """Return one line of at most `width` columns: elapsed time, memory, and what the engine does."""
        parts = [f"starting {int(elapsed_s) // 60}:{int(elapsed_s) % 60:02d}"]
        if rss_bytes:
            parts.append(f"{rss_bytes / (1 << 30):.1f} GiB" if rss_bytes >= 1 << 30 else f"{rss_bytes // _MIB} MiB")
        if self.progress is not None:
            full = self.progress.percent // 10
            parts.append(f"[{'#' * full}{'.' * (10 - full)}] {self.progress.percent}% {self.progress.label}".rstrip())
        elif self.line:
            parts.append(self.line)
        text = printable("  ".join(parts))
        return text if len(text) <= width else text[: max(0, width - 1)] + "…"[: max(0, width)]


def report_due(elapsed_s: float, last_s: float) -> bool:
    """Say whether a log line about the load is due, `elapsed_s` into it, the last one having come at `last_s`."""
    step = next(step for limit, step in _REPORTS if elapsed_s <= limit)
    return elapsed_s - last_s >= step
