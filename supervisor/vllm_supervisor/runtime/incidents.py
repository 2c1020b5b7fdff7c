"""Evidence bundles: what can be seen of the engine at a bad moment, written before anything touches it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_supervisor.adapters import clock, evidence
from vllm_supervisor.core import incident
from vllm_supervisor.core.admission import Gate
from vllm_supervisor.core.health import Judgement, Memory, judge
from vllm_supervisor.core.samples import Observation
from vllm_supervisor.core.situation import HealthPolicy
from vllm_supervisor.runtime.incarnation import Incarnation
from vllm_supervisor.runtime.watch import Watch


class Incidents:
    """Writes them into one directory, bounded in number and size."""

    def __init__(
        self,
        root: Path,
        *,
        run: str,
        gate: Gate,
        watch: Watch,
        memory: Callable[[], Sequence[Mapping[str, Any]]],
        search_path: str,
        keep: int,
        max_size: int,
    ) -> None:
        """`memory` gives the last looks at the machine's memory; `search_path` is where py-spy and nvidia-smi are looked for; `max_size` in bytes."""
        self._root = root
        self._run = run
        self._gate = gate
        self._watch = watch
        self._memory = memory
        self._search_path = search_path
        self._keep = keep
        self._max_size = max_size

    async def write(self, cause: str, number: int, current: Incarnation | None) -> tuple[str, tuple[str, ...]]:
        """Write one bundle for incarnation `number`; return its summary line and what could not be had."""
        judgement = self._watch.judgement or _nothing_judged()
        block = None if current is None else current.log.error()
        document = incident.document(
            cause=cause,
            at=clock.stamp(),
            run=self._run,
            incarnation=number,
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
            keep=self._keep,
            max_size=self._max_size,
        )
        return incident.summary(written.number, cause, judgement), written.problems


def _nothing_judged() -> Judgement:
    """What is said of an engine that nobody has judged yet: that it starts."""
    _, judgement = judge(Memory(), Observation(at=clock.monotonic(), ready_at=None), HealthPolicy())
    return judgement
