"""What counts as progress of a load, when it is not known how, or whether, the engine logs.

Rules:
* A line counts when its text is new: time stamps do not make a line new, and lines of one shape (equal but for their
  numbers) count at most `VARIANTS` times. So a heartbeat ("still waiting, 120 s") ends some day.
* Bytes read or written by the tree count from `IO_RATE` on; what the engine writes to its own output does not.
* Memory counts when the tree's resident memory reaches a new maximum, by at least `MEMORY_STEP`.
* CPU time from `CPU_RATE` cores on counts less: a hung rank spins for ever. The lifecycle lets it at most double the
  wait (see `cells_start.load_progressed`).
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from vllm_supervisor.core.engine_log import strip
from vllm_supervisor.core.proc import ProcessId

IO_RATE = 256 << 10  # bytes a second of the whole tree: heartbeats and polls stay far below
MEMORY_STEP = 16 << 20  # bytes above the last maximum
CPU_RATE = 0.5  # cores of the whole tree
VARIANTS = 500  # lines of one shape: more than any model has shards or layers
_MOST_SHAPES = 20_000  # remembered; a load that prints more kinds of lines than this has said enough

_STAMP = re.compile(r"\d{4}-\d\d-\d\d|\d{1,2}:\d\d(?::\d\d)?(?:[.,]\d+)?Z?|\b\d{9,}(?:\.\d+)?\b")
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]+|\b[0-9a-fA-F]*\d[0-9a-fA-F]*\b")


class Sign(StrEnum):
    """How a load showed that it goes on."""

    LINE = "line"
    IO = "io"
    MEMORY = "memory"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process has used so far: CPU seconds, resident bytes, bytes read and written (None: not readable)."""

    cpu_s: float
    rss_bytes: int
    io_bytes: int | None = None


class LoadActivity:
    """The signs of one load; feed it every line, and a look at the tree now and then."""

    def __init__(self) -> None:
        """Begin with no line seen and nothing used."""
        self._shapes: dict[bytes, tuple[bytes, int]] = {}  # shape: (last text, how many texts)
        self._at: float | None = None
        self._usage: Mapping[ProcessId, Usage] = {}
        self._output = 0
        self._most_rss = 0

    def line(self, raw: str) -> bool:
        """Whether a line of the engine says something new."""
        text = _STAMP.sub("", strip(raw).text).strip()
        if not text:
            return False
        shape, whole = _digest(_NUMBER.sub("#", text)), _digest(text)
        last, count = self._shapes.get(shape, (b"", 0))
        if whole == last or count >= VARIANTS or (not count and len(self._shapes) >= _MOST_SHAPES):
            return False
        self._shapes[shape] = whole, count + 1
        return True

    def look(self, usage: Mapping[ProcessId, Usage], output_bytes: int, now: float) -> Sign | None:
        """Compare the tree with the last look; `output_bytes` is what was read from its output so far."""
        since, before = self._at, self._usage
        wrote = output_bytes - self._output
        self._at, self._usage, self._output = now, usage, output_bytes
        rss = sum(one.rss_bytes for one in usage.values())
        grown = rss - self._most_rss >= MEMORY_STEP
        if grown or since is None:
            self._most_rss = rss
        if since is None or now <= since:
            return None
        cpu = io = 0.0
        for process, one in usage.items():
            last = before.get(process)
            if last is None:
                continue  # what it used before it was first seen may be no more than its own start
            cpu += max(0.0, one.cpu_s - last.cpu_s)
            if one.io_bytes is not None and last.io_bytes is not None:
                io += max(0, one.io_bytes - last.io_bytes)
        if (io - wrote) / (now - since) >= IO_RATE:
            return Sign.IO
        if grown:
            return Sign.MEMORY
        return Sign.CPU if cpu / (now - since) >= CPU_RATE else None


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
