"""The engine's main process: started here, waited for here, and by nobody else.

Rules:
* Called from the main thread, so that nothing about the child hangs on a thread's life.
* posix_spawn rather than subprocess: our threads block the signals we read from a descriptor, and only posix_spawn gives
  the child an empty mask and default dispositions without running Python between fork and exec.
* The child gets a session of its own, stdin from null, a pipe each for stdout and stderr, and no other descriptor of ours.
* It must not starve us. Where the kernel shares the processor between sessions (autogroup), an engine whose processes spin
  with sched_yield, as vLLM's do, kept us waiting for it for up to 9 s (Linux 6.18, 2 cores, vLLM 0.32 on the CPU). With
  its session at nice 5 that is gone, at nice 1 and 2 it was not; the engine's own speed stayed the same.
* Signals go through the pidfd, so they can never reach a process that got the pid later.
* `wait` is the only reaper of this pid. Whoever reaps others asks `owned` first.

Source of facts: posix_spawn(3), pidfd_open(2), waitid(2), sched(7) (autogroup).
"""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fcntl import F_SETPIPE_SZ, fcntl
from pathlib import Path

import trio

from vllm_supervisor.core.proc import ProcessId, parse_stat

_SESSION_NICE = "5"
_PIPE_BYTES = 1 << 20  # the engine can write this much before it depends on us reading

_owned: set[int] = set()


class SpawnError(Exception):
    """The program could not be started. `errno` and `path` as the kernel gave them, `sentence` for a person."""

    def __init__(self, errno: int, path: str) -> None:
        """Keep the facts; the sentence is made of them."""
        self.errno = errno
        self.path = path
        self.sentence = f"cannot start {path}: {os.strerror(errno)}"
        super().__init__(self.sentence)


class StatusLostError(RuntimeError):
    """Somebody else reaped our child, so how it ended is unknown: a fault of ours, never an exit status."""


def owned() -> frozenset[int]:
    """Return the pids whose status a `Child` waits for; nobody else may reap them."""
    return frozenset(_owned)


class Child:
    """One spawned process. `stdout` and `stderr` are non-blocking read ends whose owner is the caller."""

    def __init__(self, pid: int, stdout: int, stderr: int) -> None:
        """Take charge of a process that is our child and not yet reaped."""
        _owned.add(pid)
        self.pid = pid
        self.stdout = stdout
        self.stderr = stderr
        self.pidfd = os.pidfd_open(pid)
        # Not reaped before `wait`, so its /proc entry is there even if it ended already.
        self.start_ticks = parse_stat(Path(f"/proc/{pid}/stat").read_bytes()).id.start_ticks
        self._status: int | None = None
        self._terminated = False

    @property
    def id(self) -> ProcessId:
        """The process for ever: pid and start time."""
        return ProcessId(self.pid, self.start_ticks)

    @property
    def status(self) -> int | None:
        """Exit code, negative signal number, or None while `wait` has not returned."""
        return self._status

    async def wait(self) -> int:
        """Wait for the end and reap; return the exit code (0..255) or the negative signal number.

        Several tasks may wait. Raises StatusLostError if the status was taken by somebody else.
        """
        if self._status is None:
            mine = os.dup(self.pidfd)  # trio allows one waiter a descriptor
            try:
                await trio.lowlevel.wait_readable(mine)
            finally:
                os.close(mine)
        return self._reap()

    def _reap(self) -> int:
        if self._status is None:
            try:
                ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
            except ChildProcessError:
                ended = None
            finally:
                _owned.discard(self.pid)
                os.close(self.pidfd)
                self.pidfd = -1
            if ended is None:
                raise StatusLostError(f"the exit status of process {self.pid} was taken by somebody else")
            self._status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return self._status

    def terminate(self) -> bool:
        """Send TERM to this process, once in its life; False says that nothing was sent (asked before, or gone)."""
        if self._terminated:
            return False
        self._terminated = True
        return self.send(signal.SIGTERM)

    def kill(self) -> bool:
        """Send KILL to this process alone; False if it is gone."""
        return self.send(signal.SIGKILL)

    def send(self, signum: int) -> bool:
        """Send a signal to this process; False if it is gone, or is another user's now (sudo, a set-user-ID program)."""
        if self.pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self.pidfd, signum)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def spawn(argv: Sequence[str], env: Mapping[str, str]) -> Child:
    """Start `argv` (its first word is a path; PATH is not searched) with exactly `env`.

    Raises SpawnError when the kernel refuses, with what it said.
    """
    pipes: list[int] = []
    try:
        for _ in range(2):
            pipes += os.pipe2(os.O_CLOEXEC)
        out, out_child, err, err_child = pipes
        for fd in (out, err):
            os.set_blocking(fd, False)
            with suppress(OSError):  # beyond the user's pipe budget: the default 64 KiB will do
                fcntl(fd, F_SETPIPE_SZ, _PIPE_BYTES)
        pid = os.posix_spawn(
            argv[0],
            list(argv),
            env,
            file_actions=[
                # Inheritable descriptors (systemd's sockets, a shell's) go first: they may sit where ours come to lie.
                *((os.POSIX_SPAWN_CLOSE, fd) for fd in _inheritable()),
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, out_child, 1),
                (os.POSIX_SPAWN_DUP2, err_child, 2),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}),
        )
    except OSError as error:
        for fd in pipes:
            os.close(fd)
        raise SpawnError(error.errno or 0, argv[0]) from error
    os.close(out_child)
    os.close(err_child)
    with suppress(OSError):  # no such thing on this kernel, or a rate limit: then without
        Path(f"/proc/{pid}/autogroup").write_text(_SESSION_NICE, encoding="ascii")
    try:
        return Child(pid, out, err)
    except OSError as error:  # no descriptor left to hold it by
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        _owned.discard(pid)
        os.close(out)
        os.close(err)
        raise SpawnError(error.errno or 0, argv[0]) from error


def _inheritable() -> list[int]:
    """Return the descriptors above stderr that an exec would leave open."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
        with suppress(OSError):  # the listing's own descriptor is closed by now
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
    return found
