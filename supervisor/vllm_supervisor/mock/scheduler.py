"""One engine's scheduler as plain state: who waits, who runs, what a step does. No clock, no I/O.

Rules:
* A step begins (waiting requests are admitted up to `max_num_seqs`, tokens are shared out) and ends (tokens exist).
  Between the two the engine may hang; nothing that is counted moves before the end.
* A prompt is computed in chunks of at most `max_num_batched_tokens` a step. As in vLLM, a step that only computes
  prompts has no outputs, so `iteration_tokens_total` does not count it.
* Gauges are refreshed when a step ends, or when the engine says that it has nothing to do.
"""

from collections import deque
from dataclasses import dataclass, field

from vllm_supervisor.mock.stats import Gauges, Stats

KV_TOKENS = 65_536  # tokens the pretended KV cache holds


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request. Times are monotonic seconds; `finish` is vLLM's finish_reason once it has ended."""

    choice: int
    prompt_tokens: int
    max_tokens: int
    stop_after: int | None  # tokens after which it stops by itself; None: never
    arrived: float
    n: int = 1
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    computed: int = 0
    made: int = 0
    finish: str | None = None


@dataclass(slots=True)
class Batch:
    """One step's work: each sequence with the number of its tokens computed in this step."""

    work: list[tuple[Sequence, int]]

    @property
    def first_prefill(self) -> bool:
        """Whether a prompt is begun in this step."""
        return any(sequence.computed == 0 for sequence, _ in self.work)


@dataclass(slots=True)
class Core:
    """The scheduler of engine number `index`."""

    index: int
    max_num_seqs: int
    max_num_batched_tokens: int
    stats: Stats
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    frozen: bool = False  # gauges keep their values

    def add(self, sequence: Sequence) -> None:
        """Take a new sequence into the queue."""
        self.waiting.append(sequence)

    def begin(self, now: float, *, admit: bool = True) -> Batch:
        """Begin a step; an empty batch means that there is nothing to do. With `admit` off nobody leaves waiting."""
        while admit and self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting.popleft()
            sequence.started = now
            self.stats.prefix_queries += sequence.prompt_tokens
            self.running.append(sequence)
        budget = max(1, self.max_num_batched_tokens)
        work = []
        for sequence in self.running:
            tokens = min(max(1, sequence.prompt_tokens - sequence.computed), budget)
            if tokens:
                work.append((sequence, tokens))
                budget -= tokens
        return Batch(work)

    def end(self, batch: Batch, now: float, *, finish: bool = True) -> list[Sequence]:
        """End a step; return the sequences that got one token each. With `finish` off none of them ever completes."""
        outputs: list[Sequence] = []
        tokens = 0
        for sequence, computed in batch.work:
            if sequence.finish is not None:
                continue
            sequence.computed += computed
            if sequence.computed < sequence.prompt_tokens:
                continue
            outputs.append(sequence)
            tokens += self._token(sequence, computed, now)
            if finish:
                self._finish_if_done(sequence, now)
        if outputs:
            self.stats.observe("iteration_tokens_total", tokens)
        self.refresh()
        return outputs

    def _token(self, sequence: Sequence, computed: int, now: float) -> int:
        stats = self.stats
        sequence.made += 1
        stats.generation_tokens += 1
        if sequence.first_token is None:
            sequence.first_token = now
            stats.prompt_tokens += sequence.prompt_tokens
            stats.observe("time_to_first_token_seconds", now - sequence.arrived)
        elif sequence.last_token is not None:
            stats.observe("inter_token_latency_seconds", now - sequence.last_token)
        sequence.last_token = now
        return computed

    def _finish_if_done(self, sequence: Sequence, now: float) -> None:
        if sequence.stop_after is not None and sequence.made >= sequence.stop_after:
            sequence.finish = "stop"
        elif sequence.made >= sequence.max_tokens:
            sequence.finish = "length"
        else:
            return
        self.running.remove(sequence)
        stats = self.stats
        stats.finished[sequence.finish] += 1
        started = sequence.arrived if sequence.started is None else sequence.started
        first = started if sequence.first_token is None else sequence.first_token
        for name, value in (
            ("request_prompt_tokens", sequence.prompt_tokens),
            ("request_generation_tokens", sequence.made),
            ("request_max_num_generation_tokens", sequence.made),
            ("request_params_n", sequence.n),
            ("request_params_max_tokens", sequence.max_tokens),
            ("request_time_per_output_token_seconds", (now - first) / max(1, sequence.made - 1)),
            ("e2e_request_latency_seconds", now - sequence.arrived),
            ("request_queue_time_seconds", started - sequence.arrived),
            ("request_inference_time_seconds", now - started),
            ("request_prefill_time_seconds", first - started),
            ("request_decode_time_seconds", now - first),
            ("request_num_preemptions", 0),
            ("request_prefill_kv_computed_tokens", sequence.prompt_tokens),
        ):
            stats.observe(name, value)

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence that has not ended; as in vLLM this is no finished request in the counters."""
        if sequence.finish is not None:
            return
        sequence.finish = "abort"
        (self.running if sequence in self.running else self.waiting).remove(sequence)

    @property
    def busy(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def refresh(self) -> None:
        """Write the gauges, as an engine message does."""
        if not self.frozen:
            held = sum(sequence.computed for sequence in self.running)
            self.stats.gauges = Gauges(len(self.running), len(self.waiting), min(1.0, held / KV_TOKENS))
