"""What the kernel, or a filter in front of it, must give a supervisor: said in one line before anything is started.

Sources: systemd.exec(5) on RestrictAddressFamilies= and SystemCallFilter=, seccomp(2), pidfd_open(2), clone(2).
"""

import os
import resource
import socket
import threading
from pathlib import Path

from vllm_supervisor.core.errors import SetupError, is_thread_limit


def check() -> None:
    """Raise SetupError for the first thing that is refused: Unix sockets, pidfds, threads."""
    try:
        for one in socket.socketpair():
            one.close()
    except OSError as fault:
        raise SetupError(
            f"Unix sockets are refused here ({fault.strerror}), and everything inside speaks through them; "
            "allow AF_UNIX: RestrictAddressFamilies= in a unit, the seccomp profile of a container"
        ) from None
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as fault:
        raise SetupError(
            f"pidfd_open(2) is refused here ({fault.strerror}), without which no process is surely the engine's; "
            "allow it: SystemCallFilter= in a unit, the seccomp profile of a container (Linux 5.3 and newer have it)"
        ) from None
    try:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
    except RuntimeError as fault:
        if not is_thread_limit(fault):
            raise
        raise SetupError(no_threads()) from None


def no_threads() -> str:
    """Say which limits are at their end, with their numbers, and what raises them."""
    user = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limits = [] if user == resource.RLIM_INFINITY else [f"RLIMIT_NPROC={user} of this user"]
    for line in _lines("/proc/self/cgroup"):
        if line.startswith("0::"):
            most = "".join(_lines(f"/sys/fs/cgroup{line[3:]}/pids.max"))
            limits += [f"pids.max={most} of this control group"] if most.isdecimal() else []
    return (
        f"no more threads can be started: {' or '.join(limits) or 'a limit of processes'} is reached; "
        "raise TasksMax= in a unit, --pids-limit of a container, or ulimit -u"
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
