"""What lets us act when the machine has nothing left: our own pages locked, and the kernel told whom to take first.

Rules:
* All of it is best effort: what is not allowed is a sentence, and everything else goes on.
* Pages are locked as they are touched (MCL_ONFAULT), so that locking does not make us larger. What comes later is locked
  only where no limit can turn that into a failed allocation: an unlimited RLIMIT_MEMLOCK, or CAP_IPC_LOCK.

Sources: mlockall(2), proc_pid_oom_score_adj(5), capabilities(7).
"""

import ctypes
import os
import resource
from contextlib import suppress
from pathlib import Path

_CURRENT, _FUTURE, _ONFAULT = 1, 2, 4
_CAP_IPC_LOCK = 14
ENGINE_SCORE = 800  # it dies before sshd; a driver's memory counts for nobody, so its own size does not do that
OUR_SCORE = -500


def lock_memory() -> str:
    """Lock our pages; return "" or why that is not allowed."""
    unlimited = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY or _has_ipc_lock()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(_CURRENT | _ONFAULT | (_FUTURE if unlimited else 0)) == 0:
        return ""
    return f"our memory cannot be locked ({os.strerror(ctypes.get_errno())}); a unit needs LimitMEMLOCK=infinity"


def _has_ipc_lock() -> bool:
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def prefer_engine(pid: int) -> str:
    """Have the OOM killer take this process, and what it forks, before others; return "" or why not."""
    return _score(str(pid), ENGINE_SCORE)


def spare_us() -> str:
    """Have the OOM killer take others before us; return "" or why that is not allowed."""
    with suppress(OSError, ValueError):
        if int(Path("/proc/self/oom_score_adj").read_text(encoding="ascii")) <= OUR_SCORE:
            return ""  # a unit's OOMScoreAdjust has done it
    return _score("self", OUR_SCORE)


def _score(pid: str, score: int) -> str:
    try:
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(score), encoding="ascii")
    except OSError as fault:
        whose = "our" if pid == "self" else "the engine's"
        return f"{whose} oom_score_adj cannot be set to {score} ({fault.strerror})"
    return ""
