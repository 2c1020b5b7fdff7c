"""Supervisors of other users, as far as they can be seen."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_supervisor.adapters import closed_instances
from vllm_supervisor.cli.main import main


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a shared place with an instance `a` that is closed to us, and `b` that is not."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "a" and access(path, mode))
    return tmp_path


@pytest.fixture
def running() -> Iterator[subprocess.Popen[bytes]]:
    """Give a process of this user that is called as a supervisor is."""
    with subprocess.Popen(["/opt/bin/vllm-supervisor", "60"], executable="/bin/sleep") as process:
        yield process
        process.kill()


def test_one_that_runs_is_found(closed: Path, running: subprocess.Popen[bytes]) -> None:
    """By its directory and its owner's process; the sentence names both ways in."""
    found = closed_instances.find([closed / "none", closed], None)
    assert found is not None
    assert found.directory == closed / "a"
    assert closed_instances.find([closed], "a") is not None
    assert closed_instances.find([closed], "b") is None
    assert "not accessible to you: use sudo" in str(found)
    assert "SupplementaryGroups=GROUP" in str(found)


def test_a_directory_alone_proves_nothing(closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed supervisor left behind is not said to run; no more than a process of somebody else."""
    monkeypatch.setattr(closed_instances, "_COMMANDS", (b"no-such-command",))
    assert closed_instances.find([closed], None) is None


def test_a_place_that_may_not_be_listed_may_hold_one(
    closed: Path, running: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root's own directory is private as a whole."""

    def refuse(_path: Path) -> None:
        raise PermissionError

    proc = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: refuse(path) if path == closed else proc(path))
    found = closed_instances.find([closed], "any")
    assert found is not None
    assert found.directory == closed


def test_status_says_so(
    closed: Path,
    running: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A tool without access says that one runs, with status 1, where it would say that none does."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(closed.parent / "x"))
    (closed.parent / "x").mkdir()
    (closed.parent / "x" / "vllm-supervisor").symlink_to(closed)
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    assert main(["status", "--name", "a"]) == 1
    assert "not accessible to you" in capsys.readouterr().err
    assert main(["status", "--name", "b"]) == 3
