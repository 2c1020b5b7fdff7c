"""Where the run and state directories are, and what they must be."""

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_supervisor.adapters import directories
from vllm_supervisor.core.errors import SetupError


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a directory whose path is short enough for sockets."""
    return tmp_path_factory.mktemp("d")


@pytest.mark.parametrize(
    ("configured", "environ", "expected"),
    [
        ("/c", {"RUNTIME_DIRECTORY": "/s", "XDG_RUNTIME_DIR": "/"}, "/c"),
        ("", {"RUNTIME_DIRECTORY": "/s:/t", "XDG_RUNTIME_DIR": "/"}, "/s"),
        ("", {"XDG_RUNTIME_DIR": "/"}, "/vllm-supervisor/n"),
    ],
)
def test_run_directory(configured: str, environ: dict[str, str], expected: str) -> None:
    """Configured, else systemd's first, else the user's runtime directory."""
    assert directories.run_directory(configured, environ, "n") == Path(expected)


@pytest.mark.parametrize("xdg", ["", "relative", "/does/not/exist"])
@pytest.mark.parametrize(("uid", "expected"), [(0, "/run/vllm-supervisor/n"), (1234, "/t/vllm-supervisor-1234/n")])
def test_run_directory_without_a_session(monkeypatch: pytest.MonkeyPatch, xdg: str, uid: int, expected: str) -> None:
    """Without a runtime directory that exists: /run for root, a private one in the temporary directory for others."""
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert directories.run_directory("", {"XDG_RUNTIME_DIR": xdg, "TMPDIR": "/t"}, "n") == Path(expected)


@pytest.mark.parametrize(
    ("configured", "environ", "expected"),
    [
        ("/c", {"STATE_DIRECTORY": "/s"}, "/c"),
        ("", {"STATE_DIRECTORY": "/s:/t", "XDG_STATE_HOME": "/x"}, "/s"),
        ("", {"XDG_STATE_HOME": "/x", "HOME": "/h"}, "/x/vllm-supervisor/n"),
        ("", {"XDG_STATE_HOME": "relative", "HOME": "/h"}, "/h/.local/state/vllm-supervisor/n"),
        ("", {"HOME": "/h"}, "/h/.local/state/vllm-supervisor/n"),
    ],
)
def test_state_directory(configured: str, environ: dict[str, str], expected: str) -> None:
    """Configured, else systemd's first, else XDG's, else below the home directory."""
    assert directories.state_directory(configured, environ, "n") == Path(expected)


def test_what_is_made_is_private(short: Path) -> None:
    """Directories we make, their parents included, are for their owner alone; what is there is left as it is."""
    short.chmod(0o755)
    for prepare, path in (
        (directories.prepare_run_directory, short / "r" / "n"),
        (directories.prepare_state_directory, short / "s" / "n"),
    ):
        prepare(path)
        prepare(path)
        assert [stat.S_IMODE(made.stat().st_mode) for made in (path, path.parent)] == [0o700, 0o700]
        assert list(path.iterdir()) == []
    assert stat.S_IMODE(short.stat().st_mode) == 0o755


def test_a_long_path_is_refused(tmp_path: Path) -> None:
    """A run directory too deep for a socket's path is refused, with the numbers and the key, before it is made."""
    path = tmp_path / ("x" * 90)
    with pytest.raises(SetupError, match="set run_dir to a shorter path"):
        directories.prepare_run_directory(path)
    assert not path.exists()


def test_only_an_empty_directory_of_ours_is_removed(short: Path) -> None:
    """In a shared place the empty run directory goes; with something in it, or where somebody else chose it, it stays."""
    shared, environ = short / "r", {"XDG_RUNTIME_DIR": str(short)}
    (shared / "used" / "x").mkdir(parents=True)
    for name, configured, stays in (("used", "", True), ("chosen", str(shared / "chosen"), True), ("own", "", False)):
        path = shared / name
        path.mkdir(exist_ok=True)
        directories.leave_run_directory(path, configured, environ)
        assert path.exists() is stays, name
    directories.leave_run_directory(shared / "chosen", "", {"RUNTIME_DIRECTORY": str(shared / "chosen")})
    assert (shared / "chosen").exists()
    directories.leave_run_directory(shared / "own", "", environ)  # gone already


def test_a_file_in_the_way_is_told(short: Path) -> None:
    """A file where the directory should be, or should stand, is told with the path and the key."""
    (short / "f").touch()
    for path in (short / "f", short / "f" / "n"):
        with pytest.raises(SetupError, match=r"set state_dir to a directory this user can write") as caught:
            directories.prepare_state_directory(path)
        assert str(path) in str(caught.value)


def test_a_read_only_place_is_told() -> None:
    """A directory in which nothing can be written is told, for root as well."""
    with pytest.raises(SetupError, match="set run_dir to a directory this user can write"):
        directories.prepare_run_directory(Path("/proc/self"))


def test_what_others_can_write_is_refused(short: Path) -> None:
    """A directory others can write, or one below it, is refused with the command that helps; nothing is made in it."""
    (short / "open").mkdir()
    (short / "open").chmod(0o777)
    for path in (short / "open", short / "open" / "n" / "m"):
        with pytest.raises(SetupError) as caught:
            directories.prepare_state_directory(path)
        told = f"{short}/open can be written by everybody; chmod go-w {short}/open, or set state_dir to another"
        assert told.replace("chmod go-w", "chmod o-w") in str(caught.value).replace("chmod go-w", "chmod o-w")
        assert caught.value.status == 78
    assert list((short / "open").iterdir()) == []
    (short / "open").chmod(0o1777)  # as the temporary directory: what is ours in it is safe
    directories.prepare_state_directory(short / "open" / "n" / "m")
    with pytest.raises(SetupError, match="choose a directory below it"):
        directories.prepare_run_directory(short / "open")


def test_a_run_directory_is_closed_to_others(short: Path) -> None:
    """One that others can enter or list is tightened; a state directory may be listed."""
    for prepare, mode in ((directories.prepare_run_directory, 0o700), (directories.prepare_state_directory, 0o755)):
        (short / "d").mkdir(exist_ok=True)
        (short / "d").chmod(0o755)
        prepare(short / "d")
        assert stat.S_IMODE((short / "d").stat().st_mode) == mode


def test_links_are_followed_and_their_targets_judged(short: Path) -> None:
    """A service manager links a state directory to its private one; a link that leads where others can write is refused."""
    (short / "private" / "x").mkdir(parents=True, mode=0o700)
    (short / "x").symlink_to("private/x")
    (short / "far").symlink_to(short / "x")
    directories.prepare_state_directory(short / "far" / "n")
    assert (short / "private" / "x" / "n").is_dir()
    (short / "private").chmod(0o777)
    for path in (short / "x", short / "far", short / "far" / ".." / "x"):
        with pytest.raises(SetupError, match="private can be written by everybody"):
            directories.prepare_state_directory(path)
    (short / "round").symlink_to("round")
    with pytest.raises(SetupError, match="Too many levels of symbolic links"):
        directories.prepare_state_directory(short / "round")
    (short / "dangling").symlink_to("nowhere")
    with pytest.raises(SetupError, match=r"cannot be made: File exists; set state_dir"):
        directories.prepare_state_directory(short / "dangling")


def test_a_runtime_directory_of_another_user_is_not_taken(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `su` the variable names the first user's: neither a new run directory nor an instance is looked for there."""
    environ = {"XDG_RUNTIME_DIR": str(short), "TMPDIR": "/t"}
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert directories.run_directory("", environ, "n") == Path("/t/vllm-supervisor-4711/n")


def test_control_sockets_are_found(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every instance's socket in the shared places is found by name; files of another kind are not."""
    monkeypatch.setattr(directories, "_SYSTEM", short / "run")
    for name in ("b", "a"):
        (short / "vllm-supervisor" / name).mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(short / "vllm-supervisor" / name / "control.sock"))
    (short / "vllm-supervisor" / "c").mkdir()
    (short / "vllm-supervisor" / "c" / "control.sock").touch()
    found = directories.control_sockets("", {"XDG_RUNTIME_DIR": str(short), "TMPDIR": str(short / "none")})
    assert found == [(name, short / "vllm-supervisor" / name / "control.sock") for name in ("a", "b")]
    chosen = directories.control_sockets(str(short / "vllm-supervisor" / "b"), {"XDG_RUNTIME_DIR": "/"})
    assert chosen == [("b", short / "vllm-supervisor" / "b" / "control.sock")]


@pytest.mark.parametrize("prepare", [directories.prepare_run_directory, directories.prepare_state_directory])
def test_a_volume_that_is_trusted_is_taken_and_made_private(prepare: Callable[..., None], short: Path) -> None:
    """A way that others can write is refused with the key that takes it; then the directory itself is closed to them."""
    (short / "volume").mkdir()
    (short / "volume").chmod(0o777)
    path = short / "volume" / "n"
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(SetupError, match="trust_directories = true"):
        prepare(path)
    prepare(path, trusted=True)
    assert path.stat().st_mode & 0o777 == 0o700
