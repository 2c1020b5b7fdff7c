"""Who is to be killed when there is no time to look: the engine's processes, each by a descriptor opened beforehand.

Rules:
* `fire` opens nothing, reads nothing and waits for nobody but a short `aim`: a signal through each pidfd, and the cgroup's
  own kill where there is one. Whoever was forked since the last look is found by the sweep that follows.
* What was killed still has to give its memory back, on its own share of the processor. The engine's session has less of
  that than others (adapters/child.py), so that on a busy machine its end took one to two seconds; once the signals are
  out it gets as much as we may give it. Measured with 1.8 GiB in small pages beside two busy loops on two cores: 1.3 s
  with that share, 0.5 s with everybody's, 0.15 s with the most.
* A pidfd is kept only if, after it was opened, the process still had the start time it was known by.
* `aim` and `clear` come from the event loop, `fire` from the guard's thread; the lock keeps a closed number from use.

Source of facts: pidfd_open(2), pidfd_send_signal(2), cgroup-v2 on cgroup.kill, sched(7) on autogroup.
"""

import os
import signal
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from vllm_supervisor.core.proc import ProcessId, parse_stat

_MORE = (b"-20", b"0")  # nice of the dying session: the first needs CAP_SYS_NICE or RLIMIT_NICE


class KillList:
    """The processes of one incarnation at a time."""

    def __init__(self) -> None:
        """Nobody is aimed at."""
        self.incarnation = 0  # 0: none
        self._lock = threading.Lock()
        self._fds: dict[ProcessId, int] = {}
        self._group = -1
        self._share = -1

    def begin(self, incarnation: int, main: ProcessId, group: Path | None) -> None:
        """Aim at a new engine; `group` is its cgroup, if it has one."""
        self.clear()
        with self._lock:
            self.incarnation = incarnation
            if group is not None:
                with suppress(OSError):  # before Linux 5.14
                    self._group = os.open(group / "cgroup.kill", os.O_WRONLY | os.O_CLOEXEC)
            with suppress(OSError):  # no such thing on this kernel, or it has ended
                if os.getsid(main.pid) == main.pid:  # a session of its own, not ours
                    self._share = os.open(f"/proc/{main.pid}/autogroup", os.O_WRONLY | os.O_CLOEXEC)
        self.aim([main])

    def aim(self, processes: Iterable[ProcessId]) -> None:
        """Aim at these and no others."""
        wanted = set(processes)
        with self._lock:
            for gone in self._fds.keys() - wanted:
                os.close(self._fds.pop(gone))
            for new in wanted - self._fds.keys():
                fd = _open(new)
                if fd is not None:
                    self._fds[new] = fd

    def clear(self) -> None:
        """Aim at nobody."""
        with self._lock:
            self.incarnation = 0
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()
            for fd in (self._group, self._share):
                if fd >= 0:
                    os.close(fd)
            self._group = self._share = -1

    def fire(self) -> int:
        """KILL; return how many processes were still there to take it."""
        hit = 0
        with self._lock:
            if self._group >= 0:
                with suppress(OSError):
                    os.write(self._group, b"1")
            for fd in self._fds.values():
                try:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                except OSError:  # it has ended
                    continue
                hit += 1
            if self._share >= 0:
                for nice in _MORE:
                    try:
                        os.write(self._share, nice)
                    except OSError:  # not allowed, or it is gone
                        continue
                    break
        return hit


def _open(process: ProcessId) -> int | None:
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return None
    with suppress(OSError, ValueError, IndexError):
        if parse_stat(Path(f"/proc/{process.pid}/stat").read_bytes()).id == process:
            return fd
    os.close(fd)
    return None
