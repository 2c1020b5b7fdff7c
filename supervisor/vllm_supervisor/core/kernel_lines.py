"""Which lines of the kernel log tell something of an engine or its GPU.

Rules:
* Only what the GPU driver says (NVRM, Xid) and what the OOM killer did is kept; everything else in that log is others'.
* An OOM kill is ours only if the pid it names is one of the engine's.
* A record of /dev/kmsg is `priority,sequence,microseconds,flags;text`, its further lines begin with a space.
Source of facts: Documentation/ABI/testing/dev-kmsg.
"""

import re
from collections.abc import Collection, Iterable

NO_MEMORY = "NV_ERR_NO_MEMORY"

_DRIVER = re.compile(r"\bNVRM\b|\bXid\b")
_OOM = re.compile(r"oom-kill:.*?\bpid=(\d+)|Killed process (\d+)")


def text(record: bytes) -> str:
    """Return the text of one record of /dev/kmsg, or of a plain line."""
    head, mark, rest = record.partition(b";")
    line = rest if mark and head[:1].isdigit() else record
    return line.split(b"\n", 1)[0].decode("utf-8", "replace").strip()


def of_interest(line: str) -> bool:
    """Say whether a line may tell something of an engine."""
    return _DRIVER.search(line) is not None or _OOM.search(line) is not None


def about(lines: Iterable[str], pids: Collection[int]) -> str:
    """Return the lines about the GPU driver and about processes `pids`, one a line."""
    return "\n".join(line for line in lines if _DRIVER.search(line) or _killed(line) in pids)


def _killed(line: str) -> int | None:
    found = _OOM.search(line)
    return int(found[1] or found[2]) if found else None
