"""One supervisor a state directory."""

import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_supervisor.adapters.lock import StateLock
from vllm_supervisor.core.errors import SetupError

HOLD = (
    "import sys, pathlib; from vllm_supervisor.adapters.lock import StateLock\n"
    "lock = StateLock(pathlib.Path(sys.argv[1]), run='run-1', name='gpu')\n"
    "print(lock.instance, flush=True); sys.stdin.read()\n"
)
RUNS = "supervisor '8000' (pid PID) runs already: stop it with vllm-supervisor --name 8000 stop"


def test_the_second_is_told_who_holds_it(tmp_path: Path) -> None:
    """The holder's pid, run and name stand in the refusal, and its death frees the directory."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    state = tmp_path / "state"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(state)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        instance = first.stdout.readline().strip()
        with pytest.raises(SetupError, match=rf"held by the supervisor 'gpu' \(pid {first.pid}, run run-1\)") as caught:
            StateLock(state, run="run-2", name="gpu")
        assert caught.value.status == 78
        first.kill()
        first.wait(30)
        lock = StateLock(state, run="run-2", name="gpu")
        assert lock.instance == instance
        lock.release()


@pytest.mark.parametrize(
    ("name", "port_option", "told"),
    [
        ("8000", "--port", f"{RUNS}, or choose another --port"),
        ("8000", "listen.port", f"{RUNS}, or choose another listen.port"),
        ("8000", "", "STATE is held by the supervisor '8000' (pid PID, run r); use another --name or state_dir"),
        ("9000", "--port", "STATE is held by the supervisor '8000' (pid PID, run r); use another --name or state_dir"),
    ],
)
def test_a_second_start_is_told_what_to_do(tmp_path: Path, name: str, port_option: str, told: str) -> None:
    """Where the port made the name, the first one can be stopped or another port taken; else only the places help."""
    lock = StateLock(tmp_path, run="r", name="8000", port_option="--port")
    with pytest.raises(SetupError) as caught:
        StateLock(tmp_path, run="r2", name=name, port_option=port_option)
    assert str(caught.value) == told.replace("STATE", f"state directory {tmp_path}").replace("PID", str(os.getpid()))
    lock.release()


def test_the_directory_and_the_file_are_private(tmp_path: Path) -> None:
    """What we make is ours alone to read."""
    state = tmp_path / "a" / "b"
    StateLock(state, run="r", name="n").release()
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert stat.S_IMODE((state / "lock").stat().st_mode) == 0o600


def test_an_unreadable_holder_is_still_a_holder(tmp_path: Path) -> None:
    """If the file says nothing yet, the refusal does not guess."""
    lock = StateLock(tmp_path, run="r", name="n")
    (tmp_path / "lock").write_text("")
    with pytest.raises(SetupError, match="held by another supervisor"):
        StateLock(tmp_path, run="r", name="n")
    lock.release()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"[" * 4096, "held by another supervisor"),
        (b'{"name": "n", "pid": 1e400, "run": "r"}', "held by another supervisor"),
        (b'{"name": "n", "pid": "x", "run": "r"}', "held by another supervisor"),
        (b'{"name": "n", "pid": true, "run": "r"}', "held by another supervisor"),
        (b'{"name": [], "pid": 7, "run": "r"}', "held by another supervisor"),
        (b"[]", "held by another supervisor"),
        (bytes(4096), "held by another supervisor"),
        (b"\xff", "held by another supervisor"),
        (b'{"name": "\\ud800\\u001b[2J", "pid": 7, "run": "r"}', "held by the supervisor '??[2J' (pid 7, run r)"),
    ],
)
def test_whatever_the_file_says_is_one_line(tmp_path: Path, text: bytes, told: str) -> None:
    """It names a holder, printably, or nobody; the lock holds all the same."""
    lock = StateLock(tmp_path, run="r", name="n")
    (tmp_path / "lock").write_bytes(text)
    with pytest.raises(SetupError) as caught:
        StateLock(tmp_path, run="r", name="n")
    assert told in str(caught.value)
    assert str(caught.value).isprintable()
    lock.release()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (Path.mkdir, "Is a directory"),
        (os.mkfifo, ".*/lock is not ours: it is no regular file; remove it"),
        (lambda path: path.symlink_to("elsewhere"), "Too many levels of symbolic links"),
    ],
)
def test_what_stands_in_the_place_of_the_file_is_named(
    tmp_path: Path, make: Callable[[Path], object], told: str
) -> None:
    """It is not followed, not waited for and not locked."""
    make(tmp_path / "lock")
    with pytest.raises(SetupError, match=f"{tmp_path} cannot be used: {told}"):
        StateLock(tmp_path, run="r", name="n")
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_takes_only_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock holds without the words in it."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        lock = StateLock(tmp_path, run="r", name="n")
    with pytest.raises(SetupError, match="held by another supervisor"):
        StateLock(tmp_path, run="r", name="n")
    lock.release()


def test_another_directory_is_another_instance(tmp_path: Path) -> None:
    """The instance follows the directory itself, not its name."""
    first = StateLock(tmp_path / "s", run="r", name="n")
    first.release()
    (tmp_path / "s").rename(tmp_path / "moved")
    second = StateLock(tmp_path / "s", run="r", name="n")
    second.release()
    assert first.instance != second.instance


@pytest.mark.parametrize("where", ["/proc/nothing", "/dev/null/x"])
def test_a_directory_that_cannot_be_is_named(where: str) -> None:
    """The refusal names the directory and the setting."""
    with pytest.raises(SetupError, match=rf"{where} cannot be used: .*; set state_dir"):
        StateLock(Path(where), run="r", name="n")


def test_a_removed_directory_is_made_and_locked_again(tmp_path: Path) -> None:
    """The holder takes the lock of the new directory with the same text, and the next one is refused as before."""
    state = tmp_path / "s"
    lock = StateLock(state, run="r", name="n")
    told = (state / "lock").read_text()
    assert lock.there()
    shutil.rmtree(state)
    assert not lock.there()
    lock.again()
    assert lock.there()
    assert (state / "lock").read_text() == told
    with pytest.raises(SetupError, match="held by the supervisor 'n'"):
        StateLock(state, run="r2", name="n2")
    lock.release()


def test_a_removed_directory_that_somebody_else_took_is_theirs(tmp_path: Path) -> None:
    """The former holder is told who has it, and gets it when they let it go."""
    state = tmp_path / "s"
    lock = StateLock(state, run="r", name="n")
    shutil.rmtree(state)
    rival = StateLock(state, run="r2", name="rival")
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(BlockingIOError, match=r"is held by the supervisor 'rival' \(pid \d+, run r2\)"):
        lock.again()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    rival.release()
    lock.again()
    lock.release()
