"""The fate of a lost run, asked of real processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_supervisor.adapters.run_fate import boot_id, fate
from vllm_supervisor.core.accounts import RunAccount
from vllm_supervisor.core.audit import Fate
from vllm_supervisor.core.custody import RUN
from vllm_supervisor.core.proc import ProcessId, parse_stat


@contextmanager
def child(run: str = "") -> Iterator[ProcessId]:
    """Run a process that waits, with the mark of `run` in its environment."""
    environ = {RUN: run} if run else {}
    code = "import sys; print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with open(f"/proc/{process.pid}/stat", "rb") as file:  # noqa: PTH123 - one read
            yield parse_stat(file.read()).id
        process.communicate()


def run(name: str = "no-such-run", **fields: object) -> RunAccount:
    """Build the account of a run of this boot."""
    made = RunAccount(name, boot_id(), partial=False)
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def test_another_boot_proves_everything() -> None:
    """Nothing survives a boot, not even a process with the same pid."""
    with child() as one:
        made = run(engine_processes={one}, pid=one.pid, start=one.start_ticks)
        made.boot = "another"
        assert fate(made, boot_id()) is Fate.GONE


def test_a_living_supervisor_is_alive() -> None:
    """A run whose supervisor still lives is left alone."""
    with child() as one:
        assert fate(run(pid=one.pid, start=one.start_ticks), boot_id()) is Fate.ALIVE


def test_a_reused_pid_is_not_the_same_process() -> None:
    """The same pid with another start time is somebody else."""
    with child() as one:
        made = run(pid=one.pid, start=one.start_ticks - 1, engine_processes={ProcessId(one.pid, one.start_ticks - 1)})
        assert fate(made, boot_id()) is Fate.GONE


def test_a_living_engine_process_leaves_it_unproven() -> None:
    """One process of the engine that still lives is enough."""
    with child() as one:
        made = run(engine_processes={one})
        assert fate(made, boot_id()) is Fate.UNPROVEN
    assert fate(made, boot_id()) is Fate.GONE


def test_a_marked_process_leaves_it_unproven() -> None:
    """A process that carries the run's mark is the engine's, whether the ledger names it or not."""
    name = f"marked-{os.getpid()}"
    with child(name):
        assert fate(run(name), boot_id()) is Fate.UNPROVEN
    assert fate(run(name), boot_id()) is Fate.GONE


def test_our_own_pid_is_not_the_lost_run_s() -> None:
    """As PID 1 of a container the next supervisor has the lost one's pid: that is no sign of life."""
    assert fate(run(pid=os.getpid(), start=0), boot_id()) is Fate.GONE
