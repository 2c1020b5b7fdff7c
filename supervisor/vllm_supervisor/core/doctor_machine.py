"""What of this machine an engine or the supervisor would stumble over: directories, limits, memory, GPU, clock, cgroups.

Sizes in bytes, times in seconds.
"""

import shlex
from dataclasses import dataclass

from vllm_supervisor.core.doctor import Finding, Level, ok

GIB = 1 << 30
SHM = "/dev/shm"  # noqa: S108 - it is only named
SHM_WANTED = GIB  # worker messages and NCCL; Docker's own default is 64 MiB
SEGMENTS_NAMED = 8
FILES_PER_CONNECTION = 2  # one to the client, one to the engine
FILES_BESIDES = 256
OLDEST_YEAR = 2025  # a clock before it was never set


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts; None or empty where this machine does not tell.

    `problems` are sentences of what cannot work: the port, the run and the state directory.
    """

    shm_total: int | None
    shm_free: int | None
    shm_unused: tuple[str, ...]  # files in it, called as engines' are, that nobody has open or maps
    shm_untold: int  # such files of which we may not know whether they are in use
    files_soft: int
    files_hard: int
    memory_total: int | None
    memory_available: int | None
    gpus: tuple[str, ...]
    driver: str
    year: int
    clock_synchronised: bool | None
    cgroup_version: int
    delegated: str  # "" if a control group is ours, else why not
    max_connections: int
    problems: tuple[tuple[str, str], ...]  # (check, sentence)
    served: tuple[str, ...] = ()  # sentences about addresses that the instance itself holds
    units: bool = False  # a unit of ours is installed: its limits count, not this shell's


def machine(facts: Machine) -> list[Finding]:
    """Judge everything."""
    return [
        *_problems(facts),
        *_shared_memory(facts),
        _files(facts),
        _clock(facts),
        _cgroup(facts),
        _gpu(facts),
        _memory(facts),
    ]


def _problems(facts: Machine) -> list[Finding]:
    found = [ok("port", sentence) for sentence in facts.served]
    for check, sentence in facts.problems:
        what, _, mend = sentence.rpartition("; ")
        if "vllm-supervisor" in what and " in use " in what:
            found.append(Finding(Level.NOTE, check, what, "it may be the instance you mean", "vllm-supervisor status"))
        else:
            found.append(Finding(Level.ERROR, check, what or sentence, "the supervisor would not start", mend))
    return found or [ok("places", "the address and both directories can be used")]


def _shared_memory(facts: Machine) -> list[Finding]:
    if facts.shm_total is None:
        why = "vLLM's processes speak through shared memory"
        return [Finding(Level.ERROR, "shm", "there is no /dev/shm", why, "mount a tmpfs on /dev/shm")]
    found = []
    if facts.shm_total < SHM_WANTED:
        found.append(
            Finding(
                Level.WARNING,
                "shm",
                f"{SHM} has {facts.shm_total / GIB:.2f} GiB",
                "several workers and NCCL need more; a start then fails with ENOSPC or a bus error",
                "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir of medium Memory on /dev/shm",
            )
        )
    elif facts.shm_free is not None and facts.shm_free < facts.shm_total // 10:
        found.append(
            Finding(
                Level.WARNING,
                "shm",
                f"{SHM} is nearly full: {facts.shm_free / GIB:.2f} of {facts.shm_total / GIB:.2f} GiB are free",
                "the next start may fail with ENOSPC",
                "see what lies there (ls -l /dev/shm); dead engines leave psm_* and vllm_offload_*, but psm_* is every "
                "Python program's shared memory: remove what nobody uses (fuser -v FILE)",
            )
        )
    if facts.shm_unused or facts.shm_untold:
        found.append(_segments(facts.shm_unused, facts.shm_untold))
    return found or [ok("shm", f"{SHM} has {facts.shm_total / GIB:.1f} GiB")]


def _segments(unused: tuple[str, ...], untold: int) -> Finding:
    """Name what may be removed one by one: a pattern would hit other programs' memory as well."""
    parts = [
        f"{len(unused)} in {SHM} that nobody uses" if unused else "",
        f"{untold} of which this user may not know whether they are in use" if untold else "",
    ]
    more = f" (and {len(unused) - SEGMENTS_NAMED} more)" if len(unused) > SEGMENTS_NAMED else ""
    remove = " ".join(shlex.quote(path) for path in unused[:SEGMENTS_NAMED])
    return Finding(
        Level.NOTE,
        "shm",
        f"shared memory called as an engine's is: {', '.join(part for part in parts if part)}",
        "a dead engine's stays until somebody removes it (ours we remove); but every Python program's is called psm_… too, "
        "and one that is not in use now may be wanted later",
        f"if it was an engine's (ls -l tells owner and time): rm {remove}{more}" if unused else "run this as root",
    )


def _files(facts: Machine) -> Finding:
    """Judge the hard limit, up to which a start raises its own; each unit has one, which is judged with it."""
    wanted = files_wanted(facts.max_connections)
    if facts.files_hard >= wanted or facts.units:
        return ok("files", f"{max(facts.files_soft, facts.files_hard)} open files are allowed")
    return Finding(
        Level.WARNING,
        "files",
        f"{facts.files_hard} open files are allowed, {wanted} may be wanted (front_door.max_connections)",
        "at the limit new connections wait until old ones end",
        f"LimitNOFILE={max(wanted, 65536)} in a unit; for a shell root has to: /etc/security/limits.conf",
    )


def files_wanted(max_connections: int) -> int:
    """Return how many files may be open at once."""
    return max_connections * FILES_PER_CONNECTION + FILES_BESIDES


def _clock(facts: Machine) -> Finding:
    if facts.year < OLDEST_YEAR:
        why = "certificates and model hubs refuse it, and the ledgers' stamps mislead"
        return Finding(
            Level.ERROR, "clock", f"the clock says it is {facts.year}", why, "set it: timedatectl set-ntp true"
        )
    if facts.clock_synchronised is False:
        return Finding(
            Level.NOTE,
            "clock",
            "the clock is not synchronised",
            "deadlines do not care (they are monotonic); the stamps in ledgers and logs may be off",
            "timedatectl set-ntp true",
        )
    return ok("clock", "the clock is plausible")


def _cgroup(facts: Machine) -> Finding:
    if facts.cgroup_version != 2:
        return Finding(
            Level.NOTE,
            "cgroup",
            "no cgroup v2 alone on this machine",
            "the engine's processes are found by other marks, without memory figures and OOM counts",
            "boot with systemd.unified_cgroup_hierarchy=1, if you want them",
        )
    if facts.delegated:
        why = "the same; from a shell this is as it should be, in a unit Delegate=yes is missing"
        return Finding(
            Level.NOTE, "cgroup", f"no control group is ours: {facts.delegated}", why, "Delegate=yes in the unit"
        )
    return ok("cgroup", "cgroup v2, delegated to us")


def _gpu(facts: Machine) -> Finding:
    if not facts.gpus:
        why = "fine for a CPU build of vLLM and for the stand-in"
        return Finding(Level.NOTE, "gpu", "no GPU is seen", why, "in a container: --gpus all; else see the driver")
    names = ", ".join(facts.gpus)
    if any("GB10" in name for name in facts.gpus):
        return Finding(
            Level.NOTE,
            "gpu",
            f"{names}: GPU and CPU share one memory",
            "too much of it wedges the whole machine, and MemoryMax= does not count what CUDA takes",
            "keep --gpu-memory-utilization at 0.8 or less",
        )
    return ok("gpu", f"{names}, driver {facts.driver or 'unknown'}")


def _memory(facts: Machine) -> Finding:
    if facts.memory_total is None or facts.memory_available is None:
        return Finding(
            Level.NOTE, "memory", "this machine does not tell its memory", "no floor can be kept", "mount /proc"
        )
    share = facts.memory_available / facts.memory_total
    sentence = f"{facts.memory_available / GIB:.1f} of {facts.memory_total / GIB:.1f} GiB are available"
    if share < 0.1:
        why = "a start may be killed for memory, or wedge a machine whose GPU shares it"
        return Finding(Level.WARNING, "memory", sentence, why, "see what holds it: ps aux --sort=-rss | head")
    return ok("memory", sentence)
