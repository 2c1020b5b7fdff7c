"""What a service manager (systemd) is told, and when: a pure function from the state of the moment to assignments.

Rules:
* READY=1 once: when the front door listens, or when the engine is ready, as configured.
* STATUS= only when the sentence changed, on one line: what an engine printed must not become an assignment.
* EXTEND_TIMEOUT_USEC while an engine loads and nobody has been told READY yet, at most 30 s at a time; the load's own
  deadline, not the service manager's, ends a load that stands still. At the start of a stop once, to its planned end.
* STOPPING=1 once.
* A reload is told only to who has been told READY: READY=1 ends both a start and a reload, and an early one would lie.
Source of facts: sd_notify(3), systemd.service(5) on TimeoutStartSec and Type=notify-reload.
"""

from dataclasses import dataclass, replace
from typing import Literal

from vllm_supervisor.core.lifecycle import Node, State

EXTEND_S = 30.0  # seconds granted by one extension
EXTEND_EVERY_S = 10.0  # seconds between two: two may be lost before it matters
LONGEST_STATUS = 300  # characters of a sentence


@dataclass(frozen=True, slots=True)
class Told:
    """What has been said so far. Times are monotonic seconds."""

    ready: bool = False
    stopping: bool = False
    status: str = ""
    extended_at: float | None = None


def tell(
    told: Told,
    state: State,
    *,
    sentence: str,
    ready_when: Literal["engine", "listening"],
    stop_takes_s: float,
    now: float,
) -> tuple[Told, list[str]]:
    """Return what has been said after this, and the assignments to send now (none: nothing to say).

    `stop_takes_s` is how long a stop that begins now may take at most.
    """
    said: list[str] = []
    if not told.ready and not state.leaving and (ready_when == "listening" or state.node is Node.READY):
        told = replace(told, ready=True)
        said.append("READY=1")
    if not told.ready and not state.leaving and _due(told, now):
        told = replace(told, extended_at=now)
        said.append(f"EXTEND_TIMEOUT_USEC={round(EXTEND_S * 1e6)}")
    if state.leaving and not told.stopping:
        told = replace(told, stopping=True)
        said += ["STOPPING=1", f"EXTEND_TIMEOUT_USEC={round(stop_takes_s * 1e6)}"]
    sentence = _one_line(sentence)
    if sentence != told.status:
        told = replace(told, status=sentence)
        said.append(f"STATUS={sentence}")
    return told, said


def _due(told: Told, now: float) -> bool:
    return told.extended_at is None or now - told.extended_at >= EXTEND_EVERY_S


def reloading(told: Told, now: float) -> list[str]:
    """Return what to say before a reload; `now` in seconds of CLOCK_MONOTONIC, which is what systemd compares with."""
    return ["RELOADING=1", f"MONOTONIC_USEC={round(now * 1e6)}"] if told.ready and not told.stopping else []


def reloaded(told: Told) -> list[str]:
    """Return what to say after a reload."""
    return ["READY=1"] if told.ready and not told.stopping else []


def _one_line(sentence: str) -> str:
    line = " ".join(sentence.split())
    return line if len(line) <= LONGEST_STATUS else f"{line[: LONGEST_STATUS - 1]}…"
