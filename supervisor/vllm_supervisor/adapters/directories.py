"""The run and state directories: where they are, and that they are private and writable.

Rules:
* Run directory: the configured one, else `$RUNTIME_DIRECTORY` (systemd), else `$XDG_RUNTIME_DIR/vllm-supervisor/NAME`,
  else `/run/vllm-supervisor/NAME` for root, else a private directory under the temporary directory.
* State directory: the configured one, else `$STATE_DIRECTORY`, else `$XDG_STATE_HOME/vllm-supervisor/NAME`, which
  defaults to `~/.local/state`.
* What we make is 0700. In a directory that everybody can write (the temporary one) we only trust what is our own.
* The path of a Unix socket has 107 bytes on Linux, and some tools take fewer: ours stay under 100.
"""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from vllm_supervisor.core.errors import SetupError

CONTROL_SOCKET = "control.sock"

_NAME = "vllm-supervisor"
_SYSTEM = Path("/run")
_SERVICES_STATE = Path("/var/lib")  # where StateDirectory= of a system's unit is
_LONGEST_SOCKET = 99
_LONGEST_FILE_NAME = 28  # "/engine-RRRRRRRR-NNNNN.sock", the longest name we put into the run directory


def run_directory(configured: str, environ: Mapping[str, str], name: str) -> Path:
    """Return where the run directory of instance `name` is; nothing is made."""
    single = _single_run_directory(configured, environ)
    return single or next(_shared_run_directories(environ)) / name


def state_directory(configured: str, environ: Mapping[str, str], name: str) -> Path:
    """Return where the state directory of instance `name` is; nothing is made."""
    if configured:
        return Path(configured).expanduser().absolute()
    if given := _first(environ.get("STATE_DIRECTORY")):
        return given
    home = environ.get("XDG_STATE_HOME", "")
    base = Path(home) if home.startswith("/") else _home(environ) / ".local" / "state"
    return base / _NAME / name


def control_sockets(configured: str, environ: Mapping[str, str]) -> list[tuple[str, Path]]:
    """Return the (name, control socket) of every instance found where a run directory can be, alive or not.

    A configured directory, or one that systemd names, is the only place looked at: it names one instance.
    """
    places = control_places(configured, environ)
    single = _single_run_directory(configured, environ) is not None
    candidates = places if single else [entry for shared in places for entry in _entries(shared)]
    return [(entry.name, entry / CONTROL_SOCKET) for entry in candidates if _is_socket(entry / CONTROL_SOCKET)]


def state_directories(configured: str, environ: Mapping[str, str]) -> list[Path]:
    """Return every state directory where one of this user's instances, or a service's, can be; alive or not."""
    pattern = state_directory(configured, environ, "-")
    if pattern.name != "-":
        return [pattern]
    return [*_entries(pattern.parent), *_entries(_SERVICES_STATE / _NAME)]


def control_places(configured: str, environ: Mapping[str, str]) -> list[Path]:
    """Return the directories in which `control_sockets` looks, for people whose supervisor is in none of them."""
    single = _single_run_directory(configured, environ)
    return list(_shared_run_directories(environ)) if single is None else [single]


def prepare_run_directory(path: Path) -> None:
    """Make the run directory, and check that sockets can live in it. SetupError otherwise."""
    check_length(path)
    _prepare(path, "run directory", "run_dir")


def prepare_again(path: Path, configured: str, environ: Mapping[str, str], name: str) -> Path:
    """Make the run directory `path` of instance `name` once more, or the next one in which tools look; return it.

    A shared place can be gone for good (`/run/user/UID` after the last logout). Raises the first SetupError if none is to
    be had.
    """
    places = [path]
    if _single_run_directory(configured, environ) is None:
        places += [shared / name for shared in _shared_run_directories(environ) if shared / name != path]
    problem: SetupError | None = None
    for place in places:
        try:
            prepare_run_directory(place)
        except SetupError as error:
            problem = problem or error
        else:
            return place
    raise problem or SetupError(f"run directory {path} cannot be made")


def leave_run_directory(path: Path, configured: str, environ: Mapping[str, str]) -> None:
    """Remove the run directory if it is one of ours in a shared place, and nothing is left in it."""
    if _single_run_directory(configured, environ) is None:
        with contextlib.suppress(OSError):
            path.rmdir()


def check_length(path: Path) -> None:
    """Raise SetupError if the path of a socket in this run directory would be too long."""
    longest = len(os.fsencode(path)) + _LONGEST_FILE_NAME
    if longest > _LONGEST_SOCKET:
        raise SetupError(
            f"run directory {path}: the path of a socket in it would have {longest} bytes, and {_LONGEST_SOCKET} "
            "is the most; set run_dir to a shorter path"
        )


def check_writable(path: Path, key: str) -> None:
    """Raise SetupError if `path` could not be made or written; nothing is made. `key` configures it."""
    there = next(part for part in (path, *path.parents) if part.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise SetupError(f"{there} is no directory this user can write; set {key} to one")


def prepare_state_directory(path: Path) -> None:
    """Make the state directory and check that it can be written. SetupError otherwise."""
    _prepare(path, "state directory", "state_dir")


def _single_run_directory(configured: str, environ: Mapping[str, str]) -> Path | None:
    if configured:
        return Path(configured).expanduser().absolute()
    return _first(environ.get("RUNTIME_DIRECTORY"))


def _shared_run_directories(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the directories that hold one run directory an instance; a new one goes into the first."""
    xdg = environ.get("XDG_RUNTIME_DIR", "")
    if xdg.startswith("/") and Path(xdg).is_dir():  # after `su` it can name a directory that is not there
        yield Path(xdg) / _NAME
    if os.geteuid() == 0:
        yield _SYSTEM / _NAME
    yield _temporary(environ)
    if os.geteuid() != 0:
        yield _SYSTEM / _NAME  # a service's, which its `control.group` may let us use


def _temporary(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("TMPDIR") or tempfile.gettempdir()) / f"{_NAME}-{os.geteuid()}"


def _first(listed: str | None) -> Path | None:
    """Return the first of systemd's directories, which it separates by colons."""
    first = (listed or "").partition(":")[0]
    return Path(first) if first else None


def _home(environ: Mapping[str, str]) -> Path:
    try:
        return Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    except RuntimeError:
        raise SetupError("this user has no home directory for the ledgers; set state_dir") from None


def _entries(shared: Path) -> list[Path]:
    try:
        return sorted(shared.iterdir())
    except OSError:
        return []


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False


def _prepare(path: Path, what: str, key: str) -> None:
    mend = f"set {key} to a directory this user can write"
    try:
        for missing in reversed([part for part in (path, *path.parents) if not part.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise SetupError(f"{what} {path} cannot be made: {error.strerror}; {mend}") from None
    if not path.is_dir():
        raise SetupError(f"{what} {path} is not a directory; {mend}")
    for part in (path, *path.parents):
        if _is_open_to_all(part.parent) and not _is_ours(part):
            raise SetupError(
                f"{what} {path}: {part} is not this user's own, in a directory open to all; set {key} elsewhere"
            )
    if not os.access(path, os.W_OK | os.X_OK):
        raise SetupError(f"{what} {path} is not writable; {mend}")


def _is_open_to_all(path: Path) -> bool:
    return bool(path.stat().st_mode & stat.S_IWOTH)


def _is_ours(path: Path) -> bool:
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
