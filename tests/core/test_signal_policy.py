"""The table of signals, cell by cell."""

from collections.abc import Set as AbstractSet
from itertools import chain, combinations

import pytest

from vllm_supervisor.core.signal_policy import (
    FORWARDABLE,
    HANDLING,
    OTHER,
    TABLE,
    Action,
    Condition,
    Handling,
    decide,
    to_read,
)
from vllm_supervisor.core.words import Phase

IGNORED, TERMINAL, HASTENED, LISTED = (
    Condition.IGNORED_AT_START,
    Condition.TERMINAL,
    Condition.HASTENED,
    Condition.LISTED,
)
BEFORE_END = [phase for phase in Phase if phase is not Phase.ENDED]
STOPPING = [Phase.ADMISSION_STOP, Phase.DRAINING, Phase.DOCUMENTING]
ALL_CONDITIONS = [frozenset(c) for c in chain.from_iterable(combinations(Condition, n) for n in range(5))]

# signal, phases, conditions that matter, what is done
CELLS: list[tuple[str, list[Phase], set[Condition], Action]] = [
    *((stop, [Phase.RUNNING], set(), Action.STOP) for stop in ("SIGTERM", "SIGINT")),
    *((stop, [Phase.RUNNING], {TERMINAL}, Action.STOP) for stop in ("SIGTERM", "SIGINT")),
    *((stop, STOPPING, set(), Action.HASTEN) for stop in ("SIGTERM", "SIGINT")),
    *((stop, STOPPING, {HASTENED}, Action.KILL) for stop in ("SIGTERM", "SIGINT")),
    ("SIGHUP", [Phase.RUNNING], set(), Action.RELOAD),
    ("SIGHUP", [Phase.RUNNING], {TERMINAL}, Action.STOP),
    ("SIGHUP", [Phase.RUNNING], {IGNORED}, Action.IGNORE),
    ("SIGHUP", [Phase.RUNNING], {IGNORED, TERMINAL}, Action.IGNORE),
    ("SIGHUP", STOPPING, set(), Action.IGNORE),
    ("SIGHUP", STOPPING, {TERMINAL}, Action.IGNORE),
    ("SIGQUIT", BEFORE_END, set(), Action.EVIDENCE),
    ("SIGQUIT", BEFORE_END, {TERMINAL}, Action.EVIDENCE),
    ("SIGUSR1", BEFORE_END, set(), Action.REOPEN_LOGS),
    ("SIGXCPU", [Phase.RUNNING], set(), Action.STOP),
    ("SIGXCPU", STOPPING, {HASTENED}, Action.IGNORE),
    ("SIGUSR1", BEFORE_END, {LISTED}, Action.REOPEN_LOGS),
    *((other, BEFORE_END, set(), Action.IGNORE) for other in ("SIGUSR2", "SIGWINCH", "signal 40")),
    *((other, BEFORE_END, {LISTED}, Action.FORWARD) for other in ("SIGUSR2", "SIGWINCH", "signal 40")),
]


@pytest.mark.parametrize(("signal", "phases", "conditions", "action"), CELLS)
def test_a_cell_decides(signal: str, phases: list[Phase], conditions: set[Condition], action: Action) -> None:
    """Each signal does in each phase what its cell says."""
    for phase in phases:
        assert decide(signal, phase, conditions) is action, phase


@pytest.mark.parametrize("signal", [*TABLE, "SIGUSR2"])
def test_nothing_happens_after_the_end(signal: str) -> None:
    """Once ended, every signal is ignored under every condition."""
    for conditions in ALL_CONDITIONS:
        assert decide(signal, Phase.ENDED, conditions) is Action.IGNORE


def test_the_table_is_whole() -> None:
    """Every signal has a cell for every phase, and every cell ends in a case that always holds."""
    for row in TABLE.values():
        assert list(row) == list(Phase)
        for cell in row.values():
            conditions = [condition for condition, _ in cell]
            assert conditions[-1] is None
            assert None not in conditions[:-1]
    assert {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGXCPU", OTHER} == TABLE.keys()


def test_a_repeated_stop_goes_down_and_never_up() -> None:
    """Three signals in a row stop, hasten and kill, whatever phases lie between them."""
    ladder = [Action.STOP, Action.HASTEN, Action.KILL]
    for second in STOPPING:
        for third in STOPPING[STOPPING.index(second) :]:
            seen = [
                decide("SIGTERM", Phase.RUNNING, set()),
                decide("SIGINT", second, set()),
                decide("SIGTERM", third, {HASTENED}),
            ]
            assert seen == ladder


@pytest.mark.parametrize("conditions", ALL_CONDITIONS)
def test_hup_and_usr1_never_reach_the_engine(conditions: AbstractSet[Condition]) -> None:
    """No condition forwards HUP or USR1, of which vLLM dies, nor a stop."""
    for signal in ("SIGHUP", "SIGUSR1", "SIGTERM", "SIGINT", "SIGQUIT"):
        for phase in Phase:
            assert decide(signal, phase, conditions) is not Action.FORWARD


def test_only_harmless_signals_may_be_listed() -> None:
    """What is ours, what cannot be caught and what a fault raises cannot be forwarded."""
    assert {"SIGUSR2", "SIGWINCH", "SIGCONT"} <= FORWARDABLE
    assert not FORWARDABLE & {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGKILL", "SIGSTOP", "SIGSEGV"}


# The kernel's own action of every signal, from signal(7); real-time ones end a process.
STOPS, NOTHING, CONTINUES = {19, 20, 21, 22}, {17, 23, 28}, {18}


@pytest.mark.parametrize("number", range(1, 65))
def test_no_signal_ends_us_unasked(number: int) -> None:
    """Of all 64 only KILL and ABRT do; what would end a process is read or discarded, the rest is left to the kernel."""
    handling = HANDLING[number]
    if number in {6, 9}:
        assert handling is Handling.FATAL
    elif number in STOPS | NOTHING | CONTINUES:
        assert handling is (Handling.READ if number == 17 else Handling.DEFAULT)
    else:
        assert handling is (Handling.IGNORED if number in {13, 25, 32, 33} else Handling.READ)
    assert (number in to_read(())) is (handling is Handling.READ)


def test_what_is_passed_on_is_read() -> None:
    """A signal that is listed is received, whatever the kernel would do with it."""
    assert to_read(("SIGWINCH", "SIGCONT")) - to_read(()) == {28, 18}


@pytest.mark.parametrize("number", range(1, 65))
def test_what_has_no_row_is_ignored(number: int) -> None:
    """A stray signal does nothing, in no phase; a fault's signal that was sent is one."""
    name = f"signal {number}"
    for phase in Phase:
        assert decide(name, phase, set()) is Action.IGNORE
    assert decide("SIGSEGV", Phase.RUNNING, set()) is Action.IGNORE
