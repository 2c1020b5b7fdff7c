"""The guard's thread, and how its word reaches the lifecycle before the end it made."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from vllm_supervisor.adapters import child as children
from vllm_supervisor.adapters import clock
from vllm_supervisor.adapters.cgroup import Unavailable
from vllm_supervisor.adapters.kernel_log import KernelLog
from vllm_supervisor.adapters.kill_list import KillList
from vllm_supervisor.adapters.memory import MemoryReader
from vllm_supervisor.adapters.processes import Tree
from vllm_supervisor.core import facts
from vllm_supervisor.core.custody import Marker
from vllm_supervisor.core.memory import Crossing, GuardPolicy
from vllm_supervisor.core.proc import parse_stat
from vllm_supervisor.runtime.incarnation import Body, Incarnation, Readiness
from vllm_supervisor.runtime.memory_guard import GuardThread

SLEEPER = (sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)")


def set_available(proc: Path, gib: float) -> None:
    """Say how much of 100 GiB is available."""
    new = proc / "new"
    new.write_text(f"MemTotal: {100 << 20} kB\nMemAvailable: {int(gib * (1 << 20))} kB\n")
    new.replace(proc / "meminfo")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Give a process that lives until somebody ends it."""
    with subprocess.Popen(SLEEPER, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


class Guarded:
    """A guard over files, twenty looks a second, that counts its news."""

    def __init__(self, proc: Path) -> None:
        """Begin with 50 of 100 GiB available."""
        set_available(proc, 50.0)
        self.proc = proc
        self.killer = KillList()
        self.news = threading.Semaphore(0)
        self.thread = GuardThread(
            MemoryReader(proc), KernelLog(proc / "kmsg"), self.killer, GuardPolicy(interval=0.05), self.news.release
        )

    def wait(self) -> None:
        """Wait for news."""
        assert self.news.acquire(timeout=10.0), "no news within 10 s"

    def aim_at(self, process: subprocess.Popen[bytes]) -> None:
        """Guard it as engine 7."""
        self.killer.begin(7, parse_stat(Path(f"/proc/{process.pid}/stat").read_bytes()).id, None)


def test_the_floor_kills_and_is_told_once(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """The engine is dead, the shot names it with the look that crossed, and further looks below say nothing new."""
    guarded = Guarded(tmp_path)
    guarded.aim_at(sleeper)
    guarded.thread.start()
    set_available(tmp_path, 5.0)
    assert sleeper.wait(10.0) == -9
    guarded.wait()
    shot = guarded.thread.shot
    assert shot is not None
    assert (shot.incarnation, shot.state.crossing) == (7, Crossing.LEVEL)
    assert shot.reading.available == 5 << 30
    assert guarded.thread.minimum == 5 << 30
    seen = len(guarded.thread.recent)
    while len(guarded.thread.recent) < seen + 3:
        assert guarded.thread.fault is None
        os.sched_yield()
    assert guarded.thread.shot is shot
    guarded.thread.stop()


def test_an_engine_that_ended_by_itself_was_not_shot(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """A crash that only coincides with the floor is not the guard's doing."""
    guarded = Guarded(tmp_path)
    guarded.aim_at(sleeper)
    sleeper.kill()
    sleeper.wait(10.0)
    guarded.thread.start()
    set_available(tmp_path, 5.0)
    guarded.wait()
    assert guarded.thread.state.crossing is Crossing.LEVEL
    assert guarded.thread.shot is None
    guarded.thread.stop()


def test_a_fault_of_the_thread_is_handed_over(tmp_path: Path) -> None:
    """Nobody goes on believing that memory is guarded."""
    guarded = Guarded(tmp_path)
    guarded.thread.start()

    def fail() -> int:
        raise RuntimeError("broken")

    guarded.killer.fire = fail
    set_available(tmp_path, 5.0)
    guarded.wait()
    assert isinstance(guarded.thread.fault, RuntimeError)


class Memory:
    """Stands in for the keeper: whatever it is asked, it hears that engine 1 was shot."""

    on = True

    def __init__(self, told: list[facts.Fact]) -> None:
        """Tell into `told`."""
        self._told = told

    def hear(self) -> None:
        """Tell the floor, as the keeper does if the guard has shot."""
        self._told.append(facts.MemoryFloor(1, "floor"))

    def engine_seen(self, processes: Any) -> None:
        """See what it is aimed at."""
        list(processes)

    def read_kernel_log(self) -> None:
        """Read nothing."""

    def devices_in(self, _pids: Any) -> frozenset[int]:
        """Find no device."""
        return frozenset()

    def devices_seen(self, minors: frozenset[int]) -> None:
        """Take what was found."""
        assert minors == frozenset()

    def kernel_said(self, pids: Any, began: float, over: float) -> str:
        """Give the kernel's line about these processes."""
        assert began <= over
        return f"Out of memory: Killed process {min(pids)} (engine)"


def test_the_guards_word_comes_before_the_end_it_made(tmp_path: Path) -> None:
    """However the two race, MemoryFloor is told before Exited; the evidence holds what the kernel said."""
    told: list[facts.Fact] = []

    async def live() -> None:
        child = children.spawn(SLEEPER, {"PATH": os.defpath})
        marker = Marker("instance", "run", 1)
        tree = Tree(child.id, marker, spawned=children.owned, subreaper=False)
        body = Body(1, tmp_path, child, tree, Unavailable("none"), None, beacon_required=False, address=None)
        memory: Any = Memory(told)
        life = Incarnation(
            body,
            forward=lambda _lines: None,
            tell=told.append,
            memory=memory,
            started_at=clock.monotonic(),
            on_fault=lambda fault: pytest.fail(repr(fault)),
        )
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(life.run, Readiness(probe=False, api_key=None, request_id="r"))
                child.kill()
        evidence = life.evidence()
        assert evidence.unified_memory
        assert evidence.kernel_log == f"Out of memory: Killed process {child.pid} (engine)"

    trio.run(live)
    assert told[-2:] == [facts.MemoryFloor(1, "floor"), facts.Exited(-9)]
