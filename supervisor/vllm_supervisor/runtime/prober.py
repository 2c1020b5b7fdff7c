"""The one probe: sent and withdrawn on order, its state as a sample.

Rules:
* `start` marks the probe as in flight before anything is awaited, so that two orders can never make two probes.
* `withdraw` may be called from anywhere at any time, also before the first byte went out; the connection is closed.
  A withdrawn probe has neither been answered nor failed. The gate calls it with every admitted request.
* What a probe showed is kept as the last answer, the last failure, and the length of the row of failures.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import trio

from vllm_supervisor.core.probe import PROBE_ID_PREFIX, ProbeOutcome, ProbeResult
from vllm_supervisor.core.samples import ProbeSample

Send = Callable[[str], Awaitable[ProbeResult]]


class Prober:
    """Holds at most one probe in flight. Belongs to one incarnation: a new engine gets a new prober."""

    def __init__(self, send: Send, clock: Callable[[], float]) -> None:
        """`send(request_id)` asks the engine and waits for its answer; `clock` gives monotonic seconds."""
        self._send = send
        self._clock = clock
        self._scope: trio.CancelScope | None = None
        self.sample = ProbeSample()
        self.sent = 0
        self.last_at: float | None = None  # when the last probe was sent
        self.possible = True  # False once the engine said that it cannot be probed

    @property
    def probing(self) -> bool:
        """Whether a probe is in flight."""
        return self._scope is not None

    def start(self, nursery: trio.Nursery) -> None:
        """Send a probe in a task of `nursery`. With one in flight this is a fault and raises RuntimeError."""
        if self._scope is not None:
            raise RuntimeError("a probe is in flight already")
        self._scope = trio.CancelScope()
        self.sent += 1
        self.last_at = self._clock()
        self.sample = replace(self.sample, sent_at=self.last_at)
        nursery.start_soon(self._run, self._scope, f"{PROBE_ID_PREFIX}{self.sent}")

    def withdraw(self) -> None:
        """Take the probe back, if there is one; it is over when this returns."""
        if self._scope is not None:
            self._scope.cancel()
            self._scope = None
            self.sample = replace(self.sample, sent_at=None)

    async def _run(self, scope: trio.CancelScope, request_id: str) -> None:
        if scope.cancel_called:
            return  # withdrawn before this task had its first turn: nothing at all is sent
        with scope:
            result = await self._send(request_id)
            if self._scope is scope:
                self._ended(result)

    def _ended(self, result: ProbeResult) -> None:
        self._scope = None
        now = self._clock()
        self.sample = replace(self.sample, sent_at=None)
        if result.outcome is ProbeOutcome.ANSWERED:
            self.sample = replace(self.sample, answered_at=now, failures=0, failing_since=None)
        elif result.outcome.is_proof:
            since = now if self.sample.failing_since is None else self.sample.failing_since
            failures = self.sample.failures + 1
            self.sample = replace(self.sample, failed_at=now, failures=failures, failing_since=since)
        else:
            self.possible = False
