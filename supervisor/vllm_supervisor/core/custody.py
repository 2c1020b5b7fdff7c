"""Which processes are the engine's: a pure decision over one picture of /proc.

Rules, in this order; the first that holds makes a member:
* remembered: it was a member before (same pid and start time), whatever it has done to its parent, session or environment;
* marked: its environment carries this incarnation's variables;
* descent: its parent is the main process or a member;
* session: it sits in the main process's session while that session is provably still the same one;
* adopted: as subreaper we became its parent, although we did not spawn it. Not as PID 1, where strangers' orphans come to us too.
Never by name. We ourselves and our ancestors are never members, and nothing that started before the main process is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vllm_supervisor.core.proc import ProcessId, Stat

# What the engine's environment carries. The instance is one state directory, over all its runs.
INSTANCE = "VSUP_INSTANCE"
RUN = "VSUP_RUN"
INCARNATION = "VSUP_INCARNATION"


@dataclass(frozen=True, slots=True)
class Marker:
    """The three variables that name an engine: instance (of the state directory), run and incarnation."""

    instance: str
    run: str
    incarnation: int

    def variables(self) -> dict[str, str]:
        """Return what goes into the engine's environment."""
        return {INSTANCE: self.instance, RUN: self.run, INCARNATION: str(self.incarnation)}


@dataclass(frozen=True, slots=True)
class Seen:
    """One process in one picture: its stat and, where we could read its environment, whether the marker is in it."""

    stat: Stat
    marked: bool


@dataclass(frozen=True, slots=True)
class Us:
    """The supervisor: its pid, whether orphans of its descendants alone come to it, and whom it spawned itself."""

    pid: int
    subreaper: bool
    spawned: frozenset[int]


def ancestors(pid: int, picture: Mapping[int, Seen]) -> set[int]:
    """Return `pid` and everything above it, as far as the picture shows."""
    found: set[int] = set()
    while pid and pid not in found:
        found.add(pid)
        seen = picture.get(pid)
        pid = seen.stat.ppid if seen else 0
    return found


def members(main: ProcessId, picture: Mapping[int, Seen], remembered: Iterable[ProcessId], us: Us) -> list[ProcessId]:
    """Return every process of the engine in the picture, zombies included, ordered by pid."""
    known = set(remembered) | {main}
    untouchable = ancestors(us.pid, picture)
    candidates = {
        pid: seen.stat
        for pid, seen in picture.items()
        if pid not in untouchable and seen.stat.id.start_ticks >= main.start_ticks
    }
    # A session is still the engine's while its leader is the main process or a member we know holds it open.
    sessions = {stat.sid for stat in candidates.values() if stat.id in known and stat.sid == main.pid}
    adopts = us.subreaper and us.pid != 1

    def directly(pid: int, stat: Stat) -> bool:
        return (
            stat.id in known
            or picture[pid].marked
            or stat.sid in sessions
            or (adopts and stat.ppid == us.pid and pid not in us.spawned)
        )

    found = {pid for pid, stat in candidates.items() if directly(pid, stat)}
    return _with_descendants(found, candidates)


def marked(picture: Mapping[int, Seen], our_pid: int) -> list[ProcessId]:
    """Return every marked process in the picture and its descendants, but never us or an ancestor of ours."""
    untouchable = ancestors(our_pid, picture)
    candidates = {pid: seen.stat for pid, seen in picture.items() if pid not in untouchable}
    return _with_descendants({pid for pid in candidates if picture[pid].marked}, candidates)


def _with_descendants(found: set[int], candidates: Mapping[int, Stat]) -> list[ProcessId]:
    children: dict[int, list[int]] = {}
    for pid, stat in candidates.items():
        children.setdefault(stat.ppid, []).append(pid)
    fresh = list(found)
    while fresh:
        below = [child for child in children.get(fresh.pop(), ()) if child not in found]
        found.update(below)
        fresh.extend(below)
    return sorted(candidates[pid].id for pid in found)
