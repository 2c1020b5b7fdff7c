"""Stop one thread of a process from outside, as a deadlock would: the others go on, and no hook in the product is needed.

Source of facts: ptrace(2), PTRACE_SEIZE and PTRACE_INTERRUPT. The thread stays stopped while this process traces it.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_WALL = 0x40000000


def _ptrace(request: int, pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(request, pid, None, None) == -1:
        raise OSError(ctypes.get_errno(), f"ptrace: {os.strerror(ctypes.get_errno())}")


class Frozen:
    """A process whose main thread stands still."""

    def __init__(self, pid: int) -> None:
        """Stop it."""
        self._pid = pid
        self._gone = False
        _ptrace(_SEIZE, pid)
        _ptrace(_INTERRUPT, pid)
        os.waitpid(pid, _WALL)

    def gone(self) -> bool:
        """Say whether it has been killed. Until we have asked, its parent does not hear of its end."""
        if not self._gone:
            pid, status = os.waitpid(self._pid, os.WNOHANG | _WALL)
            self._gone = pid != 0 and os.WIFSIGNALED(status)
        return self._gone


@contextlib.contextmanager
def main_thread_stopped(pid: int) -> Iterator[Frozen]:
    """Keep the main thread of `pid` stopped."""
    frozen = Frozen(pid)
    try:
        yield frozen
    finally:
        if not frozen.gone():
            _ptrace(_DETACH, pid)
