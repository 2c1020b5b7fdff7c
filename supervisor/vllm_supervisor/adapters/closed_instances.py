"""Supervisors of other users: that one runs can be seen, although its run directory is closed to us.

Rules:
* A closed directory alone proves nothing, for it outlives a supervisor that was killed: one of its owner's processes has
  to be a supervisor.

Source: proc(5) on cmdline, which everybody may read unless /proc is mounted with hidepid.
"""

import os
import pwd
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_COMMANDS = (b"vllm-supervisor", b"vllm_supervisor")


@dataclass(frozen=True, slots=True)
class ClosedInstance:
    """One that runs: its run directory, or the directory that holds it; its pid, its user."""

    directory: Path
    pid: int
    user: str

    def __str__(self) -> str:
        """Say what it is and how to reach it."""
        return (
            f"a supervisor runs here as {self.user} (pid {self.pid}), not accessible to you: use sudo, or set its "
            "control.group to a group of yours (its unit then needs SupplementaryGroups=GROUP as well)"
        )


def find(places: Sequence[Path], name: str | None) -> ClosedInstance | None:
    """Return the first below the shared `places` that runs, is called `name` if that is given, and is closed to us."""
    for directory in _closed(places, name):
        with suppress(OSError):
            owner = directory.stat().st_uid
            pid = _supervisor_of(owner)
            if pid is not None:
                return ClosedInstance(directory, pid, _user(owner))
    return None


def _closed(places: Sequence[Path], name: str | None) -> Iterator[Path]:
    for shared in places:
        try:
            entries = sorted(shared.iterdir())
        except PermissionError:
            yield shared
            continue
        except OSError:
            continue
        yield from (one for one in entries if name in {None, one.name} and not os.access(one, os.X_OK))


def _supervisor_of(uid: int) -> int | None:
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                words = (entry / "cmdline").read_bytes().split(b"\0")[:4]
                if any(command in word for word in words for command in _COMMANDS):
                    return int(entry.name)
    return None


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
