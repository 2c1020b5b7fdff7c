"""Who writes a ledger, and the two lines that the writer's thread builds by itself."""

from dataclasses import dataclass

from vllm_supervisor.core.ledger import Clock, Lines
from vllm_supervisor.core.ledger_parser import FORMAT


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What the life line says of a run. `start` is when our process started, in clock ticks since boot."""

    run: str
    boot: str
    release: str
    version: str
    name: str
    pid: int
    start: int

    def fields(self) -> dict[str, object]:
        """Build the fields of a life or segment line."""
        return {
            "format": FORMAT,
            "release": self.release, "version": self.version, "name": self.name, "pid": self.pid, "start": self.start,
        }  # fmt: skip


class LineFactory:
    """The two lines the writer's thread builds by itself, with the stamps of `identity`."""

    def __init__(self, identity: RunIdentity, clock: Clock) -> None:
        """Keep what the lines say; `clock` gives their stamps."""
        self._identity = identity
        self._lines = Lines(clock, boot=identity.boot, run=identity.run)

    def header(self, segment: int, oldest_needed: int, read_from: int) -> bytes:
        """Build the first line of a further segment: whose run it continues, and where the oldest open id stands.

        `read_from` is the segment from which on the next start has to read.
        """
        places = {"segment": segment, "oldest_needed": oldest_needed, "read_from": read_from}
        return self._lines.event(0, "segment", self._identity.fields() | places)

    def gap(self, lost: int) -> bytes:
        """Build the line that says that `lost` lines could not be written before it."""
        return self._lines.event(0, "gap", {"lost": lost})
