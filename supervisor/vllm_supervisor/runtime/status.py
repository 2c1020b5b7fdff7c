"""`GET /status`: one picture of the moment, put together from memory and one look at /proc; it decides nothing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_supervisor.adapters.processes import Member
from vllm_supervisor.core import restart
from vllm_supervisor.core.address import Address
from vllm_supervisor.core.admission import Gate
from vllm_supervisor.core.lifecycle import Node, Policy, State, engine_state
from vllm_supervisor.core.words import ClosedReason, EngineState, Verdict


@dataclass(frozen=True, slots=True)
class Identity:
    """What does not change in a run."""

    version: str
    name: str
    run: str
    pid: int
    began: float  # monotonic seconds
    release: str
    listeners: tuple[str, ...]


def drain_picture(state: State, gate: Gate, policy: Policy, now: float) -> dict[str, Any] | None:
    """The drain as it stands, or None while nothing drains. Durations in seconds."""
    draining = state.node in (Node.EMPTYING, Node.CUTTING) or gate.reason in (
        ClosedReason.STOPPING,
        ClosedReason.DRAIN_REQUESTED,
    )
    if not draining:
        return None
    oldest = gate.oldest()
    left = None if state.drain_deadline is None else max(state.drain_deadline - now, 0.0)
    return {
        "budget_s": policy.drain_budget,
        "elapsed_s": None if left is None else round(policy.drain_budget - left, 3),
        "remaining_s": None if left is None else round(left, 3),
        "in_flight": gate.in_flight,
        "oldest_s": None if oldest is None else round(now - oldest, 3),
    }


def verdict(state: State, gate: Gate) -> tuple[Verdict, str]:
    """What we can say of the engine's health from its life and our own account."""
    match engine_state(state):
        case EngineState.READY:
            if gate.in_flight:
                return Verdict.BUSY, f"ready, {gate.in_flight} requests in flight"
            return Verdict.IDLE, "ready, nothing in flight"
        case EngineState.STARTING:
            return Verdict.STARTING, "the engine is starting"
        case EngineState.STOPPING:
            return Verdict.UNREACHABLE, "the engine is being stopped"
        case _:
            return Verdict.DEAD, state.problem or "no engine runs"


class Status:
    """Builds the picture; holds only references to what others own."""

    def __init__(
        self,
        identity: Identity,
        *,
        state: Callable[[], State],
        gate: Gate,
        policy: Policy,
        now: Callable[[], float],
        members: Callable[[], Sequence[Member]],
        address: Callable[[], Address | None],
        load: Callable[[], str],
        requests: Callable[[], Mapping[str, int]],
        executions: Callable[[], Mapping[str, int]],
        available_bytes: Callable[[], int | None],
    ) -> None:
        """`load` is the newest line of a loading engine; `requests` and `executions` are the two registers' counts."""
        self._identity = identity
        self._state = state
        self._gate = gate
        self._policy = policy
        self._now = now
        self._members = members
        self._address = address
        self._load = load
        self._requests = requests
        self._executions = executions
        self._available_bytes = available_bytes

    def __call__(self) -> dict[str, Any]:
        """Take the picture."""
        state, gate, now, identity = self._state(), self._gate, self._now(), self._identity
        said, sentence = verdict(state, gate)
        address = self._address()
        return {
            "version": identity.version,
            "name": identity.name,
            "run": identity.run,
            "pid": identity.pid,
            "listen": list(identity.listeners),
            "phase": state.phase.value,
            "uptime_s": round(now - identity.began, 3),
            "release": identity.release,
            "admission": {
                "open": gate.reason is None,
                "reason": None if gate.reason is None else gate.reason.value,
                "in_flight": gate.in_flight,
                "limit": gate.limit,
            },
            "engine": {
                "state": engine_state(state).value,
                "incarnation": state.incarnation,
                "pid": state.pid,
                "uptime_s": _since(state.spawned_at, now) if state.pid is not None else None,
                "address": None if address is None else str(address),
                "beacon": False,
                "load": self._load(),
                "problem": state.problem or None,
                "processes": [
                    {"pid": member.id.pid, "name": member.name, "rss_bytes": member.rss_bytes}
                    for member in self._members()
                    if not member.dead
                ],
            },
            "health": {
                "verdict": said.value,
                "sentence": sentence,
                "evidence": {"in_flight": gate.in_flight},
                "since_s": _since(state.ready_at, now),
                "running": None,
                "waiting": None,
                "tokens_per_s": None,
                "steps_per_s": None,
            },
            "restarts": self._restarts(state, now),
            "requests": {**self._requests(), "rejected": gate.counts.rejected},
            "executions": dict(self._executions()),
            "drain": drain_picture(state, gate, self._policy, now),
            "memory": {"available_bytes": self._available_bytes(), "floor_bytes": None, "pressure": None},
        }

    def _restarts(self, state: State, now: float) -> dict[str, Any]:
        last = state.last_restart
        policy = self._policy.restart
        return {
            "total": sum(state.restarts.values()),
            "by_cause": dict(state.restarts),
            "budget": {
                "max": policy.max,
                "within_s": policy.within,
                "used": restart.used(state.tally, policy, now),
            },
            "last": None
            if last is None
            else {
                "cause": last.cause,
                "sentence": last.sentence,
                "ago_s": _since(last.at, now),
                "ready_after_s": last.ready_after_s,
            },
        }


def _since(at: float | None, now: float) -> float | None:
    return None if at is None else round(now - at, 3)
