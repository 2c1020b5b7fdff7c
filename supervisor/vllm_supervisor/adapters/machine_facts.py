"""Facts of this machine for a pre-flight: limits, shared memory, memory, GPUs, clock. Reads only.

Sources: getrlimit(2), statvfs(3), adjtimex(2), proc(5) on meminfo, the NVIDIA driver's /proc/driver/nvidia.
"""

import ctypes
import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TIME_ERROR = 5
_TIMEX_BYTES = 512  # more than struct timex has anywhere


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes."""

    total: int
    available: int


def open_files() -> tuple[int, int]:
    """Return the soft and the hard limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = 1 << 30
    return (
        unlimited if soft == resource.RLIM_INFINITY else soft,
        unlimited if hard == resource.RLIM_INFINITY else hard,
    )


def shared_memory(mount: str = "/dev/shm") -> tuple[int, int] | None:  # noqa: S108 - the mount itself is meant
    """Return size and free bytes of /dev/shm, or None where there is none."""
    try:
        found = os.statvfs(mount)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def memory() -> Memory | None:
    """Return what /proc/meminfo says."""
    with suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return Memory(int(lines["MemTotal"].split()[0]) << 10, int(lines["MemAvailable"].split()[0]) << 10)
    return None


def gpus(root: Path = Path("/")) -> tuple[str, ...]:
    """Name the GPUs that a driver shows; AMD's are seen without a name."""
    names: list[str] = []
    for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        with suppress(OSError):
            lines = path.read_text("utf-8", "replace").splitlines()
            names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    if not names and (root / "dev/kfd").exists():
        names.append("an AMD GPU")
    if not names and list(root.glob("dev/nvidia[0-9]*")):
        names.append("an NVIDIA GPU")
    return tuple(names)


def driver(root: Path = Path("/")) -> str:
    """Return the version of NVIDIA's kernel driver, or ""."""
    with suppress(OSError):
        words = (root / "proc/driver/nvidia/version").read_text("utf-8", "replace").split()
        return next((word for word in words if word[:1].isdigit() and "." in word), "")
    return ""


def clock_synchronised() -> bool | None:
    """Say whether the kernel's clock is disciplined; None where it does not tell."""
    libc = ctypes.CDLL(None, use_errno=True)
    state = libc.adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return None if state < 0 else state != _TIME_ERROR
