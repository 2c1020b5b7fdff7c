"""What a drain says of itself: how it goes, what `drain.json` says after a stop, and the one line the log gets.

Rules:
* Both registers stand side by side; no number here is a sum over both.
* Each item that is not settled names who settles it: the next start, if a proof can still come (the processes gone, or
  another boot), else the operator.
* Items are listed up to a bound, and counted beyond it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_supervisor.core.drain import SHORT_STOP_S, DrainState, Stage, same_wish
from vllm_supervisor.core.execution import Change
from vllm_supervisor.core.words import ExecutionState, Outcome

MAX_ITEMS = 1000
NEXT_START = "the next start, which proves the engine's processes gone or keeps this as unknown"
OPERATOR = "the operator: a process of the engine could not be removed"


@dataclass(frozen=True, slots=True)
class CutRequest:
    """A request whose work the end of the drain has cut: its class, and its age in seconds then.

    One that was answered and ran on (`background: true`) counts as well.
    """

    id: str
    request_class: str
    age_s: float


@dataclass(frozen=True, slots=True)
class DrainFacts:
    """What the report is made of; `requests` and `executions` are counts by name, as in a balance line."""

    run: str
    release: str
    requests: Mapping[str, int]
    executions: Mapping[str, int]
    cut: Sequence[CutRequest]
    unsettled: Sequence[Change]  # executions without a final state, and requests that stayed open
    engine_gone: bool
    balance_holds: bool
    evidence_missing: bool
    status: int  # our exit status


def build(state: DrainState, facts: DrainFacts, now: float) -> dict[str, Any]:
    """Build the content of `drain.json`; durations in seconds."""
    settles = NEXT_START if facts.engine_gone else OPERATOR
    by_class = Counter(request.request_class for request in facts.cut)
    return {
        "run": facts.run,
        "release": facts.release,
        "requests": {name: facts.requests.get(name, 0) for name in ("accepted", *Outcome, "rejected")},
        "executions": {name.value: facts.executions.get(name, 0) for name in ExecutionState},
        "balance_holds": facts.balance_holds,
        "evidence_missing": facts.evidence_missing,
        "plan": {
            name: getattr(state.budget, name)
            for name in ("outer", "hook", "propagation", "drain", "engine_stop", "documentation", "reserve", "sentence")
        },
        "took_s": took(state, now),
        "stops_asked": state.stops,
        "late_requests": {"n": state.late_requests, "last_after_s": _rounded(state.last_late_s)},
        "cut": {
            "n": len(facts.cut),
            "by_class": dict(by_class),
            "oldest_s": _rounded(max((request.age_s for request in facts.cut), default=None)),
            "requests": [
                {"id": request.id, "class": request.request_class, "age_s": round(request.age_s, 3)}
                for request in facts.cut[:MAX_ITEMS]
            ],
        },
        "unsettled": {
            "n": len(facts.unsettled),
            "items": [
                {"id": one.id, "execution": one.state, "evidence": one.evidence, "settled_by": settles}
                for one in facts.unsettled[:MAX_ITEMS]
            ],
        },
        "status": facts.status,
    }  # fmt: skip


def took(state: DrainState, now: float) -> dict[str, float]:
    """Say how long each stage took that was entered; the last one until `now`."""
    order = [stage for stage in Stage if stage in state.entered]
    ends = [state.entered[stage] for stage in order[1:]] + [now]
    return {stage.value: round(end - state.entered[stage], 3) for stage, end in zip(order, ends, strict=True)}


def line(report: Mapping[str, Any]) -> str:
    """Say the report in one line for the log."""
    text = ", ".join(f"{name} {number}" for name, number in report["requests"].items())
    states = ", ".join(f"{name} {number}" for name, number in report["executions"].items() if number)
    left = report["unsettled"]["n"]
    verdict = "both ledgers balance" if report["balance_holds"] else "the ledgers do NOT balance"
    missing = "; evidence is MISSING" if report["evidence_missing"] else ""
    unsettled = f"; {left} not settled" if left else ""
    return (
        f"requests: {text}; executions: {states or 'none'}; {verdict}{missing}{unsettled}{_cut(report['cut'])}; "
        f"status {report['status']}"
    )


def level(report: Mapping[str, Any]) -> str:
    """Say how loudly the log has it: a warning if anything was cut, is missing or is in doubt."""
    whole = report["balance_holds"] and not report["evidence_missing"] and not report["unsettled"]["n"]
    return "info" if whole and not report["cut"]["n"] else "warning"


def _cut(cut: Mapping[str, Any]) -> str:
    if not cut["n"]:
        return ""
    classes = ", ".join(f"{name} {number}" for name, number in cut["by_class"].items())
    return f"; cut {cut['n']} ({classes}, oldest {cut['oldest_s']:.1f} s)"


def stop_does(state: DrainState, now: float) -> str:
    """Say what a stop does that is asked for in `state` at `now`: the first word tells a stop from a hurry and a kill."""
    if same_wish(state, now):
        return "stopping already: asked again within a second, it counts once"
    match state.stage:
        case Stage.OPEN:
            return "stopping: what was accepted finishes first"
        case Stage.PROPAGATING | Stage.FINISHING:
            return "hurrying: what is still open is cut now"
        case Stage.STOPPING if state.stops < 2:
            return f"hurrying: the engine has {min(SHORT_STOP_S, state.budget.engine_stop):g} s to end"
        case Stage.STOPPING:
            return "killing: the engine's processes are killed now"
        case Stage.DOCUMENTING | Stage.ENDED:
            return "ending: the engine is gone, what is known is being written down"


def drained(cut: int) -> str:
    """Say of a drain that nothing is in flight any more, and of how many requests that is so because they were cut."""
    but = f", but {cut} {'request was' if cut == 1 else 'requests were'} cut" if cut else ""
    return f"drained: nothing is in flight{but}"


def progress(state: DrainState, now: float, *, in_flight: int, oldest_s: float | None, background: int = 0) -> str:
    """Say how the drain goes, for people: "draining: 3 in flight, oldest 41 s, 22 s left"."""
    parts = [f"{in_flight} in flight"]
    if in_flight and oldest_s is not None:
        parts.append(f"oldest {oldest_s:.0f} s")
    if background:
        parts.append(f"{background} answered and still running")
    if state.deadline is not None:
        parts.append(f"{max(0.0, state.deadline - now):.0f} s left")
    head = "stopping the engine" if state.stage is Stage.STOPPING else state.phase.value.replace("_", " ")
    if state.stage is Stage.OPEN:
        head = "draining"
    return f"{head}: {', '.join(parts)}"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
