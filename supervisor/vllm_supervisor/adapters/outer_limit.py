"""The time limit somebody else has put on our stop: systemd's `TimeoutStopSec` of the unit we are the service of.

Rules:
* The unit is the innermost service in /proc/self/cgroup; below `user@UID.service` it is a unit of the user's manager.
* It is ours only if its main process is us or an ancestor of ours: a shell in some service is not that service.
* Asked of `systemctl show`, without a shell, with a clean environment and a short limit of its own.
* A user that systemd has made for the unit (DynamicUser) gets no answer: dbus-daemon does not know it
  (systemd/systemd/issues/22737). There, and without D-Bus, the unit's files are read; that we are its main process is
  then known from SYSTEMD_EXEC_PID.
* Nothing found means that no limit is known, never that there is none to worry about: the caller says which it was.

Sources: systemd.service(5), systemctl(1), cgroups(7), systemd.exec(5) on SYSTEMD_EXEC_PID.
"""

import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_supervisor.core import unit_files
from vllm_supervisor.core.proc import parse_stat
from vllm_supervisor.core.systemd_words import span

_ASK_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Unit:
    """A service unit and whose manager runs it."""

    name: str
    user: bool


@dataclass(frozen=True, slots=True)
class OuterLimit:
    """What was found: `seconds` None for "infinity"; `unit` and the owner's name for people."""

    seconds: float | None
    owner: str


def unit_of(cgroup: str) -> Unit | None:
    """Read the innermost service from the text of /proc/PID/cgroup, or None outside any service.

    Both of systemd's hierarchies may be there, one of them unused and empty: whichever names a service counts.
    """
    for line in cgroup.splitlines():
        hierarchy, _, path = line.partition("::")
        if hierarchy != "0" and ":name=systemd:" not in line:
            continue
        parts = (path or line.rpartition(":")[2]).split("/")
        services = [part for part in parts if part.endswith(".service")]
        below = [part for part in services if not part.startswith("user@")]
        if below:
            return Unit(below[-1], user=len(below) < len(services))
    return None


def ask(arguments: Sequence[str]) -> str:
    """Run `systemctl` and return what it printed. Raises OSError or subprocess.SubprocessError."""
    environ = {
        name: os.environ[name] for name in ("PATH", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS") if name in os.environ
    }
    done = subprocess.run(
        ["systemctl", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environ | {"LC_ALL": "C"},
        timeout=_ASK_LIMIT_S,
        check=True,
    )
    return done.stdout.decode("utf-8", "replace")


def _ancestry(pid: int) -> set[int]:
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            pid = parse_stat(Path(f"/proc/{pid}/stat").read_bytes()).ppid
        except (OSError, ValueError, IndexError):
            break
    return found


def from_files(unit: str, root: Path = Path("/")) -> float | None:
    """Return what the unit's files say in seconds, None for "infinity"; `root` is where their paths begin.

    Raises FileNotFoundError if the unit has no file, ValueError for a value that is no time.
    """
    directories = [root / directory.lstrip("/") for directory in unit_files.DIRECTORIES]
    main = _first(directory / name for name in unit_files.file_names(unit) for directory in directories)
    if main is None:
        raise FileNotFoundError(unit)
    more = [directory / name for name in unit_files.drop_in_names(unit) for directory in directories]
    manager = _first(root / path.lstrip("/") for path in unit_files.MANAGER) or ""
    manager_more = [root / path.lstrip("/") for path in unit_files.MANAGER_DROP_INS]
    return unit_files.stop_limit(
        [main, *unit_files.drop_ins(map(_texts, more))], [manager, *unit_files.drop_ins(map(_texts, manager_more))]
    )


def _first(paths: Iterable[Path]) -> str | None:
    for path in paths:
        with suppress(OSError):
            return path.read_text(encoding="utf-8", errors="replace")
    return None


def _texts(directory: Path) -> dict[str, str]:
    found = {}
    with suppress(OSError):
        for path in directory.iterdir():
            with suppress(OSError):
                found[path.name] = path.read_text(encoding="utf-8", errors="replace")
    return found


def read(
    cgroup: str | None = None,
    run: Callable[[Sequence[str]], str] = ask,
    ancestry: Callable[[int], set[int]] = _ancestry,
    *,
    exec_pid: str | None = None,
    root: Path = Path("/"),
) -> OuterLimit | None:
    """Return the limit systemd has for us, or None if we are no service or it cannot be found. Blocks up to 2 s.

    `exec_pid` is SYSTEMD_EXEC_PID, by default that of our environment.
    """
    if cgroup is None:
        try:
            cgroup = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
    unit = unit_of(cgroup)
    if unit is None:
        return None
    scope = ["--user"] if unit.user else []
    try:
        printed = run([*scope, "show", "--property=TimeoutStopUSec,MainPID", "--", unit.name])
    except (OSError, subprocess.SubprocessError):
        started = os.environ.get("SYSTEMD_EXEC_PID", "") if exec_pid is None else exec_pid
        if unit.user or not started.isdecimal() or int(started) not in ancestry(os.getpid()):
            return None
        with suppress(OSError, ValueError):
            return OuterLimit(from_files(unit.name, root), f"TimeoutStopSec in the files of {unit.name}")
        return None
    try:
        properties = dict(line.split("=", 1) for line in printed.splitlines() if "=" in line)
        if int(properties.get("MainPID", "0")) not in ancestry(os.getpid()):
            return None
        return OuterLimit(span(properties["TimeoutStopUSec"]), f"TimeoutStopSec of {unit.name}")
    except (ValueError, KeyError):
        return None
