"""With what status the supervisor itself ends.

Rules:
* The number of the engine's own exit never shows through a requested stop.
* A fault of ours is 1. Giving up has its own status. A requested stop is 0 only if nothing is left to doubt; else the
  gravest doubt names it: 81 before 82 before 80.
* A clean end after one of the `exit.reraise` signals ends by that signal, so that a shell sees an interrupted command;
  the kernel ignores such a signal for PID 1, which exits with 128 + n instead.
"""

from dataclasses import dataclass

from vllm_supervisor.core.signal_names import NUMBERS

CLEAN = 0
FAULT = 1
CUT = 80
IN_DOUBT = 81
EVIDENCE_MISSING = 82

# Every status of ours, for people: `explain-exit`, the documentation, and nothing else uses another.
MEANINGS: dict[int, str] = {
    CLEAN: "stopped on request; nothing was cut, both ledgers balance, the engine's processes are gone",
    FAULT: "a fault of the supervisor, with a traceback in the log; of a tool: no, or no answer",
    2: "wrong usage of the command line",
    3: "a tool found no running supervisor",
    69: "gave up: the restart budget is spent",
    75: "gave up: only a new container or a reboot helps",
    78: "configuration or environment, or a start of the engine that fails for a reason that repeats",
    CUT: "stopped on request, but admitted requests were cut when the drain budget ended",
    IN_DOUBT: "stopped on request, but an execution is unknown or a process of the engine could not be removed",
    EVIDENCE_MISSING: "stopped on request, but evidence is missing from a ledger",
    130: "stopped by SIGINT, a clean end (what a shell reports, and what PID 1 exits with)",
}


@dataclass(frozen=True, slots=True)
class Ending:
    """What the end of a run rests on. `by_signal`: the signal that began the stop ("SIGINT"), or None."""

    by_signal: str | None = None
    fault: bool = False
    gave_up: int | None = None  # the status of giving up, if that is why we end
    cut: int = 0  # admitted requests that the end of the drain cut
    unknown_executions: int = 0
    unremoved_processes: int = 0
    evidence_missing: bool = False


@dataclass(frozen=True, slots=True)
class OwnStatus:
    """`status` to exit with, unless `reraise` names the signal to end by."""

    status: int
    reraise: str | None = None


def own_status(ending: Ending, *, reraise: tuple[str, ...] = ("SIGINT",), is_pid1: bool = False) -> OwnStatus:
    """Choose our exit status; `reraise` is `exit.reraise` of the configuration."""
    if ending.fault:
        return OwnStatus(FAULT)
    if ending.gave_up is not None:
        return OwnStatus(ending.gave_up)
    if ending.unknown_executions or ending.unremoved_processes:
        return OwnStatus(IN_DOUBT)
    if ending.evidence_missing:
        return OwnStatus(EVIDENCE_MISSING)
    if ending.cut:
        return OwnStatus(CUT)
    if ending.by_signal in reraise:
        status = 128 + NUMBERS[ending.by_signal]
        return OwnStatus(status, None if is_pid1 else ending.by_signal)
    return OwnStatus(CLEAN)
