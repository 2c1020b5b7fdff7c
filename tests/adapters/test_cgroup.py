"""A delegated cgroup is used, any other left alone; on trees that look as the kernel's do."""

import errno
import os
from pathlib import Path

import pytest

from vllm_supervisor.adapters.cgroup import Cgroup, EngineGroup, Unavailable, delegated, own_oom_kills, own_path

UNIT = "system.slice/vllm.service"


@pytest.fixture
def tree(tmp_path: Path) -> tuple[Path, Path]:
    """Make a mount of cgroup v2 with one unit in it, and a /proc whose process sits in that unit."""
    mount, proc = tmp_path / "cgroup", tmp_path / "proc"
    (mount / UNIT).mkdir(parents=True)
    (proc / "self").mkdir(parents=True)
    (mount / "cgroup.controllers").write_text("cpu memory\n")
    (mount / UNIT / "cgroup.procs").write_text("")
    (proc / "self/cgroup").write_text(f"0::/{UNIT}\n")
    return mount, proc


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let systemd's mark be on the unit (not every file system of a test carries such attributes)."""

    def getxattr(path: Path, name: str) -> bytes:
        if name == "user.delegate" and str(path).endswith(UNIT):
            return b"1"
        raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))

    monkeypatch.setattr(os, "getxattr", getxattr)


@pytest.mark.usefixtures("mark")
def test_a_delegated_unit_is_taken_over(tree: tuple[Path, Path]) -> None:
    """With systemd's mark we move into the leaf, ask for memory figures, and make a group for each engine."""
    mount, proc = tree
    found = delegated(mount, proc)
    assert found == Cgroup(mount / UNIT)
    assert (mount / UNIT / "supervisor/cgroup.procs").read_text() == str(os.getpid())
    assert (mount / UNIT / "cgroup.subtree_control").read_text() == "+memory"
    assert found.earlier_engines() == []
    assert found.engine(3) == EngineGroup(mount / UNIT / "engine-3")
    assert found.earlier_engines() == [EngineGroup(mount / UNIT / "engine-3")]


@pytest.mark.usefixtures("mark")
def test_an_exec_finds_itself_in_its_leaf(tree: tuple[Path, Path]) -> None:
    """Already inside the leaf, we find the delegated group above it."""
    mount, proc = tree
    (mount / UNIT / "supervisor").mkdir()
    (proc / "self/cgroup").write_text(f"1:name=systemd:/x\n0::/{UNIT}/supervisor\n")
    assert delegated(mount, proc) == Cgroup(mount / UNIT)


def test_a_writable_group_without_the_mark_is_somebody_elses(tree: tuple[Path, Path]) -> None:
    """Being able to write is not being allowed to: nothing is made and the reason is told."""
    mount, proc = tree
    found = delegated(mount, proc)
    assert isinstance(found, Unavailable)
    assert "Delegate=yes" in found.why
    assert [path.name for path in (mount / UNIT).iterdir()] == ["cgroup.procs"]


def test_the_root_of_a_namespace_is_ours_and_the_machines_is_not(tree: tuple[Path, Path]) -> None:
    """In a container with a writable cgroup our root counts as delegated; the machine's own root has no events."""
    mount, proc = tree
    (proc / "self/cgroup").write_text("0::/\n")
    (mount / "cgroup.procs").write_text("")
    assert isinstance(delegated(mount, proc), Unavailable)
    (mount / "cgroup.events").write_text("populated 1\n")
    assert delegated(mount, proc) == Cgroup(mount)


def test_machines_without_cgroup_v2_are_told(tmp_path: Path, tree: tuple[Path, Path]) -> None:
    """No mount, no /proc entry or version 1 alone: a sentence, never an exception."""
    mount, proc = tree
    assert own_path(tmp_path / "none", proc) == Unavailable(f"no cgroup v2 at {tmp_path / 'none'}")
    assert isinstance(own_path(mount, tmp_path / "none"), Unavailable)
    (proc / "self/cgroup").write_text("4:memory:/x\n")
    assert own_path(mount, proc) == Unavailable("we are in no cgroup v2")
    assert isinstance(own_oom_kills(), int | Unavailable)


def test_oom_kills_are_counted_where_memory_is(tmp_path: Path) -> None:
    """The kernel's count is read; without the controller the reason is a value."""
    group = EngineGroup(tmp_path)
    assert isinstance(group.oom_kills(), Unavailable)
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert group.oom_kills() == 2
    (tmp_path / "memory.events").write_text("low 0\n")
    assert isinstance(group.oom_kills(), Unavailable)


def test_a_group_moves_counts_kills_and_goes(tmp_path: Path) -> None:
    """Each act writes what the kernel's interface asks for and reports what it could not do."""
    group = EngineGroup(tmp_path / "engine-1")
    assert isinstance(group.add(7), Unavailable)
    assert not group.kill()
    assert group.pids() == []
    assert group.remove()
    group.path.mkdir()
    assert group.add(7) is None
    assert group.pids() == [7]
    assert group.kill()
    assert (group.path / "cgroup.kill").read_text() == "1"
    assert not group.remove()
