"""Memory, as the event loop sees it: decides whether it is guarded, opens the launch gate, and says what the guard did.

Rules:
* The guard's thread has killed before anything here runs; here it is told, once, and the lifecycle takes it from there.
* Low is admission's business alone: new work is refused, what is in flight goes on, nothing is restarted.
* Where the GPU has memory of its own everything here is off, and that is said once.
* Whatever is not allowed to us (locked pages, a lower OOM score, the kernel log) is said once and does without.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import trio

from vllm_supervisor.adapters import clock, last_ditch, nvidia, page_cache
from vllm_supervisor.adapters import neighbours as proc_neighbours
from vllm_supervisor.adapters.kernel_log import KernelLog
from vllm_supervisor.adapters.kill_list import KillList
from vllm_supervisor.adapters.memory import MemoryReader
from vllm_supervisor.adapters.threads import in_thread
from vllm_supervisor.core import facts, gpu_cards, kernel_lines, memory_gate, memory_mode, memory_view, neighbours
from vllm_supervisor.core.admission import Gate
from vllm_supervisor.core.facts import Fact
from vllm_supervisor.core.lifecycle import Node, State
from vllm_supervisor.core.memory import GuardPolicy, Level, gib, tell
from vllm_supervisor.core.memory_mode import GpuFacts, Mode
from vllm_supervisor.core.memory_view import MemoryPicture
from vllm_supervisor.core.orders import Record
from vllm_supervisor.core.proc import ProcessId
from vllm_supervisor.core.words import ClosedReason
from vllm_supervisor.runtime.memory_guard import GuardThread

ASK_WITHIN = 15.0  # seconds for the GPU's driver to say what it has
NEIGHBOURS_EVERY = 5.0
HISTORY_EVERY = 10.0
HISTORY_KEPT = 60  # ten minutes


@dataclass(frozen=True, slots=True)
class MemoryWorld:
    """What the composition root has made. `mode` None: the driver is asked, by `ask_driver` in a thread."""

    mode: Mode | None
    policy: GuardPolicy
    reader: MemoryReader  # the event loop's
    guard_reader: MemoryReader
    kernel_log: KernelLog  # the guard's
    evidence_log: KernelLog  # for what is read about an ended engine
    kill_list: KillList
    ask_driver: Callable[[], GpuFacts]
    gpu_processes: Callable[[], dict[int, int]]  # bytes by pid, as the driver tells; to be called in a thread
    engine_environ: Mapping[str, str]  # what says which cards an engine may use
    proc: Path
    evict: Path | None  # the model's files, if their page cache is to be given back before a start
    drop_caches: bool


class MemoryKeeper:
    """One for the supervisor's life; owned by the event loop."""

    def __init__(
        self,
        world: MemoryWorld,
        *,
        nursery: trio.Nursery,
        state: Callable[[], State],
        gate: Gate,
        tell: Callable[[Fact], None],
        record: Callable[[Record], None],
    ) -> None:
        """Nothing is looked at yet."""
        self.mode = world.mode
        self.waiting: str | None = None  # what the launch gate waits for
        self._world = world
        self._nursery = nursery
        self._state = state
        self._gate = gate
        self._tell = tell
        self._record = record
        self._known = trio.Event()
        self._guard: GuardThread | None = None
        self._told = 0  # the incarnation whose end by the guard was told
        self._level = Level.NORMAL
        self._before: int | None = None  # available before the last engine
        self._neighbours: tuple[neighbours.Neighbour, ...] = ()  # who holds most while a start waits
        self._cards: tuple[gpu_cards.Card, ...] = ()
        self._opened: frozenset[int] = frozenset()  # device files of cards in the engine's hands so far
        self._history: deque[tuple[float, int]] = deque(maxlen=HISTORY_KEPT)

    @property
    def on(self) -> bool:
        """Whether this machine's memory is guarded."""
        return self.mode is not None and self.mode.on

    async def run(self) -> None:
        """Find out what this machine is; where it is to be guarded, guard it until cancelled."""
        self._nursery.start_soon(self._warn_of_servers)
        if self.mode is None:
            self.mode = await self._ask()
        self._say("memory_guard", self.mode.sentence)
        if not self.mode.on:
            self._known.set()
            return
        self._guard = self._prepare()
        self._guard.start()
        self._known.set()
        try:
            while True:
                if self._guard.reading is not None:
                    self._history.append((clock.monotonic(), self._guard.reading.available))
                await trio.sleep(HISTORY_EVERY)
        finally:
            self._guard.stop()

    async def _ask(self) -> Mode:
        with trio.move_on_after(ASK_WITHIN):
            return memory_mode.by_driver(await in_thread(self._world.ask_driver))
        return memory_mode.by_driver(GpuFacts(None, "", f"its driver did not answer within {ASK_WITHIN:g} s"))

    def _prepare(self) -> GuardThread:
        world, token = self._world, trio.lowlevel.current_trio_token()

        def on_news() -> None:
            try:
                token.run_sync_soon(self.hear, idempotent=True)
            except trio.RunFinishedError:
                return

        problems = (last_ditch.lock_memory(), last_ditch.spare_us(), world.kernel_log.problem)
        if missing := "; ".join(filter(None, problems)):
            self._say("memory_guard_limits", f"the memory guard does without: {missing}", "warning")
        return GuardThread(world.guard_reader, world.kernel_log, world.kill_list, world.policy, on_news)

    # -- what the guard saw ------------------------------------------------------------------------------------------

    def hear(self) -> None:
        """Tell what the guard did and saw since the last call. Raises its fault, if it has ended by one."""
        guard = self._guard
        if guard is None:
            return
        if guard.fault is not None:
            raise guard.fault
        shot = guard.shot
        if shot is not None and shot.incarnation != self._told:
            self._told = shot.incarnation
            sentence = tell(shot.state, shot.reading, self._world.policy)
            self._tell(
                facts.MemoryFloor(shot.incarnation, f"{sentence}; KILL went out after {shot.took * 1000:.1f} ms")
            )
        state, reading = guard.state, guard.reading
        if reading is None or state.level is self._level:
            return
        self._level = state.level
        sentence = tell(state, reading, self._world.policy)
        level = "info" if state.level is Level.NORMAL else "warning"
        if state.level is Level.NORMAL:
            self._gate.reopen(ClosedReason.MEMORY)
        else:
            self._gate.close(ClosedReason.MEMORY, sentence)
        # `t` is when it was seen, in the monotonic seconds of the ledgers.
        numbers = (("t", reading.at), ("available_bytes", reading.available))
        self._record(Record(f"memory_{state.level.value}", sentence, numbers, level=level))

    def _say(self, event: str, sentence: str, level: str = "info") -> None:
        self._record(Record(event, sentence, level=level))

    # -- the engine's life -------------------------------------------------------------------------------------------

    def engine_began(self, incarnation: int, main: ProcessId, group: Path | None) -> None:
        """Aim at a new engine, and have the kernel prefer it."""
        self._cards, self._opened = nvidia.cards(self._world.proc), frozenset()
        if self._guard is None:
            return
        self._guard.minimum = None
        self._world.kill_list.begin(incarnation, main, group)
        if problem := last_ditch.prefer_engine(main.pid):
            self._say("memory_guard_limits", problem, "warning")

    def engine_seen(self, processes: Iterable[ProcessId]) -> None:
        """Aim at the processes it has now."""
        if self._guard is not None:
            self._world.kill_list.aim(processes)

    def read_kernel_log(self) -> None:
        """Read what the kernel has said by now; every few seconds, so that each line gets the right stamp."""
        self._world.evidence_log.look()

    def devices_in(self, pids: Iterable[int]) -> frozenset[int]:
        """Return which cards' device files these processes hold open; to be called in a thread."""
        return nvidia.opened(pids) if self._cards else frozenset()

    def devices_seen(self, minors: frozenset[int]) -> None:
        """Remember what `devices_in` has found."""
        self._opened |= minors

    def engine_gone(self) -> None:
        """Aim at nobody."""
        self._world.kill_list.clear()

    def kernel_said(self, pids: Iterable[int], began: float, over: float) -> str:
        """Return the kernel's lines since the last call that are evidence about an end (core/kernel_lines.py).

        `began` and `over` are monotonic seconds: our first signal or its death, and its death.
        """
        world, guard = self._world, self._guard
        end = kernel_lines.End(
            began,
            over,
            frozenset(pids) if world.evidence_log.our_pids else frozenset(),
            gpu_cards.used(self._cards, world.engine_environ, opened=self._opened, present=nvidia.present()),
            None if guard is None else guard.state.tight_at,
        )
        return kernel_lines.evidence(world.evidence_log.take(), end)

    # -- the launch gate ---------------------------------------------------------------------------------------------

    def await_memory(self, until: float) -> None:
        """Begin to wait, until the moment `until` at most; tells MemoryBack or MemoryShort."""
        self._nursery.start_soon(self._await_memory, until)

    async def _await_memory(self, until: float) -> None:
        await self._known.wait()
        if self._guard is not None:
            await self._give_back_cache()
        async with trio.open_nursery() as nursery:
            await self._wait_at_the_gate(until, nursery)
            nursery.cancel_scope.cancel()
        self.waiting = None

    async def _wait_at_the_gate(self, until: float, nursery: trio.Nursery) -> None:
        since, still = clock.monotonic(), None
        said = False
        self._neighbours = ()
        while self._state().node is Node.GATING:
            reading = None if self._guard is None else self._guard.reading
            if reading is None:  # nobody guards here, or the files cannot be read: then nothing is known
                self._tell(facts.MemoryBack())
                return
            still = memory_gate.follow(still, reading)
            wait = memory_gate.Wait(since, until, self._before, self._state().measure_now, self._neighbours)
            match memory_gate.decide(reading, wait, still, self._world.policy):
                case memory_gate.Open(note):
                    self._before = reading.available
                    if note:
                        self._say("memory_below", note, "warning")
                    elif said:
                        waited = f"{gib(reading.available)} available after {clock.monotonic() - since:.1f} s"
                        self._say("memory_back", f"memory is back: {waited}")
                    self._tell(facts.MemoryBack())
                    return
                case memory_gate.TooLittle(sentence, lost):
                    self._tell(facts.MemoryShort(sentence, lost))
                    return
                case memory_gate.Waiting(sentence):
                    self.waiting = sentence
                    if not said:
                        said = True
                        self._say("memory_wait", sentence, "warning")
                        nursery.start_soon(self._watch_neighbours)
            await trio.sleep(self._world.policy.interval)

    async def _watch_neighbours(self) -> None:
        """Keep in mind who holds memory while a start waits for it."""
        while True:
            processes, on_gpu = await in_thread(self._look_around, instead=_nobody)
            self._neighbours = neighbours.biggest(processes, os.getpid(), on_gpu)
            await trio.sleep(NEIGHBOURS_EVERY)

    async def _warn_of_servers(self) -> None:
        """Say once which vLLM servers run here that nobody supervises: they take the memory, or the port, of ours."""
        processes, on_gpu = await in_thread(self._look_around, instead=_nobody)
        for server in neighbours.bare_servers(processes, os.getpid(), on_gpu):
            self._say(
                "bare_vllm", f"{server} runs on this machine without a supervisor; {neighbours.REMEDY}", "warning"
            )

    def _look_around(self) -> tuple[list[neighbours.Process], dict[int, int]]:
        return proc_neighbours.look(self._world.proc), self._world.gpu_processes()

    async def _give_back_cache(self) -> None:
        """Before a start: the model's files, or the whole cache, as configured."""
        world = self._world
        if world.evict is None and not world.drop_caches:
            return
        before = world.reader.read()
        parts = []
        if world.evict is not None:
            files, size = await in_thread(page_cache.evict, world.evict)
            parts.append(f"of {files} files of the model ({gib(size)})")
        if world.drop_caches:
            problem = await in_thread(page_cache.drop_all, world.proc)
            parts.append(problem or "of the whole machine")
        after = world.reader.read()
        sentence = f"page cache given back {' and '.join(parts)}"
        if before is not None and after is not None:
            sentence += f": cached {gib(before.cached)} before, {gib(after.cached)} after"
        self._say("page_cache", sentence)

    # -- what others show --------------------------------------------------------------------------------------------

    def picture(self) -> MemoryPicture:
        """The moment, for status and metrics; without a guard it looks for itself."""
        guard = self._guard
        if guard is None:
            return MemoryPicture(self.mode, self._world.policy, self._world.reader.read())
        return MemoryPicture(
            self.mode,
            self._world.policy,
            guard.reading,
            guard.state,
            guard.minimum,
            self.waiting,
            tuple(self._history),
        )

    def recent(self) -> list[dict[str, float | None]]:
        """The looks of the last minute, for an incident's bundle; empty where nobody guards."""
        return [] if self._guard is None else memory_view.looks(list(self._guard.recent), clock.monotonic())


def _nobody() -> tuple[list[neighbours.Process], dict[int, int]]:
    """Stand in for a look that there is no thread for."""
    return [], {}
