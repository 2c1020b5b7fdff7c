"""A cgroup of its own for the engine, where cgroup v2 has been delegated to us; elsewhere a sentence that says why not.

Rules:
* Only a delegated cgroup is touched: one that systemd marked (Delegate=yes), or the root of our own cgroup namespace
  when we may write it. Any other belongs to somebody else, even if root could write it.
* Groups with children may hold no processes themselves, so we move into the leaf `supervisor` first; engines get
  `engine-N`. Without that move there are no memory figures, but killing works.
* Everything that is not there is a value.

Source of facts: Documentation/admin-guide/cgroup-v2.rst, systemd's CGROUP_DELEGATION.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LEAF = "supervisor"


@dataclass(frozen=True, slots=True)
class Unavailable:
    """There is none, and why."""

    why: str


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """The cgroup of one incarnation."""

    path: Path

    def add(self, pid: int) -> Unavailable | None:
        """Move a process in, before it has children; None when done."""
        try:
            (self.path / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            return Unavailable(f"process {pid} cannot be moved to {self.path}: {error.strerror}")
        return None

    def pids(self) -> list[int]:
        """Return the processes inside, zombies not counted."""
        with suppress(OSError):
            return [int(line) for line in (self.path / "cgroup.procs").read_text().split()]
        return []

    def kill(self) -> bool:
        """KILL everything inside at once; False where the kernel cannot (before 5.14)."""
        try:
            (self.path / "cgroup.kill").write_text("1")
        except OSError:
            return False
        return True

    def oom_kills(self) -> int | Unavailable:
        """Return how many processes inside the kernel killed for want of memory."""
        return _oom_kills(self.path)

    def remove(self) -> bool:
        """Remove the empty group; False while something is in it."""
        try:
            self.path.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The cgroup that was delegated to us."""

    path: Path

    def engine(self, incarnation: int) -> EngineGroup | Unavailable:
        """Make the group of one incarnation."""
        group = EngineGroup(self.path / f"engine-{incarnation}")
        try:
            group.path.mkdir(exist_ok=True)
        except OSError as error:
            return Unavailable(f"{group.path} cannot be made: {error.strerror}")
        return group

    def earlier_engines(self) -> list[EngineGroup]:
        """Return the engine groups that exist already: of an earlier run, if asked before the first engine."""
        return [EngineGroup(path) for path in sorted(self.path.glob("engine-*")) if path.is_dir()]


def delegated(mount: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> Cgroup | Unavailable:
    """Take over the cgroup that was delegated to us, moving ourselves into its leaf; or say why there is none."""
    ours = own_path(mount, proc)
    if isinstance(ours, Unavailable):
        return ours
    if ours.name == _LEAF and _is_delegated(ours.parent, mount):
        return Cgroup(ours.parent)  # an exec of ourselves finds itself where it was
    if not _is_delegated(ours, mount):
        return Unavailable(f"{ours} is not delegated to us; a systemd unit needs Delegate=yes")
    leaf = ours / _LEAF
    try:
        leaf.mkdir(exist_ok=True)
        (leaf / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        return Unavailable(f"{leaf} cannot be used: {error.strerror}")
    # Refused while other processes sit in our group, or where memory was not delegated: then there are no figures.
    with suppress(OSError):
        (ours / "cgroup.subtree_control").write_text("+memory")
    return Cgroup(ours)


def own_path(mount: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> Path | Unavailable:
    """Return the directory of the cgroup we are in, if this machine has cgroup v2 alone."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError as error:
        return Unavailable(f"/proc/self/cgroup: {error.strerror}")
    if not (mount / "cgroup.controllers").exists():
        return Unavailable(f"no cgroup v2 at {mount}")
    for line in lines:
        if line.startswith("0::/"):
            return mount / line.removeprefix("0::/")
    return Unavailable("we are in no cgroup v2")


def not_delegated(ours: Path | Unavailable, mount: Path = Path("/sys/fs/cgroup")) -> str:
    """Say why `own_path()` cannot hold an engine's group, or "" if it can; nothing is moved or made."""
    if isinstance(ours, Unavailable):
        return ours.why
    given = ours.parent if ours.name == _LEAF else ours
    return "" if _is_delegated(given, mount) else f"{given} is not delegated to us"


def own_oom_kills() -> int | Unavailable:
    """Return how many processes of our own cgroup the kernel killed for want of memory; in a container, of all of it."""
    ours = own_path()
    return ours if isinstance(ours, Unavailable) else _oom_kills(ours)


def _is_delegated(path: Path, mount: Path) -> bool:
    if not os.access(path / "cgroup.procs", os.W_OK):
        return False
    for name in ("trusted.delegate", "user.delegate"):
        with suppress(OSError):
            if os.getxattr(path, name) == b"1":
                return True
    # The root of a cgroup namespace is its owner's; the machine's own root, which has no events, is nobody's.
    return path == mount and (path / "cgroup.events").exists()


def _oom_kills(path: Path) -> int | Unavailable:
    try:
        lines = (path / "memory.events").read_text().splitlines()
    except OSError:
        return Unavailable(f"{path} has no memory controller")
    for line in lines:
        name, _, number = line.partition(" ")
        if name == "oom_kill":
            return int(number)
    return Unavailable(f"{path} does not count OOM kills")
