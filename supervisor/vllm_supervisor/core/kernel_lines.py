"""Which lines of the kernel log are evidence about an engine: one table.

Rules:
* A line of the driver proves nothing by itself: real machines print NV_ERR_NO_MEMORY in every successful start and at
  rest, and a fault of one card says nothing about an engine on another. So each class needs a second witness (below).
* Only the kernel's own records count. Whoever may write to /dev/kmsg cannot forge them: the kernel gives such a record a
  facility, and its own have none. A line begins with what its writer is called, so a name inside it forges nothing.
* Lines carry the moment we read them, in our clock; the kernel's own stamps are of another clock and are not used.
* A record of /dev/kmsg is `priority,sequence,microseconds,flags;text`, its further lines begin with a space.

| class | is evidence about an end |
|---|---|
| no memory | while memory was low or about to be, within seconds of the end |
| card lost | of a card the engine uses, within seconds of the end |
| card fault | the same, and if it names a process: only one of the engine's |
| OOM kill | of one of the engine's processes, at any time of its life |

Sources: Documentation/ABI/testing/dev-kmsg, NVIDIA's Xid catalogue, vllm-project/vllm/issues/56824 (lines in healthy starts).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

NEAR = 10.0  # seconds before and after an end in which a line may belong to it


class Kind(StrEnum):
    """What a line says."""

    NO_MEMORY = "no_memory"
    CARD_LOST = "card_lost"
    CARD_FAULT = "card_fault"
    OOM_KILL = "oom_kill"


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One line of interest. `at`: when it was read (monotonic seconds); `card` a PCI address as `card_address` writes it."""

    text: str
    kind: Kind
    at: float = 0.0
    card: str | None = None
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class End:
    """What is known about an engine's end. Monotonic seconds.

    `began`: our first signal or its death, whichever came first; `over`: its death. `pids`: its processes by the
    kernel's numbers; empty where those are not ours (a container). `cards`: the cards it uses, None: not known.
    `tight_at`: when memory was last low or about to be, None: never, or nobody looked.
    """

    began: float
    over: float
    pids: frozenset[int] = frozenset()
    cards: frozenset[str] | None = None
    tight_at: float | None = None


_PCI = r"(?:PCI:)?(?P<card>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-9a-fA-F])?"
# The start of a record's text; in a log file behind its writer's stamp.
_START = r"(?:^|\bkernel: (?:\[[ \d.]+\] ?)?)"
_XID = re.compile(_START + r"NVRM: Xid \(" + _PCI + r"[^)]*\): (?P<xid>\d+)\b(?:, pid='?(?P<pid>\d+))?")
_LOST = re.compile(_START + r"NVRM: [^()]*?\bGPU (?:at )?" + _PCI + r"[\s\S]*?fallen off the bus")
_NO_MEMORY = re.compile(_START + r"NVRM: .*NV_ERR_NO_MEMORY")
_OOM = re.compile(
    _START
    + r"(?:oom-kill:.*,pid=(?P<pid>\d+),uid=\d+|(?:Memory cgroup out|Out) of memory:? Killed process (?P<victim>\d+)\b)"
)
_OFF_THE_BUS = 79
_CLEAN_UP = 45  # follows every KILL of a process that uses the card


def card_address(text: str) -> str:
    """Write a PCI address in one way: `00000000:01:00.0` and `0000:01:00` are `0000:01:00`. Raises ValueError."""
    domain, bus, device = text.split(":")
    return f"{int(domain, 16):04x}:{int(bus, 16):02x}:{int(device.partition('.')[0], 16):02x}"


def parse(record: bytes, at: float) -> KernelLine | None:
    """Read one record of /dev/kmsg, or a plain line of a log file; None: nothing about a GPU's driver or an OOM kill."""
    head, mark, rest = record.partition(b";")
    line = record
    if mark and head[:1].isdigit():
        priority = head.partition(b",")[0]
        if not priority.isdigit() or int(priority) >= 8:
            return None  # a program's own words
        line = rest
    text = line.split(b"\n", 1)[0].decode("utf-8", "replace").strip()
    if found := _OOM.search(text):
        return KernelLine(text, Kind.OOM_KILL, at, pid=int(found["pid"] or found["victim"]))
    if found := _XID.search(text):
        return _xid(text, at, card_address(found["card"]), int(found["xid"]), found["pid"])
    if found := _LOST.search(text):
        return KernelLine(text, Kind.CARD_LOST, at, card_address(found["card"]))
    return KernelLine(text, Kind.NO_MEMORY, at) if _NO_MEMORY.search(text) else None


def _xid(text: str, at: float, card: str, number: int, pid: str | None) -> KernelLine | None:
    if number == _CLEAN_UP:
        return None
    kind = Kind.CARD_LOST if number == _OFF_THE_BUS else Kind.CARD_FAULT
    return KernelLine(text, kind, at, card, None if pid is None else int(pid))


def counts(line: KernelLine, end: End) -> bool:
    """Say whether a line is evidence about an end."""
    if line.kind is Kind.OOM_KILL:
        return line.pid in end.pids
    if not end.began - NEAR <= line.at <= end.over + NEAR:
        return False
    if line.kind is Kind.NO_MEMORY:
        return end.tight_at is not None and end.began - NEAR <= end.tight_at <= end.over
    if line.kind is Kind.CARD_FAULT and line.pid is not None and end.pids:
        return line.pid in end.pids
    return end.cards is not None and line.card in end.cards


def evidence(lines: Iterable[KernelLine], end: End) -> str:
    """Return the lines that are evidence about an end, one a line."""
    return "\n".join(line.text for line in lines if counts(line, end))
