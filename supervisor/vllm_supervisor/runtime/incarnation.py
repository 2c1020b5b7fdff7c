"""One life of the engine: its process, its tree, its output and its way to readiness.

Rules:
* What is seen becomes a fact; nothing is decided here.
* Everything that watches ends with the main process; the output is read to its end after that, within a bound.
* What counts as progress of a load is decided in core/load_activity.py; here its lines and its tree are looked at.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from vllm_supervisor.adapters import clock, engine_probe, leftovers, processes
from vllm_supervisor.adapters.beacon import BeaconReader
from vllm_supervisor.adapters.cgroup import EngineGroup, Unavailable
from vllm_supervisor.adapters.child import Child
from vllm_supervisor.adapters.engine_processes import io_bytes
from vllm_supervisor.adapters.engine_socket import EngineSocket
from vllm_supervisor.adapters.processes import Member, Tree
from vllm_supervisor.adapters.pump import Pump
from vllm_supervisor.adapters.threads import in_thread
from vllm_supervisor.core import facts, redact
from vllm_supervisor.core.address import Address, UnixAddress
from vllm_supervisor.core.engine_log import LINE_CHARS, EngineLog, plain, says_dead
from vllm_supervisor.core.exit_status import ExitEvidence
from vllm_supervisor.core.facts import Fact
from vllm_supervisor.core.guard import contained
from vllm_supervisor.core.load_activity import LoadActivity, Sign, Usage
from vllm_supervisor.core.load_progress import LoadProgress
from vllm_supervisor.core.probe import Reach, ReadyCheck, ReadyResult, Unready
from vllm_supervisor.core.proc import ProcessId
from vllm_supervisor.runtime.memory_keeper import MemoryKeeper

TITLES = "VLLM::"  # what vLLM's processes call themselves; asked only of processes that are proven members
LOOK_EVERY = 1.0  # seconds between looks at a loading engine's tree
LOOK_LATER = 5.0  # and at one that is ready
SEGMENTS_EVERY = 30.0  # seconds between looks at the shared memory of an engine that is ready
ASK_EVERY = 0.25  # seconds between ready checks while nobody listens
ASK_AGAIN = 1.0  # seconds between ready checks that were answered, but not well
NO_HEALTH_PATH = {404, 405}  # an OpenAI-compatible engine without /health is healthy when it answers at all
READ_OUT_WITHIN = 1.0  # seconds for the output of an ended engine to be read to its end
DEAD_FOR = 10.0  # seconds an engine that said it is dead may take to end by itself (vLLM 0.32 needs 4)
HEALTH_WITHIN = 5.0  # seconds for /health of such an engine, which answers from a flag
NEAR_THE_END = 60.0  # seconds before the end of a serving engine in which an error may be its reason


@dataclass(frozen=True, slots=True)
class Readiness:
    """How to find out that the engine is ready. `probe` off: /health alone decides."""

    probe: bool
    api_key: str | None
    request_id: str


@dataclass(frozen=True, slots=True)
class Body:
    """What one incarnation consists of. `home` is its private directory; `address` None: it has no HTTP front."""

    number: int
    home: Path
    child: Child
    tree: Tree
    group: EngineGroup | Unavailable
    beacon: Path | None  # where its EngineCores report their steps
    beacon_required: bool
    address: Address | None


class Incarnation:
    """A running engine, from its spawn to the last byte of its output."""

    def __init__(
        self,
        body: Body,
        *,
        forward: Callable[[Sequence[bytes]], None],
        tell: Callable[[Fact], None],
        memory: MemoryKeeper,
        started_at: float,
        on_fault: Callable[[Exception], None],
    ) -> None:
        """`forward` takes the engine's lines, `tell` the facts, `on_fault` internal errors; `started_at` in monotonic seconds."""
        self.body = body
        self.log = EngineLog()
        self.load = LoadProgress()
        self._activity = LoadActivity()
        self._output_bytes = 0
        self.ready = False
        self.started_at = started_at
        self._tell = tell
        self._memory = memory
        self._forward = forward
        self._pump = Pump(body.child.stdout, body.child.stderr, forward=self._pass_on, on_line=self._line)
        self._on_fault = on_fault
        self._unreadable = False  # a line of it has met an internal error: that is reported once
        self._watched: dict[ProcessId, str] = {}  # its parts, by name
        self._living: list[int] = []  # its processes, as last seen
        self._socket = EngineSocket(body.address) if isinstance(body.address, UnixAddress) else None
        self.socket_removed = False  # its file is gone while it is reached all the same
        self._segments = leftovers.Segments()
        self._became_ready = trio.Event()
        self._said_dead = trio.Event()
        self._over = trio.Event()
        self._ended_at: float | None = None
        self._going_since: float | None = None

    async def run(self, readiness: Readiness) -> None:
        """Watch over this life; returns when its main process has ended and its output was read."""
        async with trio.open_nursery() as output:
            output.start_soon(self._pump.run)
            async with trio.open_nursery() as watchers:
                watchers.start_soon(self._watch_tree, watchers)
                watchers.start_soon(self._become_ready, readiness, watchers)
                watchers.start_soon(self._watch_segments)
                watchers.start_soon(self._watch_words)
                raw = await self.body.child.wait()
                watchers.cancel_scope.cancel()
            self._goes()
            self._ended_at = clock.monotonic()
            self._memory.read_kernel_log()  # so that its lines get the right stamps
            self._memory.hear()  # if the guard killed it, that is to be known before the end it made
            self._tell(facts.Exited(raw))
            self._over.set()
            # What is left of the tree may hold the pipes open: the sweep ends it, and then this ends.

    @property
    def address(self) -> Address | None:
        """Where the engine is reached, also after somebody removed its socket's file."""
        return self.body.address if self._socket is None else self._socket.address

    @property
    def going_since(self) -> float:
        """When its end began: our first signal, or its death (monotonic seconds)."""
        return clock.monotonic() if self._going_since is None else self._going_since

    def _goes(self) -> None:
        if self._going_since is None:
            self._going_since = clock.monotonic()

    def terminate(self) -> None:
        """TERM to its main process, once."""
        self._goes()
        self.body.child.terminate()

    def kill(self) -> None:
        """KILL to every process of it that is there just now."""
        self._goes()
        if isinstance(self.body.group, EngineGroup):
            self.body.group.kill()
        processes.kill(member.id for member in self.body.tree.remaining())

    async def read_out(self) -> None:
        """Wait until the end has been told and the output was read to its end, the latter within a bound.

        Call it when the main process is gone. No fact of this life comes after it.
        """
        await self._over.wait()
        await self._pump.drain_then_close(READ_OUT_WITHIN)

    def clear(self) -> leftovers.Removed:
        """Remove the shared memory that only this engine used; call it when its processes are gone."""
        if self._socket is not None:
            self._socket.close()
        return self._segments.remove_unused()

    def evidence(self) -> ExitEvidence:
        """What this life left to read about its end."""
        since = None if not self.ready or self._ended_at is None else self._ended_at - NEAR_THE_END
        block = self.log.error(since)
        space = leftovers.shm_space()
        killed = self.body.group.oom_kills() if isinstance(self.body.group, EngineGroup) else 0
        pids = {self.body.child.pid, *(one.pid for one in self._watched)}
        return ExitEvidence(
            first_error="" if block is None else "\n".join(block.lines),
            oom_kills=killed if isinstance(killed, int) else 0,
            kernel_log=self._memory.kernel_said(pids, self.going_since, self._ended_at or clock.monotonic()),
            unified_memory=self._memory.on,
            shm_used=None if space is None or not space.total else 1 - space.available / space.total,
        )

    # -- watchers ----------------------------------------------------------------------------------------------------

    def _pass_on(self, pieces: Sequence[bytes]) -> None:
        self._output_bytes += sum(map(len, pieces))
        self._forward(pieces)

    def _line(self, raw: str) -> None:
        with contained(self._line_fault):
            # Here, and nowhere later, a line loses its secrets: whatever keeps or quotes it has it from here.
            self._read(redact.text(plain(raw))[:LINE_CHARS])

    def _line_fault(self, fault: Exception) -> None:
        if not self._unreadable:
            self._unreadable = True
            self._on_fault(fault)

    def _read(self, line: str) -> None:
        now = clock.monotonic()
        self.log.add(line, now)
        if not self.ready:
            self.load.add(line, now)
            if self._activity.line(line):
                self._tell(facts.LoadProgressed())
        if says_dead(line):
            self._said_dead.set()

    async def _watch_tree(self, nursery: trio.Nursery) -> None:
        """See each of vLLM's own processes end at once, by its pidfd; new ones are looked for."""
        while True:
            self._look(nursery)
            await trio.sleep(LOOK_LATER if self.ready else LOOK_EVERY)

    def _look(self, nursery: trio.Nursery) -> None:
        """Watch the parts that are new, those too that ended before they were seen."""
        self._hold()
        members = self.body.tree.look()
        self._memory.engine_seen(member.id for member in members if not member.dead)
        self._memory.read_kernel_log()
        for member in members:
            if member.id not in self._watched and member.id != self.body.child.id and member.name.startswith(TITLES):
                self._watched[member.id] = member.name
                nursery.start_soon(self._watch_member, member)
        living = [member for member in members if not member.dead]
        self._living = [member.id.pid for member in living]
        if not self.ready:
            usage = {one.id: Usage(one.cpu_s, one.rss_bytes, io_bytes(one.id.pid)) for one in living}
            sign = self._activity.look(usage, self._output_bytes, clock.monotonic())
            if sign is not None:
                self._tell(facts.LoadProgressed(cpu_only=sign is Sign.CPU))

    async def _watch_segments(self) -> None:
        """Note the shared memory and the GPUs in its processes' hands, also just after it became ready."""
        while True:
            # Without a thread they are left: the look may take a second, and all requests would wait for it.
            found, devices = await in_thread(self._in_their_hands, self._living, instead=_nothing_seen)
            self._segments.note(found)
            self._memory.devices_seen(devices)
            if self.ready:
                await trio.sleep(SEGMENTS_EVERY)
            else:
                with trio.move_on_after(LOOK_EVERY):
                    await self._became_ready.wait()

    def _in_their_hands(self, pids: Sequence[int]) -> tuple[dict[str, int], frozenset[int]]:
        return self._segments.find(pids), self._memory.devices_in(pids)

    async def _watch_member(self, member: Member) -> None:
        await processes.watch(member.id)
        others = [one for one in self._watched if one != member.id and processes.ended(one)]
        named = tuple(f"{self._watched[one]} (pid {one.pid})" for one in others)
        self._tell(facts.MemberDied(member.id.pid, member.name, named))

    async def _watch_words(self) -> None:
        """An engine that says it is dead is asked once more: words alone, which a client may have chosen, end nothing."""
        while True:
            await self._said_dead.wait()
            await trio.sleep(DEAD_FOR)
            address = self.address
            if address is None or not (await engine_probe.health(address, timeout=HEALTH_WITHIN)).ok:
                break
            self._said_dead = trio.Event()
        self._tell(facts.ReportedDead(f"the engine said that it is dead and did not end within {DEAD_FOR:g} s"))

    async def _become_ready(self, readiness: Readiness, watchers: trio.Nursery) -> None:
        """Ask until the engine is ready; the start deadline, not this task, ends a load that leads nowhere."""
        if self.address is None:
            self._ready("it has no HTTP front to ask", watchers)
            return
        unready = Unready()
        while True:
            self._hold()
            check = await _ask(self.address, readiness)
            if check.check.ready:
                break
            if sentence := unready.look(check, clock.monotonic()):
                self._tell(facts.StaysUnready(sentence))
            await trio.sleep(ASK_EVERY if check.check is ReadyCheck.REFUSED else ASK_AGAIN)
        self._ready(check.sentence if check.check is ReadyCheck.UNPROVEN else "", watchers)

    def _hold(self) -> None:
        if self._socket is not None:
            self.socket_removed = not self._socket.hold()

    def _beacon_reports(self) -> bool:
        if self.body.beacon is None:
            return False
        reader = BeaconReader(self.body.beacon)
        try:
            return bool(reader.read())
        finally:
            reader.close()

    def _ready(self, note: str, watchers: trio.Nursery) -> None:
        if self.body.beacon_required and not self._beacon_reports():
            self._tell(facts.SpawnFailed("the engine reports no steps, and engine.beacon = require; set it to auto"))
            return
        self.ready = True
        self._look(watchers)
        self._became_ready.set()
        self._tell(facts.BecameReady(note))


async def _ask(address: Address, readiness: Readiness) -> ReadyResult:
    if readiness.probe:
        return await engine_probe.ready_check(address, readiness.api_key, request_id=readiness.request_id)
    reply = await engine_probe.health(address)
    if reply.reach is Reach.REFUSED:
        return ReadyResult(ReadyCheck.REFUSED, "the engine does not listen yet")
    if reply.ok or reply.status in NO_HEALTH_PATH:
        return ReadyResult(ReadyCheck.UNPROVEN, "no first request was asked for: engine.ready_probe is off")
    return ReadyResult(ReadyCheck.NOT_HEALTHY, "the engine listens, but is not healthy", reply.status)


def _nothing_seen() -> tuple[dict[str, int], frozenset[int]]:
    """Stand in for a look that there is no thread for."""
    return {}, frozenset()
