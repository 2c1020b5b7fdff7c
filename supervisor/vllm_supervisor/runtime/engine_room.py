"""Carries out what the lifecycle wants done to the engine: spawn, TERM, KILL, and the sweep that proves nothing is left.

Rules:
* A sweep ends with the proof: every process of the incarnation (and of an earlier run that died) is gone, its output has
  been read to the end, what it left is cleared. Only then is `SweepDone` told.
* Each incarnation gets a socket and a directory of its own: a leftover that still answers on the old path can never be
  taken for the new engine.
* No fact of an incarnation comes after its `SweepDone`, so none can be taken for one of the next.
"""

import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import trio

from vllm_supervisor.adapters import beacon, clock, leftovers, lock, processes
from vllm_supervisor.adapters import child as children
from vllm_supervisor.adapters.cgroup import Cgroup, EngineGroup, Unavailable
from vllm_supervisor.adapters.child import SpawnError
from vllm_supervisor.adapters.leftovers import Removed
from vllm_supervisor.adapters.processes import Abandoned, Leftovers, Member, Tree
from vllm_supervisor.adapters.threads import in_thread
from vllm_supervisor.core import engine_env, facts
from vllm_supervisor.core.address import Address, TcpAddress, UnixAddress
from vllm_supervisor.core.custody import Keeper, Marker
from vllm_supervisor.core.engine_command import EngineKind, Transport
from vllm_supervisor.core.facts import Fact
from vllm_supervisor.core.plan import Plan
from vllm_supervisor.core.probe import PROBE_ID_PREFIX
from vllm_supervisor.core.proc import ProcessId
from vllm_supervisor.runtime.incarnation import Body, Incarnation, Readiness
from vllm_supervisor.runtime.memory_keeper import MemoryKeeper

LAST_WORDS = 5.0  # seconds before its end in which a dying engine tells its clients itself (vLLM 0.32 needs 4)
LONGEST_HOME = 107 - 37  # bytes: vLLM names its sockets by 36 characters, and a socket's path has 107 bytes (unix(7))
SOCKET = "sock"  # of the engine's API, in its home
PROVE_WITHIN = 10.0  # seconds for KILLed processes to go
# Errors of a spawn that say nothing against the command: what was missing may be there in a moment.
MAY_PASS = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ETXTBSY, errno.EINTR}


class EngineRoom:
    """At most one incarnation at a time. Every method but the tasks it starts returns at once."""

    def __init__(
        self,
        plan: Plan,
        *,
        nursery: trio.Nursery,
        instance: str,
        run: str,
        run_dir: Callable[[], Path | None],
        subreaper: bool,
        cgroup: Cgroup | Unavailable,
        tell: Callable[[Fact], None],
        forward: Callable[[Sequence[bytes]], None],
        requests_lost: Callable[[float], int],
        memory: MemoryKeeper,
        log: Any,
    ) -> None:
        """`instance` and `run` mark the engine's processes; `forward` takes the engine's lines.

        `run_dir` gives the directory for its sockets, or None while there is none: a temporary one is made then.
        `requests_lost` counts the requests that failed or were cut since a time (monotonic seconds).
        """
        self._plan = plan
        self._nursery = nursery
        self._instance = instance
        self._run = run
        self._run_dir = run_dir
        self._subreaper = subreaper
        self._cgroup = cgroup
        self._tell = tell
        self._forward = forward
        self._requests_lost = requests_lost
        self._memory = memory
        self._log = log
        us = ProcessId(os.getpid(), processes.start_ticks(os.getpid()) or 0)
        self._keeper = Keeper(us, processes.namespaces())
        self._abandoned = Abandoned(instance, run, plan.config.engine.sweep_domain, locked=lock.holding_run)
        self._named: frozenset[ProcessId] = frozenset()
        self.current: Incarnation | None = None
        self._stay: tuple[tuple[Member, str], ...] = ()

    @property
    def orphans(self) -> list[tuple[Member, str]]:
        """Processes of engines of others that nobody looks after, as far as the last sweep found, and why they stay."""
        return [(member, why) for member, why in self._stay if not processes.ended(member.id)]

    # -- orders ------------------------------------------------------------------------------------------------------

    def spawn(self, number: int) -> None:
        """Start incarnation `number` and everything that watches it."""
        run_dir = self._run_dir()
        try:
            home = self._home(number, run_dir)
            steps = self._beacon(home)
            address = self._address(home)
        except OSError as fault:
            sentence = f"{run_dir or tempfile.gettempdir()} cannot hold the engine's sockets: {fault.strerror}"
            self._tell(facts.SpawnFailed(sentence, may_pass=fault.errno in MAY_PASS))
            return
        domain = self._plan.config.engine.sweep_domain
        marker = Marker(self._instance, self._run, number, self._keeper, str(self._plan.state_dir), domain)
        env = engine_env.build(
            self._plan.environ,
            self._plan.config.engine.env,
            run=self._run,
            incarnation=number,
            unix_socket=isinstance(address, UnixAddress),
            rpc_directory=str(home),
            path_first=self._plan.path_first,
        )
        if steps is not None:
            env |= beacon.environment(steps, env)
        try:
            child = children.spawn(self._plan.command.argv(address), env | marker.variables())
        except SpawnError as fault:
            shutil.rmtree(home, ignore_errors=True)
            self._tell(facts.SpawnFailed(f"{fault.sentence}; check engine.command", may_pass=fault.errno in MAY_PASS))
            return
        group = self._cgroup.engine(number) if isinstance(self._cgroup, Cgroup) else self._cgroup
        if isinstance(group, EngineGroup):
            group = group.add(child.pid) or group
        self._memory.engine_began(number, child.id, group.path if isinstance(group, EngineGroup) else None)
        tree = Tree(child.id, marker, spawned=children.owned, subreaper=self._subreaper)
        asked = address if self._plan.listeners else None  # a headless node takes the option, and listens nowhere
        body = Body(number, home, child, tree, group, steps, self._plan.config.engine.beacon == "require", asked)
        self.current = Incarnation(
            body,
            forward=self._forward,
            tell=self._tell,
            memory=self._memory,
            started_at=clock.monotonic(),
            on_fault=self._on_line_fault,
        )
        self._tell(facts.Spawned(child.pid))
        self._nursery.start_soon(self.current.run, self._readiness(number))

    def terminate(self) -> None:
        """TERM to the main process, once."""
        if self.current is not None:
            self.current.terminate()

    def kill_tree(self) -> None:
        """KILL to everything; the sweep that follows the main process's end proves it."""
        if self.current is not None:
            self.current.kill()

    def sweep(self) -> None:
        """Prove that nothing is left, and tell."""
        self._nursery.start_soon(self._sweep)

    def _on_line_fault(self, fault: Exception) -> None:
        self._log.error("fault", sentence="internal error while reading a line of the engine", exc_info=fault)

    # -- the sweep ---------------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        ended = self.current
        killed: list[Member] = []
        left: list[Member] = []
        if ended is not None:
            killed, left = await ended.body.tree.sweep(PROVE_WITHIN)
        if not left:
            earlier = await self._sweep_earlier()
            if earlier is None:
                sentence = f"/proc cannot be read within {PROVE_WITHIN:g} s: a process hangs in the kernel, and `ps` hangs as well"
                self._tell(facts.SweepFailed(f"{sentence}; a reboot may be needed"))
                return
            left = earlier
            if left and not self._plan.config.engine.sweep:
                sentence = f"an earlier run left {_named(left)}; end them, or set engine.sweep = true"
                self._tell(facts.SweepFailed(sentence, refused=True))
                return
        if left:
            sentence = f"KILL did not remove {_named(left)}; a person has to, and a reboot may be needed"
            self._tell(facts.SweepFailed(sentence))
            return
        if ended is None:  # before a start alone: a stop has no time for what others left
            await self._end_abandoned()
            self._clear_earlier()
            self._tell(facts.SweepDone())
            return
        await ended.read_out()
        evidence = ended.evidence()
        self._clear(ended, killed)
        self.current = None
        self._memory.engine_gone()
        self._tell(
            facts.SweepDone(evidence, self._requests_lost(max(ended.started_at, ended.going_since - LAST_WORDS)))
        )

    async def _sweep_earlier(self) -> list[Member] | None:
        """End what a run that died left behind; with `engine.sweep` off only look. None: a look does not come back."""
        earlier = Leftovers(self._instance, self._run)
        found: list[Member] | None = None
        # In a thread: what the earlier run left may hang in a driver, and then holds up whoever reads its environment.
        with trio.move_on_after(PROVE_WITHIN):
            found = await in_thread(earlier.look)
        if not found or not self._plan.config.engine.sweep:
            return found
        said, left = await _end(earlier, found)
        self._log.warning("swept_earlier", sentence=f"cleanup after an earlier run: {said}")
        return left

    async def _end_abandoned(self) -> None:
        """End engines of other instances whose supervisor is dead; name those of whom that cannot be told.

        They hold memory and GPU beside ours. What cannot be ended is named, and does not keep ours from starting.
        """
        survey = None
        try:
            with trio.move_on_after(PROVE_WITHIN):
                survey = await in_thread(self._abandoned.survey)
        except (
            OSError,
            ValueError,
        ) as fault:  # what others put into their environment must not keep ours from starting
            self._log.warning("orphans", sentence=f"engines of other supervisors cannot be looked for: {fault}")
        if survey is None:
            return
        stay = [(member, fate.value) for member, fate in survey.untold]
        if survey.abandoned and self._plan.config.engine.sweep:
            said, left = await _end(self._abandoned, survey.abandoned)
            self._log.warning("swept_abandoned", sentence=f"a supervisor that was killed left an engine: {said}")
            stay += [(member, "KILL did not remove it") for member in left]
        else:
            stay += [(member, "engine.sweep is off") for member in survey.abandoned]
        self._stay = tuple(stay)
        ids = frozenset(member.id for member, _why in stay)
        if ids - self._named:
            listed = "; ".join(f"{_named([member])}: {why}" for member, why in stay)
            self._log.warning(
                "orphans", sentence=f"engines of other supervisors run here unattended, it seems: {listed}"
            )
        self._named = ids

    def _clear_earlier(self) -> None:
        """Remove the sockets, directories and groups of engines of an earlier run: none of their processes is left."""
        run_dir = self._run_dir()
        if run_dir is not None:
            leftovers.remove_homes(run_dir, self._run)
        if isinstance(self._cgroup, Cgroup):
            for group in self._cgroup.earlier_engines():
                group.remove()

    def _clear(self, ended: Incarnation, killed: Sequence[Member]) -> None:
        """Remove what only this incarnation can have made, and say what it had left."""
        body = ended.body
        removed = ended.clear()
        shutil.rmtree(body.home, ignore_errors=True)
        if isinstance(body.group, EngineGroup):
            body.group.remove()
        if killed or removed.names or removed.kept:
            # vLLM regularly leaves workers, multiprocessing's resource tracker and its psm_* segments for a moment or
            # for good. What is gone again is nothing to be warned of.
            say = self._log.warning if removed.kept else self._log.info
            say("swept", sentence=f"cleanup: {_left_behind(killed, removed)}")

    # -- parts -------------------------------------------------------------------------------------------------------

    def _home(self, number: int, run_dir: Path | None) -> Path:
        """Make the incarnation's private directory: vLLM's inner sockets go there and nobody else's."""
        home = None if run_dir is None else run_dir / f"engine-{self._run}-{number}"
        if home is None or len(os.fsencode(home)) > LONGEST_HOME:
            return Path(tempfile.mkdtemp(prefix="vsup-"))  # 0700 as well
        home.mkdir(mode=0o700)
        return home

    def _beacon(self, home: Path) -> Path | None:
        """Where the engine's steps are to be reported; only vLLM can be asked to."""
        if self._plan.kind is not EngineKind.VLLM or self._plan.config.engine.beacon == "off":
            return None
        steps = home / "steps"
        steps.mkdir(mode=0o700)
        return steps

    def _address(self, home: Path) -> Address:
        """Where the engine listens: below its own directory, which is closed to the group of the control socket too."""
        if self._plan.command.transport is Transport.UDS:
            return UnixAddress(str(home / SOCKET))
        with socket.socket() as probe:  # the kernel's choice of a free port; the engine binds it a moment later
            probe.bind(("127.0.0.1", 0))
            return TcpAddress("127.0.0.1", probe.getsockname()[1])

    def _readiness(self, number: int) -> Readiness:
        return Readiness(
            probe=self._plan.config.engine.ready_probe,
            api_key=self._plan.api_key,
            request_id=f"{PROBE_ID_PREFIX}{self._run}-{number}",
        )


async def _end(left: Leftovers | Abandoned, found: Sequence[Member]) -> tuple[str, list[Member]]:
    """KILL what is left, remove its shared memory; return what was done in words, and what withstood."""
    segments = leftovers.Segments()
    with trio.move_on_after(PROVE_WITHIN):
        pids = [member.id.pid for member in found]
        segments.note(await in_thread(segments.find, pids))
    killed, withstood = await left.sweep(PROVE_WITHIN, in_thread)
    return _left_behind(killed, segments.remove_unused()), withstood


def _named(members: Sequence[Member]) -> str:
    return ", ".join(f"{member.name} (pid {member.id.pid})" for member in members)


def _left_behind(killed: Sequence[Member], removed: Removed) -> str:
    parts = [f"killed {_count(killed, 'leftover process', 'es')} ({_named(killed)})"] if killed else []
    if removed.names:
        names = ", ".join(removed.names)
        what = _count(removed.names, "shared-memory segment", "s")
        parts.append(f"removed {what} ({names}; {removed.bytes / 1024:.0f} KiB)")
    parts += [f"kept {path}: {why}" for path, why in removed.kept]
    return "; ".join(parts)


def _count(what: Sequence[object], word: str, plural: str) -> str:
    return f"{len(what)} {word}{plural if len(what) > 1 else ''}"
