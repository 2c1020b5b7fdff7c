"""The control socket's paths: what callers may write, and what becomes of it."""

import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import pytest
import trio

from fakes.custody import async_test
from vllm_supervisor.adapters.control_server import Answer, Call, Peer
from vllm_supervisor.core import facts
from vllm_supervisor.core.admission import Gate
from vllm_supervisor.core.drain import DrainState, Stage
from vllm_supervisor.core.events import Events
from vllm_supervisor.core.lifecycle import State
from vllm_supervisor.runtime.control import LAST_WORDS, LOOK_EVERY, MAX_EVENTS, Control

STRANGE = "disk\nfull \x1b[31m\x07 again"
SHOWN = "disk full ?[31m? again"


class Desk:
    """A control with nothing behind it; `told` are the facts and `said` the sentences it passed on."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.said: list[str] = []
        self.state = State()
        self.cuts = [(0, 0)]  # what is answered, one after the other; the last one stays
        self.events = Events(MAX_EVENTS)
        self.control = Control(
            status=lambda: {"health": {"verdict": "busy", "sentence": "it works"}},
            state=lambda: self.state,
            timeouts=dict,
            gate=Gate(limit=8, new_id=lambda: "1"),
            background=lambda: 0,
            cuts=lambda: self.cuts.pop(0) if len(self.cuts) > 1 else self.cuts[0],
            summary=dict,
            events=self.events,
            tell=self.told.append,
            say=lambda _word, sentence: self.said.append(sentence),
            look_now=lambda: None,
            drain_budget=1.0,
            hook_budget=1.0,
        )

    async def ask(self, method: str, path: str, *, body: Mapping[str, Any] | None = None, **query: str) -> Answer:
        """Make one call."""
        answer = await self.control(Call(method, path, query, dict(body or {}), Peer(1, 0, "sh")))
        return answer if answer.later is None else await answer.later()


@async_test
async def test_any_number_of_events_may_be_asked_for() -> None:
    """A number of any length gives at most what is kept; what is no number is refused."""
    desk = Desk()
    for n in ("0", "7", "9" * 5000, "٣"):
        assert (await desk.ask("GET", "/events", n=n)).status == 200
    for n in ("-1", "", "1.5", "nan"):
        assert (await desk.ask("GET", "/events", n=n)).status == 400


@pytest.mark.parametrize("wait", [math.nan, math.inf, -1, pytest.param(10**400, id="huge"), True, "5", [5]])
@async_test
async def test_a_wait_that_is_no_time_is_refused(wait: object) -> None:
    """And nothing is drained for it."""
    desk = Desk()
    answer = await desk.ask("POST", "/drain", body={"wait": True, "timeout_s": wait})
    assert answer.status == 400
    assert len(answer.value["error"]["message"]) < 120
    assert desk.told == []


@async_test
async def test_what_a_stranger_writes_stays_on_one_line() -> None:
    """No line break and no control character of a reason or a source reaches an event."""
    desk = Desk()
    assert (await desk.ask("POST", "/restart", body={"reason": STRANGE})).status == 202
    (told,) = desk.told
    assert isinstance(told, facts.RestartRequested)
    assert told.reason == SHOWN
    assert (await desk.ask("POST", "/report", body={"source": STRANGE, "reason": STRANGE})).status == 202
    assert desk.said[0].startswith(f"{SHOWN} (pid 1 (uid 0, sh)) reports: {SHOWN}; judged")


@async_test
async def test_a_second_stop_is_answered_with_what_it_does() -> None:
    """The first says that what was accepted finishes, the second that what is open is cut."""
    desk = Desk()
    first = await desk.ask("POST", "/stop")
    desk.state = State(drain=DrainState(stage=Stage.FINISHING, stops=1))
    second = await desk.ask("POST", "/stop")
    assert first.value == {"phase": "running", "does": "stopping: what was accepted finishes first"}
    assert second.value == {"phase": "draining", "does": "hurrying: what is still open is cut now"}
    assert [type(fact) for fact in desk.told] == [facts.StopRequested] * 2


@pytest.mark.parametrize(
    ("cuts", "cut"),
    [
        ([(0, 0)], 0),
        ([(2, 0)], 0),  # an earlier restart's
        ([(2, 0), (5, 3)], 3),  # a stop's, while we waited
        ([(5, 3)], 3),  # a stop's, before we asked
        ([(2, 0), (6, 0)], 4),  # a restart's, while we waited
    ],
)
@async_test
async def test_a_drain_says_what_was_cut(cuts: list[tuple[int, int]], cut: int) -> None:
    """Nothing is in flight, and the answer tells whether that is because it was cut."""
    desk = Desk()
    desk.cuts = list(cuts)
    answer = await desk.ask("POST", "/drain", body={"wait": True})
    assert answer.value == {"drained": True, "in_flight": 0, "background": 0, "cut": cut}


@async_test
async def test_who_follows_gets_the_last_words() -> None:
    """A follower has the last event and the end of its answer before anything ends; one that takes nothing holds us for a moment, nobody not at all."""
    desk = Desk()
    await desk.control.last_words()
    desk = Desk()
    taking = (await desk.ask("GET", "/events", follow="1")).stream
    assert isinstance(taking, AsyncGenerator)
    got: list[str] = []
    over = trio.Event()

    async def take() -> None:
        async for event in taking:
            got.append(event["event"])  # noqa: PERF401 - what has come is looked at meanwhile
        over.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        await trio.sleep(2 * LOOK_EVERY)  # past the follower's own pause, so that it looks for new events
        desk.events.add("ended", "", at="")
        await desk.control.last_words()
        assert got == ["ended"]
        assert over.is_set()
    desk = Desk()
    stuck = (await desk.ask("GET", "/events", follow="1")).stream
    assert isinstance(stuck, AsyncGenerator)
    async with aclosing(stuck), trio.open_nursery() as nursery:
        nursery.start_soon(stuck.__anext__)
        await trio.sleep(2 * LOOK_EVERY)
        desk.events.add("first", "", at="")
        await trio.sleep(2 * LOOK_EVERY)
        with trio.fail_after(10 * LAST_WORDS):
            await desk.control.last_words()
        nursery.cancel_scope.cancel()
