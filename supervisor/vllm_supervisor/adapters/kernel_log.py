"""Follows the kernel log (/dev/kmsg, or a file that grows like it) for what the GPU driver and the OOM killer say.

Rules:
* It begins at the end: what was said before we looked, the boot's log above all, belongs to somebody else.
* Never waits, and reads a bounded number of records a look. Records lost because the kernel's ring ran over are skipped,
  as the kernel tells (EPIPE).
* Each line is stamped with the moment it was read: the kernel's own stamps are of a clock nobody else can read.
* Not readable (kernel.dmesg_restrict), not there, or something else in its place (a container's /dev/null or console) is
  a value: `problem`.

Source of facts: Documentation/ABI/testing/dev-kmsg: one record a read, EAGAIN at the end, EPIPE after an overrun.
"""

import errno
import os
import stat
from collections import deque
from pathlib import Path
from time import monotonic

from vllm_supervisor.core import kernel_lines
from vllm_supervisor.core.kernel_lines import KernelLine, Kind

_RECORD = 8192  # the longest record of /dev/kmsg
_MOST_READS = 2_000  # in one look: what is behind them is read by the next, and the guard's memory is not kept waiting
_KEPT = 100
_DEVICE = os.makedev(1, 11)  # Documentation/admin-guide/devices.txt
_FIRST_NAMESPACE = "pid:[4026531836]"  # include/uapi/linux/nsfs.h; its numbers are those the kernel prints


class KernelLog:
    """One reader with its own place in the log; `lines` are the newest of interest. One thread at a time."""

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        """Open it and go to its end."""
        self.lines: deque[KernelLine] = deque(maxlen=_KEPT)
        self.no_memory = 0  # records of NV_ERR_NO_MEMORY so far
        self.problem = ""
        self.our_pids = True  # whether a pid in it is what we call that process
        self._rest = b""
        self._fd = -1
        self._records = False
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
            found = os.fstat(self._fd)
            self._records = stat.S_ISCHR(found.st_mode) and found.st_rdev == _DEVICE
            if not self._records and not stat.S_ISREG(found.st_mode):
                self.problem = f"{path} is not the kernel's log here"
                self.close()
                return
            os.lseek(self._fd, 0, os.SEEK_END)
            self.our_pids = not self._records or os.readlink("/proc/self/ns/pid") == _FIRST_NAMESPACE  # noqa: PTH115
        except OSError as fault:
            self.problem = f"{path} cannot be read: {fault.strerror}"
            self.close()

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

    def take(self) -> list[KernelLine]:
        """Look, and return and forget the lines of interest; look in between, so that they get the right stamps."""
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
        line = kernel_lines.parse(record, monotonic())
        if line is not None:
            self.lines.append(line)
            self.no_memory += line.kind is Kind.NO_MEMORY

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
