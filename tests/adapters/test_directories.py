"""Where the run and state directories are, and what they must be."""

import os
import socket
import stat
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


def test_what_is_not_ours_in_an_open_directory_is_not_trusted(short: Path) -> None:
    """In a directory that everybody can write, a link or a directory others may write is refused."""
    short.chmod(0o1777)
    (short / "mine").mkdir(mode=0o700)
    (short / "link").symlink_to(short / "mine")
    (short / "open").mkdir()
    (short / "open").chmod(0o777)
    directories.prepare_state_directory(short / "mine" / "n")
    for planted in ("link", "open"):
        with pytest.raises(
            SetupError, match=f"{planted} is not this user's own, in a directory open to all; set state_dir elsewhere"
        ):
            directories.prepare_state_directory(short / planted / "n")


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
