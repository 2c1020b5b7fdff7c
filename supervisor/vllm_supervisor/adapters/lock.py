"""One supervisor a state directory, held by a lock that the kernel releases with us.

Rules:
* flock on a file that stays: removing it would let two hold two files of one name.
* The file names its holder, for the one who comes second; nobody believes it without the lock being held.
* A lock on a file that somebody has removed keeps nobody out: `again` takes it in the directory of that name, and who
  writes there calls it first.
* The file is opened in the directory itself, without following a link, and only one that we made is written: a link or a
  hard link planted there would have another file truncated.
* The instance is the directory itself (device, inode and path), so the mark of one instance is never that of another
  container with an equal path.

Source of facts: flock(2).
"""

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from vllm_supervisor.core.errors import SetupError
from vllm_supervisor.core.instances import Locked, flock_holders
from vllm_supervisor.core.json_text import JsonError, parse_json
from vllm_supervisor.core.plain_text import one_line
from vllm_supervisor.core.plan import Holder, held
from vllm_supervisor.core.private_paths import file_refusal

_NAME = "lock"
_LONGEST = 4096  # bytes of the file that are read
_SHOWN = 100  # characters of a name


class HeldError(BlockingIOError):
    """Somebody else has it; `holder` is None where the file names nobody."""

    def __init__(self, directory: Path, holder: Holder | None) -> None:
        """Say who holds `directory`."""
        super().__init__(errno.EWOULDBLOCK, f"state directory {directory} is held by {holder or 'another supervisor'}")
        self.holder = holder


class StateLock:
    """The held lock. `instance` marks this state directory in the engine's environment."""

    def __init__(self, state_dir: Path, *, run: str, name: str, port_option: str = "") -> None:
        """Make `state_dir` (0700) if needed and lock it; `port_option` is that of the plan.

        Raises SetupError, naming the holder if there is one, or what cannot be written.
        """
        self._path = state_dir / _NAME
        self._told = json.dumps({"pid": os.getpid(), "run": run, "name": name}).encode() + b"\n"
        self._fd = -1
        try:
            self.again()
        except HeldError as error:
            raise SetupError(held(error.holder, f"{error.strerror}", name=name, port_option=port_option)) from None
        except OSError as error:
            raise SetupError(f"state directory {state_dir} cannot be used: {error.strerror}; set state_dir") from error
        found = state_dir.stat()
        identity = f"{found.st_dev}:{found.st_ino}:{state_dir.resolve()}"
        self.instance = hashlib.sha256(identity.encode()).hexdigest()[:16]

    def there(self) -> bool:
        """Say, without a look at any path, whether the file we hold is still in a directory. Raises OSError."""
        return os.fstat(self._fd).st_nlink > 0

    def again(self) -> None:
        """See that we hold the lock of the directory as it is now; make it and take it if that is not so.

        Raises HeldError, whose text names the holder, if somebody else has it, and any other OSError.
        """
        if self._fd >= 0 and self._is_named(self._fd):
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self._path, flags, 0o600)  # the way to it was judged: nobody else can put a link there
        try:
            found = os.fstat(fd)
            if why := file_refusal(found.st_mode, found.st_uid, found.st_nlink, os.geteuid()):
                raise PermissionError(errno.EPERM, f"{self._path} is not ours: {why}; remove it")
            self._take(fd)
        except OSError:
            os.close(fd)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd

    def release(self) -> None:
        """Let the directory go."""
        os.close(self._fd)

    def _take(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HeldError(self._path.parent, _holder(fd)) from None
        if not self._is_named(fd):
            raise FileNotFoundError(errno.ENOENT, "the lock was removed as it was taken")
        with suppress(OSError):  # a full disk: then it names nobody
            os.ftruncate(fd, 0)
            os.pwrite(fd, self._told, 0)

    def _is_named(self, fd: int) -> bool:
        """Say whether the file behind `fd` is the one that stands in the directory."""
        try:
            return os.path.samestat(os.fstat(fd), self._path.stat(follow_symlinks=False))
        except FileNotFoundError:
            return False


def living(directories: Iterable[Path]) -> list[Locked]:
    """Return who holds the locks of these state directories, as far as this user may read them; no lock is touched."""
    try:
        locks = flock_holders(Path("/proc/locks").read_text("ascii", "replace"))
    except OSError:
        return []
    found = []
    for directory in directories:
        try:
            fd = os.open(directory / _NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            holder = _holder(fd)
            if holder is not None and holder.pid in locks.get(os.fstat(fd).st_ino, ()):
                found.append(Locked(holder, directory))
        except OSError:
            continue
        finally:
            os.close(fd)
    return found


def holding_run(state_dir: Path) -> str | None:
    """Return the run that holds the lock of a state directory just now, or None."""
    return next((one.holder.run for one in living([state_dir])), None)


def _holder(fd: int) -> Holder | None:
    """Return the holder as the file names it; a file half written names nobody."""
    try:
        told = parse_json(os.pread(fd, _LONGEST, 0))
        name, pid, run = told["name"], told["pid"], told["run"]
    except (JsonError, KeyError, TypeError):
        return None
    if not isinstance(name, str) or type(pid) is not int or not isinstance(run, str):
        return None
    return Holder(one_line(name, _SHOWN), pid, one_line(run, _SHOWN))
