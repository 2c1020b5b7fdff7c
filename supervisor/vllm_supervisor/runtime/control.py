"""The control socket's paths: reads answer from memory, actions become facts. No path here decides anything.

The protocol stands in `adapters/control_client`, which is its other end.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import trio
import trio.lowlevel

from vllm_supervisor.adapters import clock
from vllm_supervisor.adapters.control_server import Answer, Call, refusal
from vllm_supervisor.core import facts
from vllm_supervisor.core.admission import Gate
from vllm_supervisor.core.drain_report import stop_does
from vllm_supervisor.core.events import Events
from vllm_supervisor.core.facts import Fact
from vllm_supervisor.core.lifecycle import State
from vllm_supervisor.core.plain_text import one_line
from vllm_supervisor.core.words import verdict_line

MAX_EVENTS = 1000
MAX_WAIT = 365 * 24 * 3600.0  # seconds
LAST_WORDS = 0.5  # seconds at most for followers to take the last events before we end
LOOK_EVERY = 0.1  # seconds between looks for new events of a follower, and for a drain that ended


class Control:
    """Answers the calls; one for the supervisor's life."""

    def __init__(
        self,
        *,
        status: Callable[[], Mapping[str, Any]],
        state: Callable[[], State],
        timeouts: Callable[[], Mapping[str, object]],
        gate: Gate,
        background: Callable[[], int],
        cuts: Callable[[], tuple[int, int]],
        summary: Callable[[], Mapping[str, Any]],
        events: Events,
        tell: Callable[[Fact], None],
        say: Callable[[str, str], None],
        look_now: Callable[[], None],
        drain_budget: float,
        hook_budget: float,
    ) -> None:
        """`tell` takes facts; `say` notes an event (word, sentence), `look_now` has the engine judged.

        `background` counts the answered requests that run on in the engine; `cuts` those that the end of a drain has cut,
        in this run and, of these, by the end of a stop's; `summary` is this run's part of the ledgers.
        `drain_budget` in seconds is how long a drain is waited for, `hook_budget` how long by a hook, after which the
        rest of the stop still has to fit its outer limit.
        """
        self._status = status
        self._state = state
        self._timeouts = timeouts
        self._gate = gate
        self._background = background
        self._cuts = cuts
        self._summary = summary
        self._events = events
        self._tell = tell
        self._say = say
        self._look_now = look_now
        self._drain_budget = drain_budget
        self._hook_budget = hook_budget
        self._taken: dict[object, int] = {}  # by each follower of the events: the number of the last it was sent
        self._ended = False  # no further event comes
        self._calls: dict[tuple[str, str], Callable[[Call], Awaitable[Answer]]] = {
            ("GET", "/status"): self._get_status,
            ("GET", "/timeouts"): self._get_timeouts,
            ("GET", "/ledger/summary"): self._get_summary,
            ("GET", "/events"): self._get_events,
            ("POST", "/drain"): self._drain,
            ("POST", "/resume"): self._resume,
            ("POST", "/restart"): self._restart,
            ("POST", "/stop"): self._stop,
            ("POST", "/report"): self._report,
        }

    async def __call__(self, call: Call) -> Answer:
        """Answer one call."""
        handler = self._calls.get((call.method, call.path))
        if handler is not None:
            return await handler(call)
        taken = [method for method, path in self._calls if path == call.path]
        if taken:
            allow = ", ".join(["GET, HEAD" if method == "GET" else method for method in taken])
            return refusal(405, f"{call.path} does not take {call.method}; it takes {allow}", ("Allow", allow))
        return refusal(404, f"{call.path} is no path of the control socket")

    # -- reads -------------------------------------------------------------------------------------------------------

    async def _get_status(self, _call: Call) -> Answer:
        return Answer(200, self._status())

    async def _get_timeouts(self, _call: Call) -> Answer:
        return Answer(200, self._timeouts())

    async def _get_summary(self, _call: Call) -> Answer:
        return Answer(200, self._summary())

    async def _get_events(self, call: Call) -> Answer:
        text = call.query.get("n", "20")
        if not text.isdecimal():
            return refusal(400, f"n={text}: expected a whole number")
        newest = self._events.after(0, MAX_EVENTS if len(text) > len(str(MAX_EVENTS)) else min(int(text), MAX_EVENTS))
        follow = call.query.get("follow", "0")
        if follow not in ("0", "1"):
            return refusal(400, f"follow={follow}: expected 0 or 1")
        if follow == "1":
            return Answer(200, stream=self._follow(newest))
        return Answer(200, {"events": newest})

    async def _follow(self, newest: list[Mapping[str, Any]]) -> AsyncGenerator[Any]:
        follower, last = object(), self._events.last
        self._taken[follower] = last
        try:
            for event in newest:
                yield event
            while True:
                for event in self._events.after(last):
                    last = event["n"]
                    yield event
                self._taken[follower] = last
                if self._ended:
                    return
                await trio.sleep(LOOK_EVERY)
        finally:
            del self._taken[follower]

    async def last_words(self) -> None:
        """End the answer of all who follow, after the last event; one that takes nothing does not hold us."""
        self._ended = True
        with trio.move_on_after(LAST_WORDS):
            while self._taken:  # noqa: ASYNC110 - as in `_empty`
                await trio.sleep(LOOK_EVERY / 10)

    # -- actions -----------------------------------------------------------------------------------------------------

    async def _drain(self, call: Call) -> Answer:
        timeout = call.body.get("timeout_s")
        number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if timeout is not None and not (number and 0 <= timeout <= MAX_WAIT):
            return refusal(400, f"timeout_s={str(timeout)[:40]}: expected seconds, 0 or more, at most a year")
        hook = bool(call.body.get("hook"))
        if not call.body.get("wait"):
            return await self._drained(call, hook=hook, within=0.0)
        usual = self._hook_budget if hook else self._drain_budget
        within = float(usual if timeout is None else timeout)
        return Answer(200, later=partial(self._drained, call, hook=hook, within=within))

    async def _drained(self, call: Call, *, hook: bool, within: float) -> Answer:
        """Order the drain and answer how it stands when nothing is in flight, or after `within` seconds."""
        before, _ = self._cuts()
        self._tell(facts.DrainRequested(str(call.peer), hook=hook))
        if within:
            with trio.move_on_after(within):
                await self._empty()
        else:
            await trio.lowlevel.checkpoint()
        in_flight, background = self._gate.in_flight, self._background()
        drained = not in_flight and not background
        ever, by_stop = self._cuts()
        cut = max(ever - before, by_stop)  # who asks during a stop hears of all that it has cut
        return Answer(200, {"drained": drained, "in_flight": in_flight, "background": background, "cut": cut})

    async def _empty(self) -> None:
        await trio.lowlevel.checkpoint()  # the fact is taken first: admission is closed when we begin to count
        while self._gate.in_flight or self._background():  # noqa: ASYNC110 - an event would leave a listener behind for each call
            await trio.sleep(LOOK_EVERY)

    async def _resume(self, call: Call) -> Answer:
        self._tell(facts.ResumeRequested(str(call.peer)))
        await trio.sleep(LOOK_EVERY)
        reason = self._gate.reason
        return Answer(200, {"admission": "open" if reason is None else reason.value})

    async def _restart(self, call: Call) -> Answer:
        reason = call.body.get("reason")
        if not isinstance(reason, str) or not reason.strip():
            return refusal(400, "a restart needs a reason")
        incarnation = self._state().incarnation
        self._tell(facts.RestartRequested(str(call.peer), one_line(reason, 500)))
        return Answer(202, {"incarnation": incarnation})

    async def _stop(self, call: Call) -> Answer:
        state = self._state()
        self._tell(facts.StopRequested(str(call.peer)))
        return Answer(202, {"phase": state.phase.value, "does": stop_does(state.drain, clock.monotonic())})

    async def _report(self, call: Call) -> Answer:
        source, reason = call.body.get("source"), call.body.get("reason")
        if not (isinstance(source, str) and source.strip() and isinstance(reason, str) and reason.strip()):
            return refusal(400, "a report needs a source and a reason")
        self._look_now()
        await trio.sleep(LOOK_EVERY)  # a look takes milliseconds; what it found is the answer
        health = self._status()["health"]
        said = f"{one_line(source, 100)} ({call.peer}) reports: {one_line(reason, 500)}"
        self._say("report", f"{said}; judged {verdict_line(health['verdict'], health['sentence'])}")
        return Answer(202, {"recorded": True, "verdict": health["verdict"], "sentence": health["sentence"]})
