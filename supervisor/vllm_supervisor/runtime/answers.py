"""What the public address, the service manager and `timeouts` show of the moment: answers from memory."""

import random
from collections.abc import Callable

from vllm_supervisor.adapters import clock
from vllm_supervisor.core import drain_report, timeouts
from vllm_supervisor.core.admission import DEFAULT_SENTENCES, Gate, Rejection
from vllm_supervisor.core.lifecycle import Node, State, engine_state
from vllm_supervisor.core.retry_after import retry_after
from vllm_supervisor.core.timeouts import Limits
from vllm_supervisor.core.view import View
from vllm_supervisor.core.words import ClosedReason
from vllm_supervisor.runtime.incarnation import Incarnation
from vllm_supervisor.runtime.watch import UNREADY, Watch


class Answers:
    """Holds only references to what others own."""

    def __init__(
        self,
        *,
        state: Callable[[], State],
        gate: Gate,
        watch: Watch,
        current: Callable[[], Incarnation | None],
        background: Callable[[], int],
        limits: Limits,
        waits_for: Callable[[], str | None],
    ) -> None:
        """`background` counts the answered requests that run on in the engine; `limits` are those of a stop.

        `waits_for` says what a start waits for, if it does.
        """
        self._state = state
        self._gate = gate
        self._watch = watch
        self._current = current
        self._background = background
        self._limits = limits
        self._waits_for = waits_for

    def view(self) -> View:
        """The state of the moment as the public address shows it."""
        state = self._state()
        judged = self._watch.judgement
        unwell = judged.sentence if judged is not None and judged.verdict in UNREADY else ""
        ready = self._gate.reason is None and state.node is Node.READY and not unwell
        # Fixed words and numbers of ours: what the engine or an operator wrote is not for everybody.
        reason = "" if ready else self._gate.sentence or unwell or DEFAULT_SENTENCES[ClosedReason.RESTARTING]
        if state.node is Node.STARTING and state.public_problem:
            reason = f"{reason}; {state.public_problem}"
        return View(state.phase, engine_state(state), reason, ready, state.started)

    def retry_after(self, rejection: Rejection) -> int:
        """Whole seconds a refused client should wait, from what the last load took or the stop has left."""
        state, now = self._state(), clock.monotonic()
        remaining = None
        if state.leaving:
            remaining = state.drain.deadline - now if state.drain.deadline is not None else None
        elif state.load_s is not None:
            loading = state.node is Node.STARTING and state.spawned_at is not None
            remaining = state.load_s - (now - (state.spawned_at or now) if loading else 0.0)
        return retry_after(rejection, remaining, random.random())  # noqa: S311 - spreads a crowd, guards nothing

    def sentence(self, state: State) -> str:
        """One line for `systemctl status`."""
        if state.give_up_status is not None:
            return f"gave up: {state.public_problem or state.problem}"
        if state.leaving:
            return self._drain_sentence(state)
        current = self._current()
        if state.node is Node.STARTING and current is not None:
            shown = current.load.show(clock.monotonic() - current.started_at, None, 120)
            return f"{state.public_problem}; {shown}" if state.public_problem else shown
        if waiting := self._waits_for():
            return waiting
        if state.problem:
            return f"{engine_state(state).value}: {state.public_problem or state.problem}"
        return f"{engine_state(state).value}, {self._gate.in_flight} in flight"

    def draining(self) -> str | None:
        """How a drain stands, for people who watch; None when a drain without a stop waits for nothing."""
        state = self._state()
        waits = state.leaving or self._gate.in_flight or self._background()
        return self._drain_sentence(state) if waits else None

    def _drain_sentence(self, state: State) -> str:
        now, oldest = clock.monotonic(), self._gate.oldest()
        return drain_report.progress(
            state.drain,
            now,
            in_flight=self._gate.in_flight,
            oldest_s=None if oldest is None else now - oldest,
            background=self._background(),
        )

    def timeouts(self) -> dict[str, object]:
        """The responsibility matrix, of the stop that is under way or of the one that would begin now."""
        limits = self._limits
        state = self._state().drain
        return timeouts.as_json(limits, state.budget if state.stops else timeouts.plan(limits))
