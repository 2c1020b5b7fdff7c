"""Is a run over, and are the processes of its engine proven gone? Asked of /proc, once, at a start.

Rules:
* Another boot proves everything gone. Within one boot a process is named by (pid, start time), never by its pid alone.
* The engine is proven gone only when no process that the ledger named lives, and no living process carries the run's
  mark in its environment. One whose environment we may not read is not the engine's: that runs as we do, and we gave
  it its environment.
"""

import os
from pathlib import Path

from vllm_supervisor.core.accounts import RunAccount
from vllm_supervisor.core.audit import Fate
from vllm_supervisor.core.custody import RUN
from vllm_supervisor.core.errors import SetupError
from vllm_supervisor.core.proc import ProcessId, Stat, has_variables, parse_stat

_PROC = Path("/proc")


def boot_id() -> str:
    """Read the kernel's id of this boot. Raises SetupError where /proc shows processes alone."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        raise SetupError(
            "/proc shows neither the boot nor the memory of this machine (mounted with subset=pid, or not at all); "
            "mount it whole, in a unit: ProcSubset=all"
        ) from None


def fate(run: RunAccount, boot: str) -> Fate:
    """Say what is known of `run` in the boot `boot`."""
    if run.boot != boot:
        return Fate.GONE
    if run.pid and run.pid != os.getpid() and _lives(ProcessId(run.pid, run.start)):
        return Fate.ALIVE
    if any(_lives(process) for process in run.engine_processes):
        return Fate.UNPROVEN
    return Fate.GONE if _nobody_carries(run.run) else Fate.UNPROVEN


def _stat(pid: int) -> Stat | None:
    try:
        return parse_stat((_PROC / str(pid) / "stat").read_bytes())
    except (OSError, ValueError, IndexError):
        return None


def _lives(process: ProcessId) -> bool:
    stat = _stat(process.pid)
    return stat is not None and not stat.dead and process.start_ticks in (0, stat.id.start_ticks)


def _nobody_carries(run: str) -> bool:
    for directory in _PROC.iterdir():
        if not directory.name.isdecimal() or int(directory.name) == os.getpid():
            continue
        try:
            environ = (directory / "environ").read_bytes()
        except OSError:
            continue  # it ended meanwhile, or is none of ours
        if has_variables(environ, [(RUN, run)]):
            return False
    return True
