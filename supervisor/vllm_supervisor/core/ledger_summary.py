"""What `ledger summary` and `GET /ledger/summary` answer: both registers side by side, per release, never added.

Two sources, one shape: a fold of the ledger's lines (every run), or the counters of the run that is going on.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from vllm_supervisor.core.accounts import Fold
from vllm_supervisor.core.words import ExecutionState, Outcome, RequestClass


def summarize(fold: Fold, now: datetime) -> dict[str, Any]:
    """Build the summary; ages in seconds."""
    releases: dict[str, dict[str, Any]] = {}
    for run in fold.runs.values():
        entry = releases.setdefault(
            run.release,
            {"runs": 0, "accepted": 0, "classes": {}, "why": Counter(), "executions": Counter(), "rejected": Counter()},
        )
        entry["runs"] += 1
        entry["accepted"] += run.accepted
        for (request_class, outcome), number in run.outcomes.items():
            counts = entry["classes"].setdefault(request_class, dict.fromkeys(Outcome, 0))
            counts[outcome] += number
        entry["why"].update({why: n for why, n in run.why.items() if why})
        entry["executions"].update({state: n for state, n in run.executions.items() if n})
        for (_request_class, reason), number in run.rejected.items():
            entry["rejected"][reason] += number
    waiting = [account for account in fold.open_ids() if account.outcome is None]
    oldest = min((account.at for account in waiting), default=None)
    return {
        "releases": [{"release": release, **entry} for release, entry in releases.items()],
        "open_now": len(waiting),
        "oldest_open_s": None if oldest is None else round((now - datetime.fromisoformat(oldest)).total_seconds(), 3),
        "unsettled_executions": sum(1 for account in fold.open_ids() if account.outcome is not None),
        "missing": {
            "unreadable_lines": fold.unreadable,
            "missing_segments": fold.missing_segments + fold.unreadable_segments,
            "lines_not_written": sum(run.lost for run in fold.runs.values()),
        },
        "damage": list(fold.damage),
    }


def summarize_run(
    release: str,
    *,
    accepted: int,
    by_class: Mapping[tuple[RequestClass, Outcome], int],
    why: Mapping[str, int],
    executions: Mapping[ExecutionState, int],
    rejected: Mapping[str, int],
    admitted_at: Iterable[float],
    following: int,
    lost: int,
    now: float,
) -> dict[str, Any]:
    """Build the same for the run of the moment; `admitted_at` of the requests that are open, times in monotonic seconds."""
    classes: dict[str, dict[str, int]] = {}
    for (request_class, outcome), number in by_class.items():
        classes.setdefault(request_class, dict.fromkeys(Outcome, 0))[outcome] += number
    waiting = list(admitted_at)
    return {
        "releases": [
            {
                "release": release,
                "runs": 1,
                "accepted": accepted,
                "classes": classes,
                "why": {word: n for word, n in why.items() if word},
                "executions": {state: n for state, n in executions.items() if n},
                "rejected": dict(rejected),
            }
        ],
        "open_now": len(waiting),
        "oldest_open_s": round(now - min(waiting), 3) if waiting else None,
        "unsettled_executions": following,
        "missing": {"unreadable_lines": 0, "missing_segments": 0, "lines_not_written": lost},
        "damage": [],
    }
