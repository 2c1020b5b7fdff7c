"""Which supervisor a tool means that was given no name, when run and state directories do not tell the same.

Rules:
* A control socket can vanish under a living supervisor; its lock in the state directory cannot. So a supervisor that is
  known by its lock alone counts as well.
* Whatever changes something (stop, restart, drain …) acts only when one supervisor is known from both sides together;
  what only looks goes on and names the others.
* The two sides are the same supervisor if the pid is, or the name, or the name of the state directory: a service
  manager may call the directories otherwise than the instance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_supervisor.core.plan import Holder


@dataclass(frozen=True, slots=True)
class Reached:
    """A supervisor that answers on a control socket: the name of its run directory, and its pid (0: not ours to see)."""

    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class Locked:
    """A supervisor that holds the lock of a state directory."""

    holder: Holder
    state_dir: Path

    def __str__(self) -> str:
        """Name it for a sentence."""
        return f"{self.holder.name} (pid {self.holder.pid}, state directory {self.state_dir})"


def others(reached: Reached, locked: Sequence[Locked]) -> list[Locked]:
    """Return those that hold a lock and are not the one that was reached."""
    return [
        one
        for one in locked
        if one.holder.pid != reached.pid and reached.name not in (one.holder.name, one.state_dir.name)
    ]


def ambiguous(reached: Reached, beside: Sequence[Locked]) -> str:
    """Say why nothing was done without a name."""
    return (
        f"several supervisors run here: {reached.name} (pid {reached.pid}), and without a control socket in sight "
        f"{_named(beside)}; choose one with --name NAME"
    )


def also(beside: Sequence[Locked]) -> str:
    """Say who runs besides the one that was asked."""
    return f"also running, without a control socket in sight: {_named(beside)}"


def unreachable(locked: Sequence[Locked]) -> str:
    """Say that those who run cannot be asked, and what can be done."""
    pids = " ".join(str(one.holder.pid) for one in locked)
    return (
        f"no control socket was found, but this runs: {_named(locked)}; it makes its socket again within seconds where it "
        f"can, and `kill -TERM {pids}` stops it in order"
    )


def _named(found: Sequence[Locked]) -> str:
    return ", ".join(map(str, found))


def flock_holders(locks: str) -> dict[int, set[int]]:
    """Read /proc/locks: {inode: pids that hold a flock on it}. Nobody's lock is touched by that (proc(5))."""
    held: dict[int, set[int]] = {}
    for line in locks.splitlines():
        field = line.split()
        # 1: FLOCK ADVISORY WRITE 1234 08:01:5678 0 EOF; one that waits for a lock has "->" behind the number.
        if len(field) == 8 and field[1] == "FLOCK" and field[3] == "WRITE":
            try:
                held.setdefault(int(field[5].rpartition(":")[2]), set()).add(int(field[4]))
            except ValueError:
                continue
    return held
