"""What the end of an engine's main process means: a table over the raw status, what we asked, the phase and evidence.

Rules:
* Asked for: clean, whatever the number. vLLM 0.32 ends 0 after TERM; older ones re-raise (-15, 143 through a shell);
  TERM in the middle of a load gives -2, 130 or 1; our own KILL gives -9.
* Not asked for: a failure, 0 included. vLLM 0.32 exits 0 four seconds after its EngineCore was killed.
* A KILL that was not ours came from outside, sender unknown. It is called out of memory only on evidence.
* A negative status is a signal; 129 to 192 is a signal as a shell or a container runtime reports it.
* Before the engine was ready the first error line may be quoted. Later it may hold a prompt: then only its type is.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from vllm_supervisor.core.engine_log import is_wrapper
from vllm_supervisor.core.signal_names import LAST_SIGNAL, signal_name
from vllm_supervisor.core.signatures import Cause, Repeat, Signature, StartPhase, match

GAVE_UP_BUDGET = 69  # the restart budget is spent
GAVE_UP_OUTSIDE = 75  # only a new container or a reboot helps
GAVE_UP_REPEATS = 78  # the start fails for a reason that repeats

_SHM_FULL = 0.95  # share of /dev/shm in use from which a SIGBUS is blamed on it
_OOM_LINE = re.compile(r"oom-kill:|Out of memory: Killed process|Memory cgroup out of memory", re.IGNORECASE)

# The line of a traceback that names the exception, bare or after a log prefix.
_EXCEPTION = re.compile(r"(?m)(?:^|\] )(?P<line>(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt))(?::.*)?)$")


class Asked(StrEnum):
    """The strongest thing we had asked of the engine when it ended."""

    NOTHING = "nothing"
    TERM = "term"
    KILL = "kill"


@dataclass(frozen=True, slots=True)
class ExitEvidence:
    """What was seen around the end; every part may be missing.

    `first_error`: the first error block of the incarnation. `died_first`: names of members that were gone before the
    main process. `oom_kills`: rise of `oom_kill` in the engine's cgroup during its life. `kernel_log`: the
    kernel's lines that are evidence about this end (core/kernel_lines.py). `shm_used`: share of /dev/shm in use, 0 to 1.
    """

    alive_s: float | None = None
    first_error: str = ""
    died_first: tuple[str, ...] = ()
    oom_kills: int = 0
    kernel_log: str = ""
    shm_used: float | None = None
    unified_memory: bool = False


@dataclass(frozen=True, slots=True)
class ExitReading:
    """What an end means. `sentence` tells the whole, `meaning` only the reason, `mend` what a person can do.

    `retries`: how many more starts it is worth; None: the general budgets say. `fingerprint` is equal for two ends that
    look alike (no numbers, no addresses in it). `root` is what the engine or the kernel told of the reason, "" if nothing.
    `label` is the class of the reason in fixed words: what clients may read, for nothing the engine printed is in it.
    """

    cause: Cause
    clean: bool
    repeat: Repeat
    sentence: str
    meaning: str
    mend: str
    signature: Signature | None
    retries: int | None
    fingerprint: str
    root: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class _Row:
    cause: Cause
    meaning: str
    mend: str = ""
    repeats: bool = False  # deterministic, if the engine was not ready yet


_OUTSIDE = "something outside ended it, sender unknown"
_FIND_SENDER = "look for another watchdog, an OOM daemon or a person"
_FIND_CORE = "read the engine's last lines; a core dump, if there is one, names the function"

_BY_SIGNAL: dict[int, _Row] = {
    1: _Row(Cause.KILLED, f"{_OUTSIDE}; vLLM dies of a hang-up", "send HUP to the supervisor, never to the engine"),
    4: _Row(Cause.CRASHED, "this processor lacks an instruction it needs", "use a build for this processor", True),
    6: _Row(Cause.CRASHED, "it gave itself up (abort), as C++ and the NCCL watchdog do", _FIND_CORE),
    7: _Row(Cause.CRASHED, "it touched memory that could not be provided", "look at the room in /dev/shm"),
    10: _Row(Cause.KILLED, f"{_OUTSIDE}; vLLM dies of USR1", "send USR1 to the supervisor, never to the engine"),
    24: _Row(Cause.CRASHED, "its limit of CPU time ran out", "raise the limit (ulimit -t)"),
    25: _Row(Cause.CRASHED, "it wrote a file larger than its limit", "raise the limit (ulimit -f)"),
    31: _Row(Cause.CRASHED, "a system call it needs is forbidden (seccomp)", "allow it in the sandbox", True),
    **{number: _Row(Cause.CRASHED, "it crashed", _FIND_CORE) for number in (5, 8, 11, 16)},
}
_ANY_SIGNAL = _Row(Cause.KILLED, _OUTSIDE, _FIND_SENDER)

_ANY_CODE = _Row(Cause.EXITED, "it ended by itself", "read the engine's last lines")
_ZERO = _Row(Cause.EXITED, "an end that nobody asked for is a failure, 0 included", "read the engine's last lines")
# Codes that mean this only before the engine was ready.
_BY_START_CODE: dict[int, _Row] = {
    2: _Row(Cause.USAGE, "it refused its command line", "correct the command line; the engine's lines say where", True),
    126: _Row(Cause.NOT_EXECUTABLE, "the command may not be executed", "check its permissions and interpreter", True),
    127: _Row(Cause.NOT_EXECUTABLE, "the command was not found", "check engine.command and PATH", True),
}

_OOM = _Row(Cause.OUT_OF_MEMORY, "the kernel killed it for lack of memory", "give it less memory to use, or more room")
_SHM = _Row(
    Cause.SHM_FULL,
    "the shared memory (/dev/shm) is full",
    "free /dev/shm or give it more room (--shm-size, --ipc=host)",
)
_PART = _Row(Cause.PART_DIED, "a part of it died first and the rest shut down", "read the engine's last lines")


def signal_of(raw: int) -> int | None:
    """Return the signal number that `raw` stands for (-9 and 137: 9), or None for a plain exit code."""
    if -LAST_SIGNAL <= raw < 0:
        return -raw
    return raw - 128 if 128 < raw <= 128 + LAST_SIGNAL else None


def interpret(raw: int, asked: Asked, phase: StartPhase, evidence: ExitEvidence) -> ExitReading:
    """Read an end. `raw` is an exit code (0 to 255) or minus a signal; anything else raises ValueError."""
    if not -LAST_SIGNAL <= raw <= 255:
        raise ValueError(f"no exit status: {raw}")
    row = _row(raw, phase, evidence)
    signature = _signature(phase, evidence)
    if row is _OOM and signature and signature.general:
        signature = None  # it only says that something died, and the kernel says why
    repeat, retries = _outlook(row, signature, phase, evidence)
    clean = asked is not Asked.NOTHING
    meaning = _asked_meaning(raw, asked, evidence) if clean else _meaning(row, phase, signature, evidence)
    return ExitReading(
        cause=Cause.REQUESTED if clean else (signature and signature.cause) or row.cause,
        clean=clean,
        repeat=repeat,
        sentence=_stopped(raw, phase, evidence) if _as_told(raw, asked) else _told(raw, phase, evidence, meaning),
        meaning=meaning,
        mend=signature.mend if signature else "" if clean else row.mend,
        signature=signature,
        retries=retries,
        fingerprint=_fingerprint(raw, signature, evidence),
        root=_root(row, phase, signature, evidence),
        label=signature.label if signature else row.meaning,
    )


def give_up_status(reading: ExitReading, *, spent: bool) -> int:
    """Give our own exit status for giving up after `reading`; `spent`: a budget ran out (else the reason repeats)."""
    if reading.signature and reading.signature.outside_only:
        return GAVE_UP_OUTSIDE
    return GAVE_UP_BUDGET if spent else GAVE_UP_REPEATS


def _row(raw: int, phase: StartPhase, evidence: ExitEvidence) -> _Row:
    number = signal_of(raw)
    if (number == 9 or evidence.died_first) and _out_of_memory(evidence):
        return _OOM
    if number == 7 and evidence.shm_used is not None and evidence.shm_used >= _SHM_FULL:
        return _SHM
    if evidence.died_first:
        return _PART
    if number is not None:
        return _BY_SIGNAL.get(number, _ANY_SIGNAL)
    if phase is StartPhase.LOADING and raw in _BY_START_CODE:
        return _BY_START_CODE[raw]
    return _ANY_CODE if raw else _ZERO


def _signature(phase: StartPhase, evidence: ExitEvidence) -> Signature | None:
    """Find the root: what the engine itself named; else what the kernel said, if the engine named nothing of its own.

    | the engine's first error | kernel: card lost | kernel: anything else |
    |---|---|---|
    | an exact row | the engine's | the engine's |
    | no row, or that of a family | the kernel's | the engine's |
    | only that something died, or none | the kernel's | the kernel's |
    """
    own = match(evidence.first_error, phase)
    kernel = match(evidence.kernel_log, phase, kernel=True)
    if kernel is None or (own and not own.general):
        return own
    quoted = _quote(evidence.first_error, StartPhase.LOADING)
    named = quoted != "" and not is_wrapper(quoted) and not (own and own.cause is Cause.PART_DIED)
    return own if named and not kernel.outside_only else kernel


def _outlook(
    row: _Row, signature: Signature | None, phase: StartPhase, evidence: ExitEvidence
) -> tuple[Repeat, int | None]:
    if signature:
        unified = evidence.unified_memory and signature.unified_retries is not None
        return signature.repeat, signature.unified_retries if unified else signature.retries
    if row is _SHM:
        return Repeat.SPECIAL, 1
    if row.repeats and phase is StartPhase.LOADING:
        return Repeat.DETERMINISTIC, 0
    return Repeat.TRANSIENT, None


def _out_of_memory(evidence: ExitEvidence) -> bool:
    return evidence.oom_kills > 0 or bool(_OOM_LINE.search(evidence.kernel_log))


def ended(raw: int) -> str:
    """Say how a process ended: "ended with status 1", "was ended by SIGKILL"."""
    return f"was ended by {_number(raw)}" if raw < 0 else f"ended with {_number(raw)}"


def _number(raw: int) -> str:
    number = signal_of(raw)
    if number is None:
        return f"status {raw}"
    name = signal_name(number)
    return name if raw < 0 else f"status {raw} (which stands for {name})"


def _as_told(raw: int, asked: Asked) -> bool:
    """Say whether this is the usual end of a stop: TERM, and nobody killed it."""
    return asked is Asked.TERM and signal_of(raw) != 9


def _stopped(raw: int, phase: StartPhase, evidence: ExitEvidence) -> str:
    loading = " while it loaded" if phase is StartPhase.LOADING else ""
    after = "" if evidence.alive_s is None else f" after {evidence.alive_s:.0f} s"
    return f"the engine stopped as told{loading}: {_number(raw)}{after}"


def _told(raw: int, phase: StartPhase, evidence: ExitEvidence, meaning: str) -> str:
    return f"the engine {ended(raw)} {_when(phase, evidence)}: {meaning}"


def _when(phase: StartPhase, evidence: ExitEvidence) -> str:
    when = "before it was ready" if phase is StartPhase.LOADING else "while it served"
    return when if evidence.alive_s is None else f"{when}, {evidence.alive_s:.0f} s after its start"


def _asked_meaning(raw: int, asked: Asked, evidence: ExitEvidence) -> str:
    if asked is Asked.TERM and signal_of(raw) == 9:
        by = "the kernel, for lack of memory" if _out_of_memory(evidence) else "somebody else"
        return f"we had told it to stop, and it was killed by {by} while it did"
    return "we killed it" if asked is Asked.KILL else "we had told it to stop"


def _meaning(row: _Row, phase: StartPhase, signature: Signature | None, evidence: ExitEvidence) -> str:
    first = f"{', '.join(evidence.died_first)} died first; " if evidence.died_first else ""
    if signature:
        return first + signature.tell(evidence.kernel_log if signature.kernel else evidence.first_error)
    quoted = _quote(evidence.first_error, phase)
    return f"{first}{row.meaning} (first error: {quoted})" if quoted else first + row.meaning


def _root(row: _Row, phase: StartPhase, signature: Signature | None, evidence: ExitEvidence) -> str:
    """Return what names the reason itself; a part that died, and what only says so, is none."""
    if row in (_OOM, _SHM):
        return row.meaning
    if signature and not signature.general:
        return signature.tell(evidence.kernel_log if signature.kernel else evidence.first_error)
    quoted = _quote(evidence.first_error, phase)
    return "" if is_wrapper(quoted) else quoted


def _quote(block: str, phase: StartPhase) -> str:
    """Return what may be shown of a block: its exception, else its first line; once serving the exception's type."""
    found = _EXCEPTION.search(block)
    if phase is StartPhase.SERVING:
        return found["type"] if found else ""
    plain = (line.strip() for line in block.splitlines() if line.strip() and not line.startswith((" ", "Traceback (")))
    return (found["line"] if found else next(plain, ""))[:200]


def _fingerprint(raw: int, signature: Signature | None, evidence: ExitEvidence) -> str:
    if signature:
        return signature.id
    quoted = re.sub(r"0x[0-9a-fA-F]+|\d+", "#", _quote(evidence.first_error, StartPhase.LOADING))
    return f"status {raw}: {quoted}"
