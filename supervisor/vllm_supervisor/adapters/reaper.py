"""Adopt the orphans of what we started, and reap those that ended.

Rules:
* Only by explicit pid and only what nobody owns: a status that someone waits for is never taken.
* Run after each SIGCHLD. Signals of one kind merge, so one run reaps all it finds, up to a bound.
* As PID 1 the kernel makes us the parent of every orphan without asking.

Source of facts: PR_SET_CHILD_SUBREAPER(2const), proc(5) on /proc/PID/task/TID/children.
"""

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_supervisor.core.proc import parse_stat

_PR_SET_CHILD_SUBREAPER = 36
_AT_ONCE = 1000  # reaped in one run; the rest waits for the next


@dataclass(frozen=True, slots=True)
class Reaped:
    """An orphan that ended: exit code, or negative signal number."""

    pid: int
    status: int


def become_subreaper() -> bool:
    """Let orphans of our descendants come to us; False where the kernel knows no subreapers."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


class Reaper:
    """Reaps children that nobody owns."""

    def __init__(self, owned: Callable[[], frozenset[int]]) -> None:
        """Ask `owned` for the pids whose status somebody waits for, at every run."""
        self._owned = owned

    def reap(self) -> list[Reaped]:
        """Reap every orphan that has ended, without waiting; at most a bounded number."""
        reaped: list[Reaped] = []
        # The kernel's list may skip a child while others end, so look until a look finds nothing to reap.
        while len(reaped) < _AT_ONCE:
            found = [ended for pid in _children() - self._owned() if (ended := _reap(pid))]
            if not found:
                break
            reaped += found
        return reaped


def _reap(pid: int) -> Reaped | None:
    with suppress(ChildProcessError):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return Reaped(pid, os.waitstatus_to_exitcode(status))
    return None


def _children() -> set[int]:
    """Return the pids whose parent we are, zombies included."""
    if not Path("/proc/thread-self/children").exists():  # a kernel built without the list
        return _children_by_parent()
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found.update(map(int, task.joinpath("children").read_bytes().split()))
    return found


def _children_by_parent() -> set[int]:
    """Find children where the kernel was built without the list."""
    us = os.getpid()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                stat = parse_stat(entry.joinpath("stat").read_bytes())
                if stat.ppid == us:
                    found.add(stat.id.pid)
    return found
