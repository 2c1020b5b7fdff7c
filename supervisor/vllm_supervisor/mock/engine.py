"""The engine of the stand-in: schedulers driven at a set rate, one step at a time, through their child processes.

Rules:
* Every step makes a round trip through EngineCore and Worker, so stopping (SIGSTOP) or killing either does to this
  engine what it does to vLLM's.
* Faults act between a step's begin and end. A change of faults or of the queue wakes whoever waits; nothing polls.
* Tokens that a client has not taken are merged into its next piece, so nothing grows without bound.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Protocol

import trio

from vllm_supervisor.mock.faults import FaultSet
from vllm_supervisor.mock.options import Options
from vllm_supervisor.mock.scheduler import Core, Sequence
from vllm_supervisor.mock.stats import Stats

WORDS = [
    "the",
    "stand",
    "in",
    "engine",
    "answers",
    "with",
    "plain",
    "words",
    "at",
    "a",
    "steady",
    "rate",
    "and",
    "stops",
    "when",
    "it",
    "has",
    "said",
    "enough",
]


class EngineDeadError(Exception):
    """EngineCore is gone; vLLM's answer to every request from then on."""


class ShutdownError(Exception):
    """A request came after TERM."""


class Link(Protocol):
    """The way to one EngineCore process."""

    async def beat(self) -> None:
        """One round trip through EngineCore and Worker; raise EngineDeadError when it is cut."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a request asks of the engine: the prompts' lengths in tokens, choices a prompt, tokens a choice."""

    prompts: tuple[int, ...]
    max_tokens: int
    n: int = 1
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one choice, and its finish_reason when it was the last."""

    choice: int
    text: str
    finish: str | None


@dataclass(slots=True, eq=False)
class Generation:
    """One request in the engine: its sequences and the pieces nobody has taken yet."""

    core: Core
    sequences: list[Sequence]
    prompt_tokens: int
    _ready: dict[int, Piece] = field(default_factory=dict)
    _event: trio.Event = field(default_factory=trio.Event)
    _error: Exception | None = None

    def put(self, sequence: Sequence, text: str) -> None:
        """Add a token's text, or an end, to what waits for the client."""
        before = self._ready.get(sequence.choice)
        self._ready[sequence.choice] = Piece(sequence.choice, (before.text if before else "") + text, sequence.finish)
        self._event.set()

    def fail(self, error: Exception) -> None:
        """Let the next take raise."""
        self._error = error
        self._event.set()

    async def take(self) -> list[Piece]:
        """Wait for pieces and take them, one for each choice that moved. Raise EngineDeadError when none can come."""
        await self._event.wait()
        if self._error is not None:
            raise self._error
        pieces = list(self._ready.values())
        self._ready.clear()
        self._event = trio.Event()
        return pieces

    @property
    def done(self) -> bool:
        """Whether every choice has ended and been taken."""
        return not self._ready and all(sequence.finish is not None for sequence in self.sequences)

    @property
    def made(self) -> int:
        """Tokens made so far, all choices together."""
        return sum(sequence.made for sequence in self.sequences)


class Engine:
    """Everything behind the HTTP layer: the schedulers, their links, what is open, and whether it is alive."""

    def __init__(self, options: Options, faults: FaultSet) -> None:
        """Build the schedulers, one for each data-parallel engine; nothing runs before `run`."""
        self.options = options
        self.faults = faults
        self.dead = False
        self.refusing = False
        self.frozen = False
        self.sleep_level = 0
        self.paused = False
        self.answered = 0
        self.cores = [
            Core(index, options.max_num_seqs, options.max_num_batched_tokens, Stats(options.max_model_len))
            for index in range(max(1, options.engines))
        ]
        self._open: dict[Sequence, Generation] = {}
        self._changed = trio.Event()
        faults.subscribe(self._fault_changed)

    # -- what the HTTP layer does ------------------------------------------------------------------------------

    def submit(self, work: Work) -> Generation:
        """Queue a request. Raise EngineDeadError or ShutdownError when it cannot run."""
        if self.dead:
            raise EngineDeadError
        if self.refusing:
            raise ShutdownError
        now = trio.current_time()
        core = min(self.cores, key=lambda core: len(core.waiting) + len(core.running))
        stop = None if work.ignore_eos else max(1, self.options.answer_tokens)
        sequences = [
            Sequence(choice, tokens, work.max_tokens, stop, now, work.n)
            for choice, tokens in enumerate(tokens for tokens in work.prompts for _ in range(work.n))
        ]
        generation = Generation(core, sequences, sum(work.prompts))
        for sequence in sequences:
            core.add(sequence)
            self._open[sequence] = generation
        self.wake()
        return generation

    def leave(self, generation: Generation) -> None:
        """Take leave of a request whose answer or client ended: what still runs is aborted, unless a fault keeps it."""
        if not self.faults.on("keep_running"):
            for sequence in generation.sequences:
                self._forget(sequence)
                generation.core.abort(sequence)
            self.wake()

    def abort(self, generation: Generation) -> None:
        """Abort a request in the engine; its unfinished choices end with finish_reason abort."""
        for sequence in generation.sequences:
            generation.core.abort(sequence)
            self._forget(sequence)
        self.wake()

    def abort_all(self) -> None:
        """Abort what is open, as TERM does; clients read finish_reason abort."""
        for sequence, generation in list(self._open.items()):
            generation.core.abort(sequence)
            generation.put(sequence, "")
            self._forget(sequence)
        self.wake()

    def die(self) -> None:
        """EngineCore is gone: every open request fails, every later one too."""
        self.dead = True
        for generation in self._open.values():
            generation.fail(EngineDeadError())
        self._open.clear()
        self.wake()

    @property
    def open_requests(self) -> int:
        """Sequences that have not ended."""
        return len(self._open)

    @property
    def asleep(self) -> int:
        """The level of sleep, 0 when awake."""
        return self.faults.count("asleep") or self.sleep_level

    @property
    def is_paused(self) -> bool:
        """Whether scheduling is paused."""
        return self.paused or self.faults.on("paused")

    def wake(self) -> None:
        """Something changed: let every waiter look again."""
        self._changed.set()
        self._changed = trio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds()`; looked at again after each change."""
        while not holds():
            await self._changed.wait()

    async def hold(self, fault: str) -> None:
        """Wait as long as a SECONDS fault says, no longer than it is on."""
        with trio.move_on_after(self.faults.seconds(fault)):
            await self.until(lambda: not self.faults.on(fault))

    def _forget(self, sequence: Sequence) -> None:
        self._open.pop(sequence, None)

    def _fault_changed(self, name: str) -> None:
        if name == "stale_gauges":
            for core in self.cores:
                core.frozen = self.faults.on(name)
        self.wake()

    # -- what drives it ----------------------------------------------------------------------------------------

    async def run(self, links: Ordered[Link]) -> None:
        """Drive every scheduler until cancelled; a cut link ends that engine's steps for good."""
        async with trio.open_nursery() as nursery:
            for core, link in zip(self.cores, links, strict=True):
                nursery.start_soon(self._drive, core, link)

    async def _drive(self, core: Core, link: Link) -> None:
        due = 0.0
        idle = True
        while True:
            if not self._may_step(core):
                core.refresh()
                idle = idle or not core.busy
                await self._changed.wait()
                continue
            batch = core.begin(trio.current_time(), admit=self._may_admit(core))
            if idle:
                await self.until(lambda: not self.faults.hits("hang_first_step", core.index))
            await self.until(lambda: not (self.faults.hits("hang_steps", core.index) or self.frozen))
            idle = False
            if batch.first_prefill:
                await self.hold("long_prefill")
            due = max(due + 1 / self.options.tokens_per_second, trio.current_time())
            await trio.sleep_until(due)
            try:
                await link.beat()
            except EngineDeadError:
                return
            finishing = not self.faults.on("never_finish")
            outputs = core.end(batch, trio.current_time(), finish=finishing)
            for sequence, generation in self._outputs(outputs if finishing else []):
                generation.put(sequence, _word(sequence.made))
                if sequence.finish is not None:
                    self._forget(sequence)
            if not core.busy:
                idle = True
                self.wake()

    def _outputs(self, sequences: list[Sequence]) -> Iterator[tuple[Sequence, Generation]]:
        for sequence in sequences:
            generation = self._open.get(sequence)
            if generation is not None:
                yield sequence, generation

    def _may_admit(self, core: Core) -> bool:
        return not self.faults.hits("hang_scheduling", core.index)

    def _may_step(self, core: Core) -> bool:
        if self.dead or self.asleep or self.is_paused:
            return False
        return bool(core.running) or (bool(core.waiting) and self._may_admit(core))


def _word(number: int) -> str:
    """Give the text of the token with this number, from 1."""
    word = WORDS[(number - 1) % len(WORDS)]
    return word if number == 1 else " " + word
