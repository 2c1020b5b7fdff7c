"""The tree of real processes: found however they hide, killed without mistake, proven gone."""

import os
import signal
import subprocess
import sys

import pytest

from fakes.custody import async_test, end, python, read_line
from vllm_supervisor.adapters import processes
from vllm_supervisor.adapters.child import Child, owned
from vllm_supervisor.adapters.processes import Abandoned, Leftovers, Tree, kill, start_ticks, watch
from vllm_supervisor.core.custody import Keeper, Kept, Marker
from vllm_supervisor.core.proc import ProcessId

MARKER = Marker("instance-of-this-test", "run-1", 1)

# The main process starts an engine core in a session of its own, which starts a worker in another; each tells its pid.
ENGINE = (
    "import os, signal\n"
    "def hold(pid):\n"
    "    os.setsid() if pid else None\n"
    "    os.write(1, b'%d\\n' % pid) if pid else None\n"
    "    while True: signal.pause()\n"
    "if not os.fork():\n"
    "    if not os.fork(): hold(os.getpid())\n"
    "    hold(os.getpid())\n"
    "hold(0)\n"
)


def engine(code: str = ENGINE, marker: Marker | None = MARKER) -> Child:
    """Spawn a stand-in for the engine."""
    return python(code, env=marker.variables() if marker else {})


def tree(child: Child, marker: Marker = MARKER) -> Tree:
    """Make a tree over it; this process is no subreaper."""
    return Tree(child.id, marker, spawned=owned, subreaper=False)


async def two_pids(child: Child) -> set[int]:
    """Read the two pids the stand-in prints."""
    return {int(await read_line(child.stdout)), int(await read_line(child.stdout))}


@async_test
async def test_the_whole_tree_is_found_with_its_facts() -> None:
    """One look shows main process, core and worker with parent, session, name and memory, and nobody else."""
    child = engine()
    try:
        below = await two_pids(child)
        look = {member.id.pid: member for member in tree(child).look()}
        assert set(look) == {child.pid, *below}
        main = look[child.pid]
        assert (main.ppid, main.sid, main.pgid, main.dead) == (os.getpid(), child.pid, child.pid, False)
        assert main.name.startswith("python")
        assert main.rss_bytes > 1 << 20
        assert {look[pid].sid for pid in below} == below
    finally:
        await tree(child).sweep(10)
        await end(child)


@async_test
async def test_orphans_are_found_by_the_marker_killed_and_proven_gone() -> None:
    """After KILL of the main process alone, a tree that never looked before finds both orphans and ends them."""
    child = engine()
    below = await two_pids(child)
    child.kill()
    assert await child.wait() == -signal.SIGKILL
    custody = tree(child)
    assert {member.id.pid for member in custody.remaining()} == below
    killed, left = await custody.sweep(10)
    assert ({member.id.pid for member in killed}, left) == (below, [])
    assert custody.remaining() == []
    await end(child)


@async_test
async def test_a_member_seen_once_stays_one_without_marker_session_or_parent() -> None:
    """A process that lost its environment's mark, its session and its parent is still ours if it was seen before."""
    hide = (
        "import os, signal, sys\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os.setsid()\n"
        "    code = 'import signal; print(0, flush=True); signal.pause()'\n"
        "    os.execve(sys.executable, [sys.executable, '-I', '-S', '-c', code], {})\n"
        "print(child, flush=True)\n"
        "signal.pause()\n"
    )
    child = engine(hide)
    hidden = max(await two_pids(child))
    custody = tree(child)
    assert {member.id.pid for member in custody.look()} == {child.pid, hidden}
    child.kill()
    await child.wait()
    assert {member.id.pid for member in custody.remaining()} == {hidden}
    killed, left = await custody.sweep(10)
    assert ([member.id.pid for member in killed], left) == ([hidden], [])
    await end(child)


@async_test
async def test_late_forks_do_not_escape() -> None:
    """A process that forks whenever it can is swept until a look finds nothing."""
    spread = (
        "import os, signal, time\n"
        "print('ready', flush=True)\n"
        "for generation in range(200):\n"
        "    if os.fork(): time.sleep(60)\n"
        "    os.setsid()\n"
    )
    child = engine(spread)
    assert await read_line(child.stdout) == "ready"
    killed, left = await tree(child).sweep(20)
    assert killed
    assert left == []
    assert await end(child) == -signal.SIGKILL
    assert tree(child).remaining() == []


@async_test
async def test_what_does_not_end_is_returned() -> None:
    """Waiting is bounded and returns what still runs."""
    child = engine()
    below = await two_pids(child)
    left = await tree(child).gone(0.05)
    assert {member.id.pid for member in left} == {child.pid, *below}
    await tree(child).sweep(10)
    await end(child)


@async_test
async def test_another_incarnation_is_a_stranger() -> None:
    """The marker of one incarnation finds none of another's processes."""
    child = engine()
    await two_pids(child)
    other = engine("import signal; print('ready', flush=True); signal.pause()", Marker(MARKER.instance, "run-1", 2))
    await read_line(other.stdout)
    assert [member.id for member in tree(other, Marker(MARKER.instance, "run-1", 2)).look()] == [other.id]
    await tree(child).sweep(10)
    assert other.send(0)
    await end(other)
    await end(child)


@async_test
async def test_kill_spares_a_process_that_only_has_the_pid() -> None:
    """A pid whose start time differs gets no signal."""
    child = engine("import signal; print('ready', flush=True); signal.pause()")
    await read_line(child.stdout)
    assert kill([ProcessId(child.pid, child.start_ticks - 1)]) == 0
    assert child.send(0)
    assert kill([child.id]) == 1
    assert await end(child) == -signal.SIGKILL
    assert kill([child.id]) == 0


@async_test
async def test_a_watched_process_tells_its_end() -> None:
    """The end of a core that is not our child is seen at once; one that has gone is gone at once."""
    child = engine()
    below = await two_pids(child)
    (core,) = (member.id.pid for member in tree(child).look() if member.id.pid in below and member.ppid == child.pid)
    process = ProcessId(core, start_ticks(core) or 0)
    os.kill(core, signal.SIGKILL)
    await watch(process)
    await tree(child).sweep(10)
    await end(child)
    await watch(process)
    await watch(child.id)


@async_test
async def test_leftovers_of_the_instance_are_swept() -> None:
    """Processes of an earlier run are found and ended; those of this run and of other instances live on."""
    old = engine()
    below = await two_pids(old)
    hold = "import signal; print('ready', flush=True); signal.pause()"
    ours = engine(hold, Marker(MARKER.instance, "run-2", 1))
    other = engine(hold, Marker("another-instance", "run-1", 1))
    await read_line(ours.stdout)
    await read_line(other.stdout)
    leftovers = Leftovers(MARKER.instance, "run-2")
    assert {member.id.pid for member in leftovers.look()} == {old.pid, *below}
    killed, left = await leftovers.sweep(10)
    assert {member.id.pid for member in killed} == {old.pid, *below}
    assert left == leftovers.look() == []
    assert ours.send(0)
    assert other.send(0)
    for child in (old, ours, other):
        await end(child)


def test_a_supervisor_with_the_mark_in_its_own_environment_is_no_leftover() -> None:
    """Started from within a marked environment, neither we nor our ancestors are ever swept."""
    code = (
        "import os; from vllm_supervisor.adapters.processes import Leftovers;"
        "print([one.id.pid for one in Leftovers('instance-of-this-test', 'mine').look()])"
    )
    env = {**os.environ, **MARKER.variables(), "PYTHONPATH": os.pathsep.join(sys.path)}
    assert (
        subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout
        == "[]\n"
    )


@async_test
async def test_a_title_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line of a member is read again only when its comm has changed: a wedged process can block the reader."""
    child = python("import sys; print('on', flush=True); sys.stdin.read()")
    await read_line(child.stdout)
    watched = tree(child)
    read: list[str] = []
    inner = processes._read

    def counted(path: str) -> bytes | None:
        read.append(path)
        return inner(path)

    monkeypatch.setattr(processes, "_read", counted)
    assert len({watched.look()[0].name for _ in range(3)}) == 1
    assert read.count(f"/proc/{child.pid}/cmdline") == 1
    await end(child)


def test_a_supervisor_that_proc_does_not_show_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hidepid, or without descriptors to look, a living supervisor is missing from the picture: nothing is ended."""
    keeper = Keeper(ProcessId(os.getppid(), 1), processes.namespaces())
    hidden = Abandoned("i", "r", "d", locked=lambda _path: None)
    fate = hidden._fate(os.getpid(), keeper, b"", {})
    assert fate is Kept.HIDDEN
    gone = Keeper(ProcessId(2**22 + 1, 1), processes.namespaces())  # above every pid there can be (proc(5): pid_max)
    assert hidden._fate(os.getpid(), gone, b"", {}) is Kept.NO
