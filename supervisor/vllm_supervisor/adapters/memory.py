"""Reads the machine's memory: /proc/meminfo, /proc/pressure/memory, /proc/vmstat.

Rules:
* Made for a loop that must work when nothing else does: descriptors are opened and buffers made once, a look allocates
  only the few numbers it returns.
* Files outside the kernel's proc (a test's, a recorded machine's) are opened anew each time, since they may be replaced.
* What cannot be read is None; a look without MemTotal or MemAvailable is no look.

Source of facts: proc_meminfo(5), Documentation/accounting/psi.rst, proc_vmstat(5).
"""

import os
from contextlib import suppress
from pathlib import Path
from time import monotonic

from vllm_supervisor.core.memory import Reading

_KIB = 1024
OOM_DAEMONS = ("earlyoom", "systemd-oomd", "nohang")
_ROOM = 16 * 1024  # vmstat has the most: about 5 KiB on Linux 6


class _File:
    """One file that is read again and again from its start."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._buffer = bytearray(_ROOM)
        self._into = (self._buffer,)
        self._fd = -1
        with suppress(OSError):
            if path.stat().st_dev == os.stat("/proc/self").st_dev:  # noqa: PTH116 - the kernel's own, for ever
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> bytearray | None:
        """Fill the buffer and return it, with a zero byte behind what was read; None if it cannot be read."""
        fd = self._fd
        try:
            if fd < 0:
                fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = os.preadv(fd, self._into, 0)
            finally:
                if fd != self._fd:
                    os.close(fd)
        except OSError:
            return None
        self._buffer[min(size, _ROOM - 1)] = 0
        return self._buffer

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _number(buffer: bytearray, name: bytes) -> int | None:
    """Return the whole number behind `name`, or None."""
    end = buffer.find(0)
    at = buffer.find(name, 0, end)
    if at < 0:
        return None
    at += len(name)
    with suppress(ValueError, IndexError):
        stop = buffer.find(b"\n", at, end)
        return int(bytes(buffer[at : stop if stop >= 0 else end]).split()[0])
    return None


class MemoryReader:
    """Looks at one machine; `proc` is where its /proc is. One thread at a time."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        """Open what is there."""
        self._meminfo = _File(proc / "meminfo")
        self._pressure = _File(proc / "pressure/memory")
        self._vmstat = _File(proc / "vmstat")
        self._stalled: float | None = None
        self._oom_kills: int | None = None

    def read(self, *, driver_out: int = 0, all_of_it: bool = True) -> Reading | None:
        """Look; None if meminfo cannot be read. Without `all_of_it` the pressure and the OOM count are the last known."""
        buffer = self._meminfo.read()
        if buffer is None:
            return None
        total, available = _number(buffer, b"MemTotal:"), _number(buffer, b"MemAvailable:")
        if not total or available is None:
            return None
        names = (b"MemFree:", b"\nCached:", b"SwapFree:", b"SwapTotal:")
        free, cached, swap, swap_total = (_number(buffer, name) or 0 for name in names)
        if all_of_it:
            self._stalled, self._oom_kills = self._read_stalled(), self._read_oom_kills()
        return Reading(
            at=monotonic(),
            total=total * _KIB,
            available=available * _KIB,
            free=free * _KIB,
            cached=cached * _KIB,
            swap_free=swap * _KIB,
            swap_total=swap_total * _KIB,
            stalled=self._stalled,
            oom_kills=self._oom_kills,
            driver_out=driver_out,
        )

    def _read_stalled(self) -> float | None:
        buffer = self._pressure.read()
        if buffer is None:
            return None
        end = buffer.find(0)
        line = buffer.find(b"full avg10=", 0, end)
        if line < 0:
            return None
        with suppress(ValueError):
            return float(bytes(buffer[line + 11 : buffer.find(b" ", line + 11, end)]))
        return None

    def _read_oom_kills(self) -> int | None:
        buffer = self._vmstat.read()
        return None if buffer is None else _number(buffer, b"\noom_kill ")

    def close(self) -> None:
        """Close the descriptors."""
        for file in (self._meminfo, self._pressure, self._vmstat):
            file.close()


def oom_daemons(proc: Path = Path("/proc")) -> tuple[str, ...]:
    """Name the programs that run here and kill for memory, besides the kernel."""
    found = set()
    for path in proc.glob("[0-9]*/comm"):
        with suppress(OSError):
            found.add(path.read_text(encoding="utf-8", errors="replace").strip())
    return tuple(name for name in OOM_DAEMONS if name in found)
