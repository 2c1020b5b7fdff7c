"""One life of the engine: its process, its tree, its output and its way to readiness.

Rules:
* What is seen becomes a fact; nothing is decided here.
* Everything that watches ends with the main process; the output is read to its end after that, within a bound.
* Progress of a load is what a person could see: a line not seen before, or bytes read from disk. CPU seconds alone are
  none: a rank that waits for a dead peer burns them for ever.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import trio

from vllm_supervisor.adapters import engine_probe, processes
from vllm_supervisor.adapters.child import Child
from vllm_supervisor.adapters.processes import Member, Tree
from vllm_supervisor.adapters.pump import Pump
from vllm_supervisor.core import facts
from vllm_supervisor.core.address import Address
from vllm_supervisor.core.engine_log import EngineLog
from vllm_supervisor.core.facts import Fact
from vllm_supervisor.core.probe import Reach, ReadyCheck, ReadyResult
from vllm_supervisor.core.proc import ProcessId

TITLES = "VLLM::"  # what vLLM's processes call themselves; asked only of processes that are proven members
LOOK_EVERY = 1.0  # seconds between looks at a loading engine's tree
ASK_EVERY = 0.25  # seconds between ready checks while nobody listens
ASK_AGAIN = 1.0  # seconds between ready checks that were answered, but not well
NO_HEALTH_PATH = {404, 405}  # an OpenAI-compatible engine without /health is healthy when it answers at all
READ_OUT_WITHIN = 1.0  # seconds for the output of an ended engine to be read to its end


@dataclass(frozen=True, slots=True)
class Readiness:
    """How to find out that the engine is ready. `probe` off: /health alone decides."""

    probe: bool
    api_key: str | None
    request_id: str


class Incarnation:
    """A running engine, from its spawn to the last byte of its output."""

    def __init__(
        self,
        number: int,
        home: Path,
        child: Child,
        tree: Tree,
        address: Address | None,
        pump: Pump,
        log: EngineLog,
        tell: Callable[[Fact], None],
    ) -> None:
        """`home` is its private directory; `address` is where it will listen (None: it has no HTTP front); `tell` takes the facts."""
        self.number = number
        self.home = home
        self.child = child
        self.tree = tree
        self.address = address
        self.log = log
        self._pump = pump
        self._tell = tell
        self._watched: set[ProcessId] = set()
        self._ended = trio.Event()

    async def run(self, readiness: Readiness) -> None:
        """Watch over this life; returns when its main process has ended and its output was read."""
        async with trio.open_nursery() as output:
            output.start_soon(self._pump.run)
            async with trio.open_nursery() as watchers:
                watchers.start_soon(self._watch_tree, watchers)
                watchers.start_soon(self._become_ready, readiness)
                raw = await self.child.wait()
                watchers.cancel_scope.cancel()
            self._tell(facts.Exited(raw))
            self._ended.set()
            # What is left of the tree may hold the pipes open: the sweep ends it, and then this ends.

    def kill(self) -> None:
        """KILL to every process of it that is there just now."""
        processes.kill(member.id for member in self.tree.remaining())

    async def read_out(self) -> None:
        """Wait until the output has been read to its end (bounded), and the status taken."""
        await self._pump.drain_then_close(READ_OUT_WITHIN)

    async def _watch_tree(self, nursery: trio.Nursery) -> None:
        """See each of vLLM's own processes end at once, by its pidfd; new ones are looked for while it loads."""
        while True:
            for member in self.tree.look():
                if member.id not in self._watched and member.id != self.tree.main and member.name.startswith(TITLES):
                    self._watched.add(member.id)
                    nursery.start_soon(self._watch_member, member)
            await trio.sleep(LOOK_EVERY)

    async def _watch_member(self, member: Member) -> None:
        await processes.watch(member.id)
        self._watched.discard(member.id)
        self._tell(facts.MemberDied(member.id.pid, member.name))

    async def _become_ready(self, readiness: Readiness) -> None:
        """Ask until the engine is ready; the start deadline, not this task, ends a load that leads nowhere."""
        if self.address is None:
            self._tell(facts.BecameReady("it has no HTTP front to ask"))
            return
        while True:
            check = await self._ask(self.address, readiness)
            if check.check.ready:
                break
            await trio.sleep(ASK_EVERY if check.check is ReadyCheck.REFUSED else ASK_AGAIN)
        self._tell(facts.BecameReady(check.sentence if check.check is ReadyCheck.UNPROVEN else ""))

    async def _ask(self, address: Address, readiness: Readiness) -> ReadyResult:
        if readiness.probe:
            return await engine_probe.ready_check(address, readiness.api_key, request_id=readiness.request_id)
        reply = await engine_probe.health(address)
        if reply.reach is Reach.REFUSED:
            return ReadyResult(ReadyCheck.REFUSED, "the engine does not listen yet")
        if reply.ok or reply.status in NO_HEALTH_PATH:
            return ReadyResult(ReadyCheck.UNPROVEN, "healthy; no first request was asked for (engine.ready_probe is off)")
        return ReadyResult(ReadyCheck.NOT_HEALTHY, "the engine listens, but is not healthy", reply.status)
