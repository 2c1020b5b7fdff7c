"""Receive signals with their sender, from a descriptor instead of a handler.

Rules:
* The signals are blocked before any thread starts, so that every thread inherits the mask and none is interrupted.
* They stay blocked to the end of the process: no moment in which a late one has its default effect.
* The mask is set whole: what a strange parent had blocked besides is not. What it had ignored is read all the same, for
  the kernel keeps a blocked signal whatever its disposition.
* The two signals that the C library keeps for its threads (32, 33) end a process that never used them: they are ignored by
  the system call, since the library's functions refuse them. A mask would not do: a new thread has 32 open.
* Children start with an empty mask and default dispositions (adapters/child.py spawns them so).
* SIGCHLD must not be ignored (a parent may have left it so): the kernel would then reap our children unread.

Source of facts: signalfd(2), sigaction(2) on SIG_IGN and SIGCHLD, signal(7) on faults, nptl(7) on 32 and 33.
"""

import ctypes
import faulthandler
import os
import platform
import signal
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

import trio

from vllm_supervisor.core.proc import command_words

_INFO_BYTES = 128
_HEAD = struct.Struct("=IiiII")  # ssi_signo, ssi_errno, ssi_code, ssi_pid, ssi_uid
_SENT_BY_PROCESS = (0, -1, -6)  # SI_USER, SI_QUEUE, SI_TKILL: only then pid and uid name a sender
_SIGACTION = {"x86_64": 13, "aarch64": 134}  # the number of rt_sigaction(2)
_FAULTS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
_CHILD_CODES = range(1, 7)  # CLD_EXITED … CLD_CONTINUED: pid names the child


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """One signal. `pid` is None where the kernel names no sender (a terminal, another pid namespace); for SIGCHLD it is the child.

    `command` is the sender's program and first argument, "" if it has gone already.
    """

    signum: int
    pid: int | None
    uid: int | None
    command: str


def ignored(signum: int) -> bool:
    """Say whether our parent left this signal ignored (nohup does so with HUP); ask before `Signals` is opened."""
    return signal.getsignal(signum) == signal.SIG_IGN


class Signals:
    """The chosen signals, blocked and readable. Open it first thing in the main thread; it lives as long as the process."""

    def __init__(self, signums: Iterable[int], *, ignored: Iterable[int] = ()) -> None:
        """Block `signums`, and nothing else, in this thread and those it starts later; let the kernel drop `ignored`."""
        wanted = frozenset(signums)
        if faulthandler.is_enabled():  # a developer wants the tracebacks, and a blocked fault ends us without
            wanted -= _FAULTS
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        libc = ctypes.CDLL(None, use_errno=True)
        for signum in ignored:
            _ignore(libc, signum)
        signal.pthread_sigmask(signal.SIG_SETMASK, wanted)
        mask = sum(1 << (signum - 1) for signum in wanted).to_bytes(128, "little")
        self.fd: int = libc.signalfd(-1, ctypes.c_char_p(mask), os.O_CLOEXEC | os.O_NONBLOCK)
        if self.fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"signalfd: {os.strerror(code)}")

    async def receive(self) -> list[SignalReceived]:
        """Wait for signals and return those that came, in the kernel's order; equal pending ones are one."""
        await trio.lowlevel.wait_readable(self.fd)
        return self.pending()

    def pending(self) -> list[SignalReceived]:
        """Return what has come already, without waiting."""
        try:
            data = os.read(self.fd, _INFO_BYTES * 16)
        except BlockingIOError:
            return []
        return [_read(data[at : at + _HEAD.size]) for at in range(0, len(data), _INFO_BYTES)]

    def close(self) -> None:
        """Close the descriptor; the signals stay blocked."""
        os.close(self.fd)


def _ignore(libc: ctypes.CDLL, signum: int) -> None:
    """Ignore a signal; one of the library's own stays as it is on another processor than ours."""
    if signum in signal.valid_signals():
        signal.signal(signum, signal.SIG_IGN)
    elif platform.machine() in _SIGACTION:
        action = signal.SIG_IGN.value.to_bytes(8, "little") + bytes(24)  # and no flags, no mask
        libc.syscall(_SIGACTION[platform.machine()], signum, ctypes.c_char_p(action), None, 8)


def _read(head: bytes) -> SignalReceived:
    signum, _errno, code, pid, uid = _HEAD.unpack(head)
    if code in _SENT_BY_PROCESS and pid:
        return SignalReceived(signum, pid, uid, _command(pid))
    if signum == signal.SIGCHLD and code in _CHILD_CODES:
        return SignalReceived(signum, pid, uid, "")
    return SignalReceived(signum, None, None, "")


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:  # noqa: PTH123 - beside its twin below
            comm = file.read().decode("utf-8", "replace").strip()
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123 - 4 KiB of it are enough, whatever its length
            return command_words(comm, file.read(4096))
    except OSError:
        return ""


def die_by(signum: int) -> NoReturn:
    """End this process by the signal itself, as a shell expects of a program that stopped on Ctrl-C.

    As PID 1 the kernel ignores that; then the status is 128 + signum.
    """
    signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signum,))
    os.kill(os.getpid(), signum)
    os._exit(128 + signum)
