"""Evidence bundles: what can be seen of the engine at a bad moment, written before anything touches it.

Rules:
* A bundle of the lifecycle's is always written, and `EvidenceSaved` told after it, whatever became of it.
* An engine that nobody has judged yet is looked at first: a bundle never says less than the status.
* Of bundles asked for by QUIT one is written at a time: signals may come faster than bundles are written.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import trio

from vllm_supervisor.adapters import child, clock, evidence
from vllm_supervisor.adapters.evidence import Starter
from vllm_supervisor.core import facts, incident
from vllm_supervisor.core.admission import Gate
from vllm_supervisor.core.facts import Fact
from vllm_supervisor.runtime.engine_room import EngineRoom
from vllm_supervisor.runtime.watch import Watch


class Incidents:
    """Writes them into one directory, bounded in number and size."""

    def __init__(
        self,
        root: Path,
        *,
        run: str,
        gate: Gate,
        room: EngineRoom,
        watch: Watch,
        nursery: trio.Nursery,
        tell: Callable[[Fact], None],
        say: Callable[[str, str, str], None],
        memory: Callable[[], Sequence[Mapping[str, Any]]],
        search_path: str,
        keep: int,
        max_size: int,
    ) -> None:
        """`memory` gives the last looks at the machine's memory; `search_path` is where py-spy and nvidia-smi are looked for; `max_size` in bytes; `say` takes event, sentence, level.

        In `nursery` bundles are written, and tools that hang waited for.
        """
        self._root = root
        self._run = run
        self._gate = gate
        self._room = room
        self._watch = watch
        self._memory = memory
        self._nursery = nursery
        self._tell = tell
        self._say = say
        self._starter = Starter(_spawn, nursery.start_soon)
        self._search_path = search_path
        self._keep = keep
        self._max_size = max_size
        self._for_quit = False
        if problem := evidence.tidy(root):
            say("incident_gaps", f"no evidence bundle can be written: {problem}", "warning")

    def save(self, cause: str) -> None:
        """Write a bundle for the lifecycle, then tell `EvidenceSaved`."""
        self._nursery.start_soon(self._save, cause)

    def on_quit(self, cause: str) -> None:
        """Write a bundle that a person asked for."""
        if self._for_quit:
            self._say("incident", "a bundle that QUIT asked for is being written already", "info")
        else:
            self._for_quit = True
            self._nursery.start_soon(self._on_quit, cause)

    async def _save(self, cause: str) -> None:
        await self._write(cause)
        self._tell(facts.EvidenceSaved())

    async def _on_quit(self, cause: str) -> None:
        await self._write(cause)
        self._for_quit = False

    async def _write(self, cause: str) -> None:
        """Write one bundle about the engine of the moment; say where it is and what could not be had."""
        judgement = await self._watch.judged()
        current = self._room.current
        block = None if current is None else current.log.error()
        document = incident.document(
            cause=cause,
            at=clock.stamp(),
            run=self._run,
            incarnation=0 if current is None else current.body.number,
            judgement=judgement,
            samples=list(self._watch.samples),
            requests=self._gate.open.values(),
            lines=[] if current is None else current.log.tail(),
            first_error=[] if block is None else block.lines,
            memory=self._memory(),
        )
        pids = [] if current is None else [member.id.pid for member in current.body.tree.remaining()]
        written = await evidence.write_bundle(
            self._root,
            document,
            pids,
            search_path=self._search_path,
            starter=self._starter,
            keep=self._keep,
            max_size=self._max_size,
        )
        said = incident.summary(written.number, cause, judgement)
        gaps = "; ".join(written.problems)
        if not written.number:
            self._say("incident", f"{said}; nothing was saved in {written.path}: {gaps}", "warning")
            return
        self._say("incident", f"{said}; see {written.path}", "warning")
        if gaps:
            self._say("incident_gaps", gaps, "warning" if written.unwritten else "info")


def _spawn(argv: Sequence[str], env: Mapping[str, str]) -> child.Child:
    try:
        return child.spawn(argv, env)
    except child.SpawnError as fault:
        raise OSError(fault.errno, os.strerror(fault.errno)) from fault
