"""The engine's processes in /proc: look, remember, kill, and wait until none is left.

Rules:
* Who belongs is decided in core/custody.py; this file reads /proc and sends signals.
* A member once seen is remembered, so that setsid, a new parent or a wiped environment does not hide it later.
* KILL goes through a pidfd whose start time was checked after opening it: no stranger can be hit after a pid was reused.
* Each wait holds its own pidfd; nothing here polls.
"""

import os
import signal
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import trio

from vllm_supervisor.core import custody
from vllm_supervisor.core.custody import Keeper, Kept, Marker, Seen, Us
from vllm_supervisor.core.proc import ProcessId, Stat, has_variables, parse_stat, title, variable

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_COMM = 15  # bytes at which the kernel cuts a name: such a title may be whole in a moment


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the engine. `rss_bytes` counts shared pages as well; `cpu_s` is user and system time in seconds."""

    id: ProcessId
    name: str
    state: str
    ppid: int
    pgid: int
    sid: int
    rss_bytes: int
    cpu_s: float
    dead: bool  # a zombie: nothing of it runs, it only waits to be reaped


def _read(path: str) -> bytes | None:
    """Return a file of /proc, or None if its process is gone or not ours to read."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a thousand times a look, where Path costs double
            return file.read()
    except OSError:
        return None


def _stats() -> dict[int, Stat]:
    found: dict[int, Stat] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - names alone are wanted
        if name.isdigit() and (data := _read(f"/proc/{name}/stat")):
            stat = parse_stat(data)
            found[stat.id.pid] = stat
    return found


def start_ticks(pid: int) -> int | None:
    """Return when a process started (clock ticks since boot), or None if there is none."""
    data = _read(f"/proc/{pid}/stat")
    return parse_stat(data).id.start_ticks if data else None


def ended(process: ProcessId) -> bool:
    """Say whether nothing of a process runs any more, reaped or not."""
    data = _read(f"/proc/{process.pid}/stat")
    stat = parse_stat(data) if data else None
    return stat is None or stat.id != process or stat.dead


def _title(stat: Stat) -> str:
    return title(stat.comm, _read(f"/proc/{stat.id.pid}/cmdline") or b"")


def _member(stat: Stat, name: str) -> Member:
    return Member(
        stat.id,
        name,
        stat.state,
        stat.ppid,
        stat.pgid,
        stat.sid,
        stat.rss_pages * _PAGE,
        stat.cpu_ticks / _TICKS,
        stat.dead,
    )


Look = Callable[[], list[Member]]
Aside = Callable[[Look], Awaitable[list[Member]]]


class Tree:
    """All processes of one incarnation."""

    def __init__(
        self, main: ProcessId, marker: Marker, *, spawned: Callable[[], frozenset[int]], subreaper: bool
    ) -> None:
        """Begin with `main`, the process we spawned; `spawned` tells the pids we spawned ourselves and still wait for."""
        self.main = main
        self._wanted = tuple(marker.variables().items())
        self._spawned = spawned
        self._subreaper = subreaper
        self._remembered: set[ProcessId] = set()
        self._marked: dict[ProcessId, bool] = {}
        self._titles: dict[ProcessId, tuple[str, str]] = {}

    def look(self) -> list[Member]:
        """Read /proc once and return every process of the engine, zombies included."""
        stats = _stats()
        self._marked = {stat.id: self._is_marked(stat) for stat in stats.values()}
        picture = {pid: Seen(stat, self._marked[stat.id]) for pid, stat in stats.items()}
        us = Us(os.getpid(), self._subreaper, self._spawned())
        found = custody.members(self.main, picture, self._remembered, us)
        self._remembered = set(found)
        self._titles = {one: self._known_title(stats[one.pid]) for one in found}
        return [_member(stats[one.pid], self._titles[one][1]) for one in found]

    def _known_title(self, stat: Stat) -> tuple[str, str]:
        """Return (comm, title). The command line is read again only with a new comm: a wedged process may block its reader."""
        known = self._titles.get(stat.id)
        if known is not None and known[0] == stat.comm and len(known[1].encode()) != _COMM:
            return known
        return stat.comm, _title(stat)

    def _is_marked(self, stat: Stat) -> bool:
        """Read a process's environment once: what was found then holds for its life."""
        if stat.id.start_ticks < self.main.start_ticks:
            return False
        known = self._marked.get(stat.id)
        if known is None:
            known = has_variables(_read(f"/proc/{stat.id.pid}/environ") or b"", self._wanted)
        return known

    def remaining(self) -> list[Member]:
        """Return the members that still run; zombies do not."""
        return [member for member in self.look() if not member.dead]

    async def gone(self, timeout_s: float) -> list[Member]:
        """Wait until a look finds nothing running; return what still runs after `timeout_s`."""
        return await _until_none(self.remaining, timeout_s, lambda _found: None, _here)

    async def sweep(self, timeout_s: float) -> tuple[list[Member], list[Member]]:
        """KILL all of it, late forks too, until a look finds nothing; return (everything killed, what withstood)."""
        return await _sweep(self.remaining, timeout_s, _here)


class Leftovers:
    """Processes that an earlier run of the same instance (state directory) left behind."""

    def __init__(self, instance: str, run: str) -> None:
        """Look for marks of `instance` whose run is not `run`, which is ours."""
        self._instance = instance
        self._run = run

    def look(self) -> list[Member]:
        """Read every environment we may read and return what still runs, with its descendants."""
        stats = _stats()
        marked = {pid: self._is_left(pid) for pid in stats}
        picture = {pid: Seen(stat, marked[pid]) for pid, stat in stats.items()}
        found = (stats[one.pid] for one in custody.marked(picture, os.getpid()))
        return [_member(stat, _title(stat)) for stat in found if not stat.dead]

    def _is_left(self, pid: int) -> bool:
        environ = _read(f"/proc/{pid}/environ") or b""
        return variable(environ, custody.INSTANCE) == self._instance and variable(environ, custody.RUN) != self._run

    async def sweep(self, timeout_s: float, aside: Aside | None = None) -> tuple[list[Member], list[Member]]:
        """KILL all of it until a look finds nothing; return (everything killed, what withstood).

        `aside` looks where nothing else waits: who reads the environment of a process that hangs in the kernel hangs too.
        """
        return await _sweep(self.look, timeout_s, aside or _here)


@dataclass(frozen=True, slots=True)
class Survey:
    """Marked engines of other instances: whose supervisor is proven dead, and who cannot be told, each with why."""

    abandoned: tuple[Member, ...] = ()
    untold: tuple[tuple[Member, Kept], ...] = ()


class Abandoned:
    """Engines of other instances, with or without a supervisor that lives."""

    def __init__(self, instance: str, run: str, domain: str, *, locked: Callable[[Path], str | None]) -> None:
        """Look for marks of other instances than `instance` and other runs than `run` ("": of all), in one `domain`.

        `locked` gives the run that holds the lock of a state directory, or None.
        """
        self._instance = instance
        self._run = run
        self._domain = domain
        self._locked = locked

    def survey(self) -> Survey:
        """Read every environment we may read."""
        stats = _stats()
        fates: dict[int, Kept] = {}
        keepers: set[int] = set()
        for pid, stat in stats.items():
            environ = b"" if stat.dead else _read(f"/proc/{pid}/environ") or b""
            run = variable(environ, custody.RUN)
            instance = variable(environ, custody.INSTANCE)
            if run is None or instance is None or (variable(environ, custody.DOMAIN) or "") != self._domain:
                continue
            mark = custody.keeper(variable(environ, custody.SUPERVISOR))
            fates[pid] = self._fate(pid, mark, environ, stats)
            if run == self._run or instance == self._instance:
                fates[pid] = Kept.YES  # the sweep of our own instance sees to these
            if mark is not None and fates[pid] is Kept.YES:
                keepers.add(mark.process.pid)
        picture = {pid: Seen(stat, pid in fates) for pid, stat in stats.items()}
        left = (stats[one.pid] for one in custody.abandoned(picture, fates, os.getpid(), keepers))
        above = custody.ancestors(os.getpid(), picture)
        return Survey(
            tuple(_member(stat, _title(stat)) for stat in left if not stat.dead),
            tuple(
                (_member(stats[pid], _title(stats[pid])), fate)
                for pid, fate in sorted(fates.items())
                if fate not in (Kept.YES, Kept.NO) and pid not in above
            ),
        )

    def _fate(self, pid: int, mark: Keeper | None, environ: bytes, stats: dict[int, Stat]) -> Kept:
        here, state_dir = namespaces(), variable(environ, custody.STATE_DIR)
        lives: bool | None = False
        if mark is not None and mark.namespaces == here:
            known = stats.get(mark.process.pid)
            # What /proc does not show need not be dead: hidepid, ProtectProc= or a lack of descriptors hides it too.
            lives = _is_there(mark.process.pid) if known is None else known.id == mark.process and not known.dead
        try:
            ours = os.stat(f"/proc/{pid}").st_uid == os.geteuid()  # noqa: PTH116 - once for each marked process
        except OSError:
            ours = False
        look = (
            bool(state_dir) and ours and mark is not None and mark.namespaces == here
        )  # else the path is a stranger's
        held = self._locked(Path(state_dir or "")) if look else None
        return custody.kept(
            mark, here, lives=lives, locked=held is not None and held == variable(environ, custody.RUN), ours=ours
        )

    def look(self) -> list[Member]:
        """Return what is abandoned and still runs."""
        return list(self.survey().abandoned)

    async def sweep(self, timeout_s: float, aside: Aside | None = None) -> tuple[list[Member], list[Member]]:
        """Do the same with them as `Leftovers.sweep`."""
        return await _sweep(self.look, timeout_s, aside or _here)


def _is_there(pid: int) -> bool | None:
    """Return False if there is no such process, None if there is one of which no more is known."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return None
    return None


def namespaces() -> str:
    """Name the namespaces in which a pid and a start time of ours mean the same process (namespaces(7))."""
    found = []
    for kind in ("pid", "time"):
        try:
            found.append(os.readlink(f"/proc/self/ns/{kind}"))  # noqa: PTH115 - the bare text is compared
        except OSError:  # a kernel without that kind
            found.append(f"{kind}:[]")
    return ",".join(found)


async def _here(look: Look) -> list[Member]:
    return look()


async def _until_none(look: Look, timeout_s: float, act: Callable[[list[Member]], None], aside: Aside) -> list[Member]:
    deadline = trio.current_time() + timeout_s
    while found := await aside(look):
        act(found)
        with trio.move_on_at(deadline) as scope:
            async with trio.open_nursery() as nursery:
                for member in found:
                    nursery.start_soon(watch, member.id)
        if scope.cancelled_caught:
            return await aside(look)
    return []


async def _sweep(look: Look, timeout_s: float, aside: Aside) -> tuple[list[Member], list[Member]]:
    killed: dict[ProcessId, Member] = {}

    def act(found: list[Member]) -> None:
        killed.update((member.id, member) for member in found)
        kill(member.id for member in found)

    left = await _until_none(look, timeout_s, act, aside)
    return list(killed.values()), left


def kill(processes: Iterable[ProcessId]) -> int:
    """Send KILL to each that is still the same process; return how many signals were sent."""
    sent = 0
    for one in processes:
        try:
            fd = os.pidfd_open(one.pid)
        except ProcessLookupError:
            continue
        try:
            if start_ticks(one.pid) == one.start_ticks:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                sent += 1
        except (ProcessLookupError, PermissionError):
            continue  # it ended meanwhile, or took another user's identity: it shows in what remains
        finally:
            os.close(fd)
    return sent


async def watch(process: ProcessId) -> None:
    """Return when this process has ended (reaped or not); at once if it is gone already."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        await trio.lowlevel.checkpoint()
        return
    try:
        if start_ticks(process.pid) == process.start_ticks:
            await trio.lowlevel.wait_readable(fd)
        else:
            await trio.lowlevel.checkpoint()
    finally:
        os.close(fd)
