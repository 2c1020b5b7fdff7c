"""What a signal to the supervisor means: how each is received, and one table of (signal, phase), each cell a list of cases.

Rules:
* No signal ends us but KILL, ABRT and a real fault of our own: an engine without a supervisor serves on unwatched. All
  others are blocked and read. A fault ends its process though its signal is blocked, which one that was sent does not.
* ABRT is left alone, since systemd's watchdog ends a supervisor with it that reads no signals any more.
* What stops or continues a process (Ctrl-Z) keeps its meaning. A failed write tells more than PIPE and XFSZ. 32 and 33
  belong to the C library, which has no use for them in a process like ours and opens them in each new thread.
* The limit of CPU time (XCPU) begins a stop: the kernel kills at the hard limit. It comes each second and hastens nothing.
* The first case whose condition holds is the answer; a case without a condition always holds, and ends its cell.
* A repeated stop goes one rung down, never up: stop, then hasten, then kill.
* A hang-up begins a stop on a terminal, but never hastens one: a closing terminal sends it twice, once by the shell
  and once by the kernel.
* Everything that is not ours reaches the engine only if it is listed: vLLM 0.32 dies of HUP and USR1 and leaves its
  EngineCore behind.
"""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from enum import StrEnum

from vllm_supervisor.core.signal_names import LAST_SIGNAL, NUMBERS, SIGNALS
from vllm_supervisor.core.words import Phase


class Handling(StrEnum):
    """How a signal is received."""

    READ = "read"  # blocked, and read with its sender: `decide` says what it means
    DEFAULT = "default"  # left to the kernel, whose action ends nobody: stop, continue, nothing
    IGNORED = "ignored"  # discarded by the kernel
    FATAL = "fatal"  # ends us


_HANDLING = {
    Handling.DEFAULT: ("STOP", "TSTP", "TTIN", "TTOU", "CONT", "URG", "WINCH"),
    Handling.IGNORED: ("PIPE", "XFSZ"),
    Handling.FATAL: ("KILL", "ABRT"),
}
HANDLING: dict[int, Handling] = (
    dict.fromkeys(range(1, LAST_SIGNAL + 1), Handling.READ)
    | {NUMBERS[f"SIG{name}"]: handling for handling, names in _HANDLING.items() for name in names}
    | {32: Handling.IGNORED, 33: Handling.IGNORED}
)
IGNORED = frozenset(number for number, handling in HANDLING.items() if handling is Handling.IGNORED)


def to_read(forwarded: Iterable[str]) -> frozenset[int]:
    """Return the numbers of the signals to be blocked and read; those passed on to the engine are among them."""
    read = {number for number, handling in HANDLING.items() if handling is Handling.READ}
    return frozenset(read | {NUMBERS[name] for name in forwarded})


class Action(StrEnum):
    """What we do about a signal."""

    STOP = "stop"  # close admission, drain, stop the engine, document, end
    HASTEN = "hasten"  # end the drain now, stop the engine with its short budget
    KILL = "kill"  # kill the engine's processes now
    EVIDENCE = "evidence"  # write an evidence bundle, nothing else
    RELOAD = "reload"  # read again what can change at run time
    REOPEN_LOGS = "reopen_logs"
    FORWARD = "forward"  # to the engine's main process, if there is one
    IGNORE = "ignore"


class Condition(StrEnum):
    """What else decides."""

    IGNORED_AT_START = "ignored_at_start"  # we inherited it ignored, as under nohup
    TERMINAL = "terminal"  # we have a controlling terminal
    HASTENED = "hastened"  # this stop has been hastened before
    LISTED = "listed"  # signals.forward names it


Cell = tuple[tuple[Condition | None, Action], ...]

_STOP: Cell = ((None, Action.STOP),)
_DOWN: Cell = ((Condition.HASTENED, Action.KILL), (None, Action.HASTEN))
_NOTHING: Cell = ((None, Action.IGNORE),)
_HANG_UP: Cell = (
    (Condition.IGNORED_AT_START, Action.IGNORE),
    (Condition.TERMINAL, Action.STOP),
    (None, Action.RELOAD),
)
_EVIDENCE: Cell = ((None, Action.EVIDENCE),)
_REOPEN: Cell = ((None, Action.REOPEN_LOGS),)
_FORWARD: Cell = ((Condition.LISTED, Action.FORWARD), (None, Action.IGNORE))

OTHER = "other"  # the row of every signal that has none of its own

# fmt: off
TABLE: dict[str, dict[Phase, Cell]] = {
    signal: dict(zip(Phase, cells, strict=True)) for signal, cells in {
        #           running    admission_stop  draining    documenting  ended
        "SIGTERM": (_STOP,     _DOWN,          _DOWN,      _DOWN,       _NOTHING),
        "SIGINT":  (_STOP,     _DOWN,          _DOWN,      _DOWN,       _NOTHING),
        "SIGHUP":  (_HANG_UP,  _NOTHING,       _NOTHING,   _NOTHING,    _NOTHING),
        "SIGQUIT": (_EVIDENCE, _EVIDENCE,      _EVIDENCE,  _EVIDENCE,   _NOTHING),
        "SIGUSR1": (_REOPEN,   _REOPEN,        _REOPEN,    _REOPEN,     _NOTHING),
        "SIGXCPU": (_STOP,     _NOTHING,       _NOTHING,   _NOTHING,    _NOTHING),
        OTHER:     (_FORWARD,  _FORWARD,       _FORWARD,   _FORWARD,    _NOTHING),
    }.items()
}
# fmt: on

# Signals that `signals.forward` may list: not ours, not what cannot be caught, not what the kernel sends for our faults.
FORWARDABLE: frozenset[str] = frozenset(SIGNALS.values()) - TABLE.keys() - {
    f"SIG{name}" for name in ("KILL", "STOP", "CHLD", "ILL", "TRAP", "ABRT", "BUS", "FPE", "SEGV", "SYS", "PIPE")
}  # fmt: skip


def decide(signal: str, phase: Phase, conditions: AbstractSet[Condition]) -> Action:
    """Say what `signal` ("SIGTERM") means in `phase` while `conditions` hold."""
    cell = TABLE.get(signal, TABLE[OTHER])[phase]
    return next(action for condition, action in cell if condition is None or condition in conditions)
