"""One picture of the moment: `GET /status` and our own metrics, put together from memory; it decides nothing.

Only `status` looks at /proc, for the engine's processes and our descriptors; a scrape of the metrics costs no system call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_supervisor.adapters import descriptors
from vllm_supervisor.core import exposition, memory_view, restart
from vllm_supervisor.core.admission import Gate
from vllm_supervisor.core.exposition import Snapshot
from vllm_supervisor.core.ledger_summary import summarize_run
from vllm_supervisor.core.lifecycle import Node, Policy, State, engine_state
from vllm_supervisor.core.memory_view import MemoryPicture
from vllm_supervisor.core.view import verdict
from vllm_supervisor.core.words import Outcome
from vllm_supervisor.runtime.engine_room import EngineRoom
from vllm_supervisor.runtime.journal import LedgerJournal
from vllm_supervisor.runtime.watch import Watch

ENDED = (Outcome.COMPLETED, Outcome.FAILED, Outcome.CANCELLED)


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


class Picture:
    """Holds only references to what others own."""

    def __init__(
        self,
        identity: Identity,
        *,
        state: Callable[[], State],
        gate: Gate,
        room: EngineRoom,
        journal: LedgerJournal,
        policy: Policy,
        now: Callable[[], float],
        memory: Callable[[], MemoryPicture],
        watch: Watch,
    ) -> None:
        """`now` gives monotonic seconds."""
        self._identity = identity
        self._state = state
        self._gate = gate
        self._room = room
        self._journal = journal
        self._policy = policy
        self._now = now
        self._memory = memory
        self._watch = watch

    def status(self) -> dict[str, Any]:
        """What `GET /status` answers."""
        state, gate, now, identity = self._state(), self._gate, self._now(), self._identity
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
                "held": gate.held,
                "limit": gate.limit,
            },
            "engine": self._engine(state, now),
            "health": self._health(state, now),
            "restarts": self._restarts(state, now),
            "requests": self._requests(),
            "executions": {state.value: count for state, count in self._journal.executions.items()},
            "ledger": self._ledger(),
            "drain": self._drain(state, now),
            "orphans": [
                {"pid": member.id.pid, "name": member.name, "rss_bytes": member.rss_bytes, "why": why}
                for member, why in self._room.orphans
            ],
            "memory": memory_view.status(self._memory(), now),
            "descriptors": self._descriptors(),
        }

    @staticmethod
    def _descriptors() -> dict[str, int | None]:
        used, limit = descriptors.in_use()
        return {"open": used, "limit": limit}

    def ledger_summary(self) -> dict[str, Any]:
        """What `GET /ledger/summary` answers: this run, from memory."""
        journal, requests = self._journal, self._journal.requests
        return summarize_run(
            self._identity.release,
            accepted=requests.accepted,
            by_class=requests.by_class,
            why=requests.why,
            executions=journal.executions,
            rejected=requests.refused,
            admitted_at=[request.admitted_at for request in self._gate.open.values()],
            following=journal.following,
            lost=journal.health.lost,
            now=self._now(),
        )

    def exposition(self) -> bytes:
        """What our part of `GET /metrics` is."""
        state, identity, requests, now = self._state(), self._identity, self._journal.requests, self._now()
        judged = self._watch.judgement
        watch = self._watch
        return exposition.render(
            Snapshot(
                version=identity.version,
                name=identity.name,
                release=identity.release,
                phase=state.phase,
                engine=engine_state(state),
                verdict=verdict(state, self._gate)[0] if judged is None else judged.verdict,
                admission_open=self._gate.reason is None,
                in_flight=self._gate.in_flight,
                limit=self._gate.limit,
                accepted=requests.accepted,
                outcomes=requests.outcomes,
                rejections=requests.refused,
                executions=self._journal.executions,
                restarts=state.restarts,
                budget_used=restart.used(state.tally, self._policy.restart, self._now()),
                budget_max=self._policy.restart.max,
                stuck_used=restart.stuck_used(state.tally, self._policy.restart, now),
                stuck_max=self._policy.restart.stuck_max,
                uptime_s=now - identity.began,
                incarnation=state.incarnation,
                verdict_age_s=None if judged is None else now - judged.since,
                progress_age_s=None if judged is None else _since(judged.progress_at, now),
                tokens_per_s=None if judged is None else judged.tokens_per_s,
                steps_per_s=None if judged is None else judged.steps_per_s,
                beacons=len(watch.beacons),
                probes=watch.probes,
                scrapes=watch.scrapes,
                ledger=self._journal.health,
                memory=memory_view.numbers(self._memory()),
            )
        )

    def _health(self, state: State, now: float) -> dict[str, Any]:
        said, sentence = verdict(state, self._gate)
        judged = self._watch.judgement
        if judged is None:
            return {
                "verdict": said.value,
                "sentence": sentence,
                "evidence": {"in_flight": self._gate.in_flight},
                "source": "life of the engine",
                "since_s": None,
                "running": None,
                "waiting": None,
                "tokens_per_s": None,
                "steps_per_s": None,
            }
        return {
            "verdict": judged.verdict.value,
            "sentence": judged.sentence,
            "evidence": dict(judged.evidence),
            "source": judged.source,
            "since_s": _since(judged.since, now),
            "running": judged.running,
            "waiting": judged.waiting,
            "tokens_per_s": judged.tokens_per_s,
            "steps_per_s": judged.steps_per_s,
        }

    def _engine(self, state: State, now: float) -> dict[str, Any]:
        current = self._room.current
        members = [] if current is None else current.body.tree.remaining()
        address = None if current is None else current.body.address
        return {
            "state": engine_state(state).value,
            "incarnation": state.incarnation,
            "pid": state.pid,
            "uptime_s": _since(state.spawned_at, now) if state.pid is not None else None,
            "address": None if address is None else str(address),
            "beacon": bool(self._watch.beacons),
            "load": current.load.line if current is not None and not current.ready else None,
            "problem": state.problem or None,
            "processes": [
                {"pid": member.id.pid, "name": member.name, "rss_bytes": member.rss_bytes} for member in members
            ],
        }

    def _requests(self) -> dict[str, int]:
        requests = self._journal.requests
        ended = {outcome.value: requests.outcomes[outcome] for outcome in ENDED}
        return {
            "accepted": requests.accepted,
            **ended,
            "open": requests.accepted - sum(ended.values()),
            "rejected": requests.rejected,
        }

    def _ledger(self) -> dict[str, Any]:
        health = self._journal.health
        return {
            "failed": health.failed,
            "error": health.error or None,
            "missing": health.missing,
            "lost": health.lost,
            "late": health.late,
            "at_risk": health.at_risk,
        }

    def _restarts(self, state: State, now: float) -> dict[str, Any]:
        last, policy = state.last_restart, self._policy.restart
        return {
            "total": sum(state.restarts.values()),
            "by_cause": dict(state.restarts),
            "budget": {
                "max": policy.max,
                "within_s": policy.within,
                "used": restart.used(state.tally, policy, now),
                "stuck": {
                    "max": policy.stuck_max,
                    "within_s": policy.stuck_within,
                    "used": restart.stuck_used(state.tally, policy, now),
                },
            },
            "last": None
            if last is None
            else {
                "cause": last.cause,
                "sentence": last.sentence,
                "ago_s": _since(last.at, now),
                "ready_after_s": None if last.ready_after_s is None else round(last.ready_after_s, 3),
                "requests_lost": last.requests_lost,
            },
        }

    def _drain(self, state: State, now: float) -> dict[str, Any] | None:
        """The drain as it stands, or None while nothing drains."""
        drain = state.drain
        since = drain.stop_at if state.leaving else drain.drain_since
        if since is None and state.node is not Node.EMPTYING:
            return None
        oldest = self._gate.oldest()
        deadline = drain.deadline if state.leaving else None
        return {
            "budget_s": drain.budget.drain if state.leaving else self._policy.limits.drain,
            "elapsed_s": _since(since, now),
            "remaining_s": None if deadline is None else round(max(deadline - now, 0.0), 3),
            "in_flight": self._gate.in_flight,
            "background": self._journal.background,
            "oldest_s": _since(oldest, now),
            "late_requests": drain.late_requests,
            "last_late_s": None if drain.last_late_s is None else round(drain.last_late_s, 3),
        }


def _since(at: float | None, now: float) -> float | None:
    return None if at is None else round(now - at, 3)
