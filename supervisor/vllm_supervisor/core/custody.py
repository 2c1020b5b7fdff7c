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
from enum import StrEnum

from vllm_supervisor.core.proc import ProcessId, Stat

# What the engine's environment carries. The instance is one state directory, over all its runs.
INSTANCE = "VSUP_INSTANCE"
RUN = "VSUP_RUN"
INCARNATION = "VSUP_INCARNATION"
SUPERVISOR = "VSUP_SUPERVISOR"
STATE_DIR = "VSUP_STATE_DIR"
DOMAIN = "VSUP_DOMAIN"


@dataclass(frozen=True, slots=True)
class Keeper:
    """The supervisor of an engine: its process, and the namespaces in which pid and start time mean that process."""

    process: ProcessId
    namespaces: str  # without a space

    def __str__(self) -> str:
        """Give it as it stands in the engine's environment."""
        return f"{self.process.pid} {self.process.start_ticks} {self.namespaces}"


_MOST_DIGITS = 20  # of a 64-bit number; the text may be anybody's


def keeper(text: str | None) -> Keeper | None:
    """Read what `Keeper` wrote; None if it is missing or no such thing."""
    fields = (text or "").split(" ")
    numbers = all(field.isascii() and field.isdigit() and len(field) <= _MOST_DIGITS for field in fields[:2])
    if len(fields) != 3 or not fields[2] or not numbers:
        return None
    return Keeper(ProcessId(int(fields[0]), int(fields[1])), fields[2])


@dataclass(frozen=True, slots=True)
class Marker:
    """The variables that name an engine: instance (of the state directory), run, incarnation, and who looks after it."""

    instance: str
    run: str
    incarnation: int
    keeper: Keeper | None = None
    state_dir: str = ""
    domain: str = ""

    def variables(self) -> dict[str, str]:
        """Return what goes into the engine's environment."""
        said = {INSTANCE: self.instance, RUN: self.run, INCARNATION: str(self.incarnation)}
        if self.keeper is not None:
            said |= {SUPERVISOR: str(self.keeper), STATE_DIR: self.state_dir, DOMAIN: self.domain}
        return said


class Kept(StrEnum):
    """Whether somebody looks after a marked engine."""

    YES = "its supervisor lives"
    NO = "its supervisor is dead"
    UNMARKED = "it does not say who its supervisor is"
    HIDDEN = "its supervisor may not be looked at"
    ELSEWHERE = "its supervisor is in another namespace"
    FOREIGN = "it belongs to another user"


def kept(mark: Keeper | None, namespaces: str, *, lives: bool | None, locked: bool, ours: bool) -> Kept:
    """Say whether the supervisor in `mark` looks after its engine. Only `NO` allows to end that engine.

    `namespaces` are our own; `lives`: that pid is there with that start time (None: it is there, and no
    more can be seen of it); `locked`: the lock of its state directory is
    held for its run; `ours`: the engine runs as the user we run as.
    """
    if mark is None:
        return Kept.UNMARKED
    if lives or locked:
        return Kept.YES
    if mark.namespaces != namespaces:
        return Kept.ELSEWHERE
    if lives is None:
        return Kept.HIDDEN
    return Kept.NO if ours else Kept.FOREIGN


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


def abandoned(
    picture: Mapping[int, Seen], fates: Mapping[int, Kept], our_pid: int, keepers: Iterable[int]
) -> list[ProcessId]:
    """Return the processes of engines whose supervisor is dead, with their descendants.

    `fates`: of each marked process; `keepers`: pids of supervisors that live. Those, their own engines and whoever is not
    proven abandoned are never among them, whatever they descend from.
    """
    spared = {pid for pid, fate in fates.items() if fate is not Kept.NO} | set(keepers) | ancestors(our_pid, picture)
    candidates = {pid: seen.stat for pid, seen in picture.items() if pid not in spared}
    return _with_descendants({pid for pid in candidates if fates.get(pid) is Kept.NO}, candidates)


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
