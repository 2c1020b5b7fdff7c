"""Files a dead engine left behind: seen in its hands, and provably in nobody's hands now.

Rules:
* A segment in /dev/shm is ours to remove only if one of the engine's processes was seen to map or open this very inode.
* That nobody uses it now is proven by the kernel: a write lease is granted only when no other open file or mapping
  of the inode exists, whoever holds it. Where no lease can be had, the segment stays and that is told.
* Never by name alone: but in our own run directory every `engine-RUN-N` was made by us, for an engine of that run.

Source of facts: fcntl(2) on F_SETLEASE, proc(5) on maps and fd.
"""

import fcntl
import os
import re
import shutil
import signal
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

_SHM = "/dev/shm"  # noqa: S108 - the mount itself is meant, no file is made there
_HOME = re.compile(r"engine-(?P<run>[0-9a-f]{8})-\d+(?:\.sock)?")  # the latter as earlier versions made it
_MAX_SEGMENTS = 10_000  # remembered; an engine maps a handful


@dataclass(frozen=True, slots=True)
class Removed:
    """What was removed: names and their size in bytes; and what was kept, each with why."""

    names: tuple[str, ...] = ()
    bytes: int = 0
    kept: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ShmSpace:
    """The fullness of /dev/shm in bytes."""

    total: int
    available: int


def shm_space() -> ShmSpace | None:
    """Return how full /dev/shm is, or None where there is none."""
    try:
        found = os.statvfs(_SHM)
    except OSError:
        return None
    return ShmSpace(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


class Segments:
    """The /dev/shm segments that were seen in the engine's hands."""

    def __init__(self, root: str = _SHM) -> None:
        """Watch `root`, the mount of POSIX shared memory."""
        self._root = root
        self._seen: dict[str, int] = {}  # path: inode

    def find(self, pids: Iterable[int]) -> dict[str, int]:
        """Return what these processes, which must be the engine's, map or hold open now, as {path: inode}.

        Call it in a thread: the kernel makes the reader wait for a process that is changing its own maps, which took
        more than a second with a busy vLLM, and is for ever with one that hangs in a driver while it does.
        """
        found: dict[str, int] = {}
        for pid in pids:
            with suppress(OSError):
                found.update(self._maps(pid))
            with suppress(OSError):
                found.update(self._descriptors(pid))
        return found

    def note(self, found: Mapping[str, int]) -> None:
        """Remember what `find` has found."""
        for path, inode in found.items():
            if len(self._seen) < _MAX_SEGMENTS or path in self._seen:
                self._seen[path] = inode

    def _maps(self, pid: int) -> Iterator[tuple[str, int]]:
        prefix = f" {self._root}/".encode()
        with open(f"/proc/{pid}/maps", "rb") as maps:  # noqa: PTH123 - read line by line, thousands of them
            for line in maps:
                if prefix in line and not line.endswith(b" (deleted)\n"):
                    field = line.split(None, 5)
                    yield os.fsdecode(field[5].rstrip(b"\n")), int(field[4])

    def _descriptors(self, pid: int) -> Iterator[tuple[str, int]]:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                path = os.readlink(fd)  # noqa: PTH115 - the bare text is compared
                if path.startswith(f"{self._root}/") and not path.endswith(" (deleted)"):
                    yield path, fd.stat().st_ino

    def remove_unused(self) -> Removed:
        """Remove every seen segment that nobody maps or opens; call it when the engine's processes are gone."""
        names: list[str] = []
        kept: list[tuple[str, str]] = []
        total = 0
        for path, inode in sorted(self._seen.items()):
            try:
                size = _remove_unused(path, inode)
            except FileNotFoundError:
                continue
            except OSError as error:
                kept.append((path, _why(error)))
            else:
                names.append(path)
                total += size
        self._seen.clear()
        return Removed(tuple(names), total, tuple(kept))


@dataclass(frozen=True, slots=True)
class Named:
    """Files that are called as an engine's segments are: names of those nobody uses, the count of those we cannot tell."""

    unused: tuple[str, ...] = ()
    untold: int = 0


def named_like_segments(root: str = _SHM) -> Named:
    """Look at what is called as engines' segments are; nothing is removed, and what is in use is left out.

    The name proves nothing: every Python program's `multiprocessing.shared_memory` is called psm_…
    """
    unused: list[str] = []
    untold = 0
    found = (str(path) for pattern in ("psm_*", "vllm_offload_*") for path in Path(root).glob(pattern))
    for path in sorted(islice(found, _MAX_SEGMENTS)):
        try:
            with _alone(path):
                unused.append(path)
        except (BlockingIOError, FileNotFoundError):
            continue
        except OSError:
            untold += 1
    return Named(tuple(unused), untold)


def _why(error: OSError) -> str:
    if isinstance(error, BlockingIOError):
        return "another process still uses it"
    return f"cannot prove that nobody uses it: {error.strerror}"


def _remove_unused(path: str, inode: int) -> int:
    """Unlink `path` and return its size in bytes. Raises OSError: in use, gone, replaced (gone as well), not ours."""
    with _alone(path, inode) as found:
        os.unlink(path)  # noqa: PTH108 - the bare text was opened
        return found.st_blocks * 512


@contextmanager
def _alone(path: str, inode: int | None = None) -> Iterator[os.stat_result]:
    """Hold the proof that nobody else has `path` open or mapped. Raises OSError as `_remove_unused` does."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if (inode is not None and found.st_ino != inode) or not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(path)
        # Whoever opens it while the lease is held breaks it, which is told by a signal: one that is ignored by default.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield found
    finally:
        os.close(fd)


def remove_homes(run_dir: Path, run: str) -> None:
    """Remove what engines of other runs than `run` had in our own run directory, as far as it is this user's."""
    with suppress(OSError):
        directory = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name in os.listdir(directory):  # noqa: PTH208 - of the descriptor
                found = _HOME.fullmatch(name)
                if found is not None and found["run"] != run:
                    _remove_home(name, directory)
        finally:
            os.close(directory)


def _remove_home(name: str, directory: int) -> None:
    with suppress(OSError):
        found = os.lstat(name, dir_fd=directory)
        if found.st_uid != os.geteuid():
            return
        if stat.S_ISDIR(found.st_mode):
            shutil.rmtree(name, ignore_errors=True, dir_fd=directory)
        elif stat.S_ISSOCK(found.st_mode):
            os.unlink(name, dir_fd=directory)
