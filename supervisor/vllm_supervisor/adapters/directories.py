"""The run and state directories: where they are, and that they are private and writable.

Rules:
* Run directory: the configured one, else `$RUNTIME_DIRECTORY` (systemd), else `$XDG_RUNTIME_DIR/vllm-supervisor/NAME`,
  else `/run/vllm-supervisor/NAME` for root, else a private directory under the temporary directory.
* State directory: the configured one, else `$STATE_DIRECTORY`, else `$XDG_STATE_HOME/vllm-supervisor/NAME`, which
  defaults to `~/.local/state`.
* What we make is 0700. A directory that another user can write, own or replace is refused (core.private_paths); the path
  is walked from the root down, links followed one by one, so that what was judged cannot change behind our back.
* A run directory that others can only enter or list is tightened to 0700: engines make sockets that everybody may use.
* The path of a Unix socket has 107 bytes on Linux, and some tools take fewer: ours stay under 100.
"""

import contextlib
import errno
import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from vllm_supervisor.core import private_paths
from vllm_supervisor.core.errors import SetupError
from vllm_supervisor.core.private_paths import Account, Group, Identity, Kind, Step, UntrustedError, Verdict

CONTROL_SOCKET = "control.sock"

_NAME = "vllm-supervisor"
_SYSTEM = Path("/run")
_SERVICES_STATE = Path("/var/lib")  # where StateDirectory= of a system's unit is
_LONGEST_SOCKET = 99
_LONGEST_FILE_NAME = 28  # "/engine-RRRRRRRR-NNNNN/sock", the longest path of a socket below the run directory
_MOST_LINKS = 40  # followed on one path, as the kernel does


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


def prepare_run_directory(path: Path, *, trusted: bool = False) -> None:
    """Make the run directory, for us alone, and check that sockets can live in it. SetupError otherwise."""
    check_length(path)
    _prepare(path, "run directory", "run_dir", secret=True, trusted=trusted)


def prepare_again(path: Path, configured: str, environ: Mapping[str, str], name: str, *, trusted: bool = False) -> Path:
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
            prepare_run_directory(place, trusted=trusted)
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
    try:
        _judge(path, _identity(), secret=key == "run_dir")
    except UntrustedError as refused:
        raise SetupError(refused.sentence(key)) from None


def prepare_state_directory(path: Path, *, trusted: bool = False) -> None:
    """Make the state directory and check that it can be written, by us alone. SetupError otherwise."""
    _prepare(path, "state directory", "state_dir", secret=False, trusted=trusted)


def _single_run_directory(configured: str, environ: Mapping[str, str]) -> Path | None:
    if configured:
        return Path(configured).expanduser().absolute()
    return _first(environ.get("RUNTIME_DIRECTORY"))


def _shared_run_directories(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the directories that hold one run directory an instance; a new one goes into the first."""
    xdg = environ.get("XDG_RUNTIME_DIR", "")
    if xdg.startswith("/") and _is_own_directory(
        xdg
    ):  # after `su` it can name another user's, or one that is not there
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
    """List the instances of a shared place; a directory that another user put there has none of ours."""
    try:
        found = shared.lstat()
        return sorted(shared.iterdir()) if found.st_uid in (0, os.geteuid()) else []
    except OSError:
        return []


def _is_own_directory(path: str) -> bool:
    try:
        found = os.stat(path)  # noqa: PTH116 - beside the bare text it was given as
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False


def _prepare(path: Path, what: str, key: str, *, secret: bool, trusted: bool) -> None:
    """Make `path` and judge it. The steps that are there are judged before anything is made in them.

    `trusted`: by the configuration's word nobody else can reach it (`trust_directories`); it is only made private.
    """
    mend = f"set {key} to a directory this user can write"
    us = _identity()
    try:
        if not trusted:
            _judge(path, us, secret=secret)
        for missing in reversed([part for part in (path, *path.parents) if not part.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
        if trusted:
            with contextlib.suppress(PermissionError):  # a volume that forces its owners lets nobody
                path.chmod(0o700)
        elif _judge(path, us, secret=secret) is Verdict.TIGHTEN:
            path.chmod(0o700)
        if not os.access(path, os.W_OK | os.X_OK):
            raise SetupError(f"{what} {path} is not writable{_read_only(path)}; {mend}")
    except NotADirectoryError:
        raise SetupError(f"{what} {path} is not a directory; {mend}") from None
    except OSError as error:
        raise SetupError(f"{what} {path} cannot be made: {error.strerror}; {mend}") from None
    except UntrustedError as refused:
        raise SetupError(f"{what} {path}: {refused.sentence(key)}") from None


def _read_only(path: Path) -> str:
    return " (the file system is mounted read-only)" if os.statvfs(path).f_flag & os.ST_RDONLY else ""


def _judge(path: Path, us: Identity, *, secret: bool) -> Verdict | None:
    """Judge what is there of a path; None if the directory itself is not. Raises UntrustedError, OSError."""
    way: list[Step] = []
    try:
        way.extend(_walk(path))
    finally:
        private_paths.check_way(way, us)  # whoever bars the way is named, not only that it is barred
    if not path.exists():
        if way[-1].kind is not Kind.DIRECTORY:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), way[-1].path)
        # What we make in the last directory that is there can be replaced by whoever can write in it.
        private_paths.check_way([way[-1], Step(f"{way[-1].path}/", Kind.DIRECTORY, us.uid, 0, 0o700)], us)
        return None
    if way[-1].kind is not Kind.DIRECTORY:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), way[-1].path)
    return private_paths.check_own(way[-1], us, secret=secret)


def _walk(path: Path) -> Iterator[Step]:
    """Yield every step of an absolute path as far as it is there, from the root down; a link, then where it leads."""
    done, left, links = "/", [part for part in path.parts if part != "/"], 0
    yield _step(done)
    while left:
        done = os.path.join(done, left.pop(0))  # noqa: PTH118 - `..` stays: the kernel goes up from where it is
        try:
            step = _step(done)
        except FileNotFoundError:
            return
        yield step
        if step.kind is Kind.LINK:
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = Path(os.readlink(done))  # noqa: PTH115 - the bare text was looked at
            left = [part for part in target.parts if part != "/"] + left
            done = "/" if target.is_absolute() else os.path.dirname(done)  # noqa: PTH120 - as above
            yield _step(done)
        elif step.kind is Kind.OTHER:
            return


def _step(path: str) -> Step:
    found = os.lstat(path)
    mode = found.st_mode
    kind = Kind.DIRECTORY if stat.S_ISDIR(mode) else Kind.LINK if stat.S_ISLNK(mode) else Kind.OTHER
    return Step(path, kind, found.st_uid, found.st_gid, stat.S_IMODE(mode), acl=_has_acl(path, mode))


def _has_acl(path: str, mode: int) -> bool:
    """Say whether names beside the owner and the group may have been given the right to write."""
    if stat.S_ISLNK(mode) or not mode & stat.S_IWGRP:
        return False
    try:
        return bool(os.getxattr(path, "system.posix_acl_access", follow_symlinks=False))
    except OSError:  # none, or a file system without
        return False


def _identity() -> Identity:
    """Read who we are, whom we trust, and which of our groups have no other member."""
    us = os.geteuid()
    trusted = {0}
    if (unmapped := _unmapped()) is not None:
        trusted.add(unmapped)
    accounts = [Account(one.pw_name, one.pw_uid, one.pw_gid) for one in pwd.getpwall()]
    groups = {os.getegid(), *os.getgroups()}
    own = frozenset(gid for gid in groups if private_paths.is_own_group(gid, us, _group(gid), accounts))
    return Identity(us, frozenset(trusted), own)


def _group(gid: int) -> Group | None:
    try:
        found = grp.getgrgid(gid)
    except KeyError:
        return None
    return Group(found.gr_name, gid, frozenset(found.gr_mem))


def _unmapped() -> int | None:
    """Return the user that stands for everybody outside our user namespace; None where it can be a real one."""
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text("ascii"))
        lines = Path("/proc/self/uid_map").read_text("ascii").splitlines()
    except (OSError, ValueError):
        return None
    ranges = [(int(first), int(count)) for first, _, count in (line.split() for line in lines)]
    return None if any(first <= overflow < first + count for first, count in ranges) else overflow
