"""The ledger's files: segments of JSON lines in one directory, appended, rotated, mended and pruned.

Rules:
* Blocking calls only, made by one thread at a time (`sync` and `prune` aside); every failure is an OSError for the caller to count.
* `put` appends wholly or not at all: what a full disk leaves of a write is cut off again, at once or at the next open.
* The end of a file that a crash cut is mended before the first append, in time linear in what is cut off.
* A segment that we cannot append to as it is (a link, a pipe, a directory, another user's file) stays, and the next
  number begins. Nothing is followed, waited for or removed that is no regular file.
* A directory or file that somebody removed is made again; what was in it is gone, and `put` says so by raising first.
* Nothing is made or written anew where `hold` does not let us: somebody else may have taken the directory meanwhile.
* Files 0600, the directory 0700. The directory is opened without following a link, everything in it by its descriptor,
  and what somebody else put there is refused, not written.
"""

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from vllm_supervisor.core.ledger import mend, segment_name, segment_number
from vllm_supervisor.core.ledger_parser import LONGEST_LINE
from vllm_supervisor.core.private_paths import directory_refusal, file_refusal
from vllm_supervisor.core.retention import Segment, prunable

_TAIL_BLOCK = 64 * 1024
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENXIO)


class FileOps:
    """The kernel calls made here, in one object, so that a test can make each of them fail."""

    open = staticmethod(os.open)
    write = staticmethod(os.write)
    fsync = staticmethod(os.fsync)
    truncate = staticmethod(os.ftruncate)
    close = staticmethod(os.close)
    stat = staticmethod(os.fstat)
    read_at = staticmethod(os.pread)
    mkdir = staticmethod(os.makedirs)


class Hold(Protocol):
    """What keeps the directory ours."""

    def there(self) -> bool:
        """Say at once whether it may still be so. Raises OSError."""

    def again(self) -> None:
        """See to it that it is so. Raises OSError, with a strerror for people, if it is not."""


class LedgerFile:
    """The segment being written, and the directory it stands in. `number` is the segment's, `size` in bytes."""

    def __init__(
        self, directory: Path, segment_bytes: int, *, ops: FileOps | None = None, hold: Hold | None = None
    ) -> None:
        """Begin a new segment when one has reached `segment_bytes`; `hold` is asked before anything is written."""
        self.directory = directory
        self.number = 0
        self.size = 0
        self._segment_bytes = segment_bytes
        self._ops = ops or FileOps()
        self._hold = hold
        self._fd = -1
        self._torn: tuple[int, int] | None = None  # a segment that holds data whose writing failed, and its right size

    def ready(self) -> bool:
        """See that an open segment with room is there; True if one was opened just now. Raises OSError."""
        if self._fd >= 0 and self._ops.stat(self._fd).st_nlink == 0:
            self.close()
            raise FileNotFoundError(errno.ENOENT, "the ledger's file was removed")
        if self._hold is not None:
            self._hold.again()
        if self._fd >= 0:
            if self.size < self._segment_bytes:
                return False
            self.close()
        self._open()
        return True

    def there(self) -> bool:
        """Say whether the open segment is still in its directory, and the directory ours. Raises OSError."""
        return self._ops.stat(self._fd).st_nlink > 0 and (self._hold is None or self._hold.there())

    def put_now(self, data: bytes) -> bool:
        """Append `data` as `put` does, if a segment is open that holds something and has room; else False."""
        if not 0 < self.size < self._segment_bytes or self._fd < 0:
            return False
        self.put(data)
        return True

    def put(self, data: bytes) -> None:
        """Append `data`. Raises OSError, and then nothing of it is in the file."""
        done, size = 0, len(data)
        try:
            done = self._ops.write(self._fd, data)
            while done < size:
                done += self._ops.write(self._fd, memoryview(data)[done:])
        except OSError:
            if done:
                self._torn = (self.number, self.size)
                with suppress(OSError):  # if this fails too, the next open does it
                    self._untear(self._fd, self.number)
            self.close()
            raise
        self.size += size

    def handle(self) -> int:
        """Return a second descriptor of the open segment, for `sync` by another thread, which closes it."""
        return os.dup(self._fd)

    def sync(self, fd: int | None = None) -> None:
        """Sync the open segment, or the one behind `fd`. Raises OSError; the kernel may have dropped the data then."""
        self._ops.fsync(self._fd if fd is None else fd)

    def close(self) -> None:
        """Let go of the open segment; `ready` opens one again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                self._ops.close(fd)

    def prune(self, *, oldest_needed: int, now: float, keep_s: float, max_bytes: int) -> list[int]:
        """Remove old segments as core.retention decides, and return their numbers. `now` is seconds since the epoch."""
        segments = []
        directory = self._open_directory()
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    if (number := segment_number(entry.name)) and entry.is_file(follow_symlinks=False):
                        found = entry.stat(follow_symlinks=False)
                        segments.append(Segment(number, found.st_size, found.st_mtime))
            numbers = prunable(
                segments, oldest_needed=min(oldest_needed, self.number), now=now, keep_s=keep_s, max_bytes=max_bytes
            )
            for number in numbers:
                with suppress(FileNotFoundError):
                    os.unlink(segment_name(number), dir_fd=directory)
        finally:
            self._ops.close(directory)
        return numbers

    def _open(self) -> None:
        """Open the newest segment, or the one after it if that is full, and mend its end."""
        self._ops.mkdir(self.directory, mode=0o700, exist_ok=True)
        directory = self._open_directory()
        try:
            self._open_in(directory)
        finally:
            self._ops.close(directory)

    def _open_directory(self) -> int:
        """Open the directory, if it is one we made; what a volume's mount loosened is made private again."""
        try:
            fd = self._ops.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except NotADirectoryError as fault:
            raise NotADirectoryError(fault.errno, f"{self.directory} is a link or a file; move it away") from None
        found = self._ops.stat(fd)
        why = directory_refusal(found.st_mode, found.st_uid, os.geteuid())
        if why:
            self._ops.close(fd)
            raise PermissionError(errno.EPERM, f"{self.directory} is not ours: {why}; move it away")
        if found.st_mode & 0o077:
            with suppress(OSError):
                os.fchmod(fd, 0o700)
        return fd

    def _open_in(self, directory: int) -> None:
        numbers = [number for name in os.listdir(directory) if (number := segment_number(name))]
        number = max([self.number, *numbers, 1])
        while (opened := self._try(directory, number)) is None:
            number += 1
        self._fd, self.size = opened
        self.number = number

    def _try(self, directory: int, number: int) -> tuple[int, int] | None:
        """Open segment `number` for appending and return (descriptor, size); None if it is full, or no file of ours."""
        name = segment_name(number)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = self._ops.open(name, flags, 0o600, dir_fd=directory)
        except OSError as error:
            if error.errno in _NOT_OURS and os.path.lexists(self.directory / name):
                return None
            raise
        try:
            found = self._ops.stat(fd)
            if not file_refusal(found.st_mode, found.st_uid, found.st_nlink, os.geteuid()):
                self._untear(fd, number)
                size = self._mend(fd)
                if size == 0:
                    self._sync_directory(directory)
                if size < self._segment_bytes:
                    return fd, size
        except OSError:
            self._ops.close(fd)
            raise
        self._ops.close(fd)
        return None

    def _untear(self, fd: int, number: int) -> None:
        """Take out of the file what is there of data whose writing failed, whole lines included."""
        if self._torn is not None and self._torn[0] == number:
            if self._ops.stat(fd).st_size > self._torn[1]:
                self._ops.truncate(fd, self._torn[1])
            self._torn = None

    def _mend(self, fd: int) -> int:
        """Bring the end of the file to the end of a line; return its size then."""
        size = self._ops.stat(fd).st_size
        end = self._without_zeros(fd, size)
        rest = self._last_line(fd, end)
        decision = mend(end, rest)
        if decision.keep != size:
            self._ops.truncate(fd, decision.keep)
        if decision.newline:
            self._ops.write(fd, b"\n")
        return decision.keep + decision.newline

    def _without_zeros(self, fd: int, size: int) -> int:
        """Find where the zero bytes begin that end a file of `size` bytes."""
        end = size
        while end:
            begin = max(0, end - _TAIL_BLOCK)
            kept = self._ops.read_at(fd, end - begin, begin).rstrip(b"\0")
            if kept:
                return begin + len(kept)
            end = begin
        return 0

    def _last_line(self, fd: int, end: int) -> bytes:
        """Read what stands behind the last newline before `end`, at most a byte more than a line of ours can have."""
        blocks: list[bytes] = []
        begin, least = end, max(0, end - LONGEST_LINE - 1)
        while begin > least:
            stop, begin = begin, max(least, begin - _TAIL_BLOCK)
            block = self._ops.read_at(fd, stop - begin, begin)
            cut = block.rfind(b"\n")
            blocks.append(block[cut + 1 :])
            if cut >= 0:
                break
        return b"".join(reversed(blocks))

    def _sync_directory(self, directory: int) -> None:
        """Make the new file's name survive power loss; a file system that cannot says EINVAL, which is no fault."""
        with suppress(OSError):
            self._ops.fsync(directory)
