"""Follows the kernel log (/dev/kmsg, or a file that grows like it) for what the GPU driver and the OOM killer say.

Rules:
* It begins at the end: what was said before we looked belongs to somebody else.
* Never waits. Records lost because the kernel's ring ran over are skipped, as the kernel tells (EPIPE).
* Not readable (kernel.dmesg_restrict, a container) is a value: `problem`.

Source of facts: Documentation/ABI/testing/dev-kmsg: one record a read, EAGAIN at the end, EPIPE after an overrun.
"""

import errno
import os
import stat
from collections import deque
from pathlib import Path

from vllm_supervisor.core import kernel_lines

_RECORD = 8192  # the longest record of /dev/kmsg
_MOST_READS = 10_000  # in one look: more than a ring holds
_KEPT = 100


class KernelLog:
    """One reader with its own place in the log; `lines` are the newest of interest. One thread at a time."""

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        """Open it and go to its end."""
        self.lines: deque[str] = deque(maxlen=_KEPT)
        self.no_memory = 0  # records of NV_ERR_NO_MEMORY so far
        self.problem = ""
        self._rest = b""
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._records = stat.S_ISCHR(os.fstat(self._fd).st_mode)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError as fault:
            self.problem = f"{path} cannot be read: {fault.strerror}"

    def look(self) -> int:
        """Take what is new; return how often the GPU driver has said NV_ERR_NO_MEMORY so far."""
        if self._fd >= 0:
            for _ in range(_MOST_READS):
                try:
                    data = os.read(self._fd, _RECORD)
                except BlockingIOError:
                    break
                except OSError as fault:
                    if fault.errno == errno.EPIPE:
                        continue
                    self.problem = f"the kernel log cannot be read any more: {fault.strerror}"
                    self.close()
                    break
                if not data:
                    break
                self._take(data)
        return self.no_memory

    def take(self) -> list[str]:
        """Look, and return and forget the lines of interest."""
        self.look()
        lines = list(self.lines)
        self.lines.clear()
        return lines

    def _take(self, data: bytes) -> None:
        if self._records:
            self._add(data)
            return
        *whole, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-_RECORD:]
        for line in whole:
            self._add(line)

    def _add(self, record: bytes) -> None:
        line = kernel_lines.text(record)
        if kernel_lines.of_interest(line):
            self.lines.append(line)
            if kernel_lines.NO_MEMORY in line:
                self.no_memory += 1

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
