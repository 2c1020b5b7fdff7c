"""Which supervisor a tool means without a name: what run and state directories tell together."""

from pathlib import Path

import pytest

from vllm_supervisor.core.instances import Locked, Reached, also, ambiguous, flock_holders, others, unreachable
from vllm_supervisor.core.plan import Holder

A = Locked(Holder("8000", 10, "aa"), Path("/s/8000"))
B = Locked(Holder("8001", 11, "bb"), Path("/s/8001"))
SERVICE = Locked(Holder("8002", 12, "cc"), Path("/var/lib/vllm-supervisor/user"))


@pytest.mark.parametrize(
    ("reached", "locked", "left"),
    [
        (Reached("8000", 10), [], []),
        (Reached("8000", 10), [A], []),
        (Reached("8000", 10), [A, B], [B]),
        (Reached("8000", 10), [B], [B]),
        # by the pid, the name, or the directory's name where a service manager chose it
        (Reached("chosen", 10), [A], []),
        (Reached("8000", 0), [A, B], [B]),
        (Reached("user", 0), [SERVICE], []),
        (Reached("user", 12), [SERVICE, A], [A]),
    ],
)
def test_who_is_there_besides(reached: Reached, locked: list[Locked], left: list[Locked]) -> None:
    """Whoever holds a lock and is not the one that was reached runs besides it."""
    assert others(reached, locked) == left


def test_sentences_name_them() -> None:
    """Each sentence names who runs, by name and pid, and what to do."""
    assert "8001 (pid 11, state directory /s/8001); choose one with --name" in ambiguous(Reached("8000", 10), [B])
    assert "8001 (pid 11" in also([B])
    assert "`kill -TERM 10 11`" in unreachable([A, B])


def test_the_kernels_table_of_locks() -> None:
    """Held flocks are found by inode and pid; waiters, other kinds and rubbish are passed over."""
    table = (
        "1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF\n"
        "2: -> FLOCK  ADVISORY  WRITE 99 08:01:5678 0 EOF\n"
        "3: POSIX  ADVISORY  WRITE 55 08:01:5679 0 EOF\n"
        "4: FLOCK  ADVISORY  READ 56 08:01:5680 0 EOF\n"
        "5: FLOCK  ADVISORY  WRITE x 08:01:y 0 EOF\nrubbish\n"
    )
    assert flock_holders(table) == {5678: {1234}}
