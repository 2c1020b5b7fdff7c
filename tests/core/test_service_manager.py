"""What a service manager is told: READY by configuration, extensions in steps, one farewell, and one line of status."""

from dataclasses import replace
from typing import Literal

import pytest

from vllm_supervisor.core.drain import DrainState, Stage
from vllm_supervisor.core.lifecycle import Node, State
from vllm_supervisor.core.service_manager import (
    EXTEND_EVERY_S,
    EXTEND_S,
    LONGEST_STATUS,
    Told,
    reloaded,
    reloading,
    tell,
)

LEAVING = DrainState(stage=Stage.FINISHING)


def said(
    told: Told,
    state: State,
    *,
    now: float = 0.0,
    sentence: str = "",
    ready_when: Literal["engine", "listening"] = "engine",
    stop_takes_s: float = 0.0,
) -> tuple[Told, list[str]]:
    """Tell with defaults."""
    return tell(told, state, sentence=sentence, ready_when=ready_when, stop_takes_s=stop_takes_s, now=now)


@pytest.mark.parametrize("node", [node for node in Node if node is not Node.READY])
def test_ready_waits_for_the_engine(node: Node) -> None:
    """With systemd.ready = "engine" nothing but a ready engine is READY."""
    assert "READY=1" not in said(Told(), State(node=node))[1]
    assert "READY=1" in said(Told(), State(node=Node.READY))[1]


def test_ready_can_be_the_listening_front_door() -> None:
    """With systemd.ready = "listening" READY comes first of all, and no extension is asked for."""
    _, words = said(Told(), State(node=Node.SWEEPING), ready_when="listening")
    assert words == ["READY=1"]


def test_ready_is_said_once() -> None:
    """A restart of the engine does not say READY again, and a start that is over needs no extension."""
    told, _ = said(Told(), State(node=Node.READY))
    told, words = said(told, State(node=Node.STARTING), now=100.0)
    assert words == []
    assert said(told, State(node=Node.READY), now=200.0)[1] == []


def test_a_stop_before_ready_never_says_ready() -> None:
    """Who leaves is not ready, even if the engine is."""
    assert "READY=1" not in said(Told(), State(node=Node.READY, drain=LEAVING))[1]


@pytest.mark.parametrize("node", [Node.SWEEPING, Node.STARTING, Node.WAITING, Node.TERMINATING, Node.LOSING])
def test_a_load_extends_the_start_in_steps(node: Node) -> None:
    """From the first moment to READY there is always an unexpired extension of at most 30 s, and not one a tick."""
    told, granted, count = Told(), 0.0, 0
    for tick in range(300):
        now = float(tick)
        told, words = said(told, State(node=node), now=now)
        for word in words:
            assert word == "EXTEND_TIMEOUT_USEC=30000000"
            granted, count = now + EXTEND_S, count + 1
        assert granted - now >= EXTEND_S - EXTEND_EVERY_S
    assert count == 300 / EXTEND_EVERY_S


def test_a_stop_is_told_once_with_its_planned_end() -> None:
    """STOPPING comes with one extension to the planned end; later nothing more is asked for."""
    told, words = said(Told(ready=True), State(node=Node.READY, drain=LEAVING), stop_takes_s=100.5)
    assert words == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=100500000"]
    assert said(told, State(node=Node.TERMINATING, drain=LEAVING), now=60.0, stop_takes_s=100.5)[1] == []


def test_status_is_sent_when_it_changes() -> None:
    """A sentence is sent once."""
    told, words = said(Told(ready=True), State(node=Node.READY), sentence="ready, 1 in flight")
    assert words == ["STATUS=ready, 1 in flight"]
    told, words = said(told, State(node=Node.READY), sentence="ready, 1 in flight")
    assert words == []
    assert said(told, State(node=Node.READY), sentence="ready, 0 in flight")[1] == ["STATUS=ready, 0 in flight"]


def test_a_sentence_stays_one_line_of_bounded_length() -> None:
    """What an engine printed cannot become an assignment, nor a message too large to send."""
    _, words = said(Told(ready=True), State(node=Node.READY), sentence="bad\nMAINPID=1\r\n" + "x" * 10_000)
    assert [word.partition("=")[0] for word in words] == ["STATUS"]
    assert "\n" not in words[0]
    assert len(words[0]) == len("STATUS=") + LONGEST_STATUS


def test_a_reload_is_bracketed_only_for_who_heard_ready() -> None:
    """RELOADING carries the monotonic time; before READY and after STOPPING a reload is our own affair."""
    told = Told(ready=True)
    assert reloading(told, 12.5) == ["RELOADING=1", "MONOTONIC_USEC=12500000"]
    assert reloaded(told) == ["READY=1"]
    for silent in (Told(), replace(told, stopping=True)):
        assert reloading(silent, 12.5) == reloaded(silent) == []
