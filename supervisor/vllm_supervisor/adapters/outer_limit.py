"""The time limit somebody else has put on our stop: systemd's `TimeoutStopSec` of the unit we are the service of.

Rules:
* The unit is the innermost service in /proc/self/cgroup; below `user@UID.service` it is a unit of the user's manager.
* It is ours only if its main process is us or an ancestor of ours: a shell in some service is not that service.
* Asked of `systemctl show`, without a shell, with a clean environment and a short limit of its own; no answer means
  that no limit is known, never that there is none to worry about: the caller says which it was.

Sources: systemd.service(5), systemctl(1), cgroups(7).
"""

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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


def read(
    cgroup: str | None = None,
    run: Callable[[Sequence[str]], str] = ask,
    ancestry: Callable[[int], set[int]] = _ancestry,
) -> OuterLimit | None:
    """Return the limit systemd has for us, or None if we are no service or it does not answer. Blocks up to 2 s."""
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
        properties = dict(line.split("=", 1) for line in printed.splitlines() if "=" in line)
        if int(properties.get("MainPID", "0")) not in ancestry(os.getpid()):
            return None
        return OuterLimit(span(properties["TimeoutStopUSec"]), f"TimeoutStopSec of {unit.name}")
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return None
