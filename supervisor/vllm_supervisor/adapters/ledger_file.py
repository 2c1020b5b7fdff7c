"""The ledger's files: segments of JSON lines in one directory, appended, rotated, mended and pruned.

Rules:
* Blocking calls only, made by one thread at a time (`sync` and `prune` aside); every failure is an OSError for the caller to count.
* `put` appends wholly or not at all: what a full disk leaves of a write is cut off again, at once or at the next open.
* The end of a file that a crash cut is mended before the first append.
* A directory or file that somebody removed is made again; what was in it is gone, and `put` says so by raising first.
* Nothing is made or written anew where `hold` does not let us: somebody else may have taken the directory meanwhile.
* Files 0600, the directory 0700.
"""

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from vllm_supervisor.core.ledger import mend, segment_name, segment_number
from vllm_supervisor.core.retention import Segment, prunable

_TAIL_BLOCK = 64 * 1024


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
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if number := segment_number(entry.name):
                    stat = entry.stat(follow_symlinks=False)
                    segments.append(Segment(number, stat.st_size, stat.st_mtime))
        numbers = prunable(
            segments, oldest_needed=min(oldest_needed, self.number), now=now, keep_s=keep_s, max_bytes=max_bytes
        )
        for number in numbers:
            (self.directory / segment_name(number)).unlink(missing_ok=True)
        return numbers

    def _open(self) -> None:
        """Open the newest segment, or the one after it if that is full, and mend its end."""
        self._ops.mkdir(self.directory, mode=0o700, exist_ok=True)
        numbers = [number for path in self.directory.iterdir() if (number := segment_number(path.name))]
        number = max([self.number, *numbers, 1])
        while True:
            path = self.directory / segment_name(number)
            fd = self._ops.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                self._untear(fd, number)
                size = self._mend(fd)
                if size == 0:
                    self._sync_directory()
            except OSError:
                self._ops.close(fd)
                raise
            if size < self._segment_bytes:
                break
            self._ops.close(fd)
            number += 1
        self._fd, self.size, self.number = fd, size, number

    def _untear(self, fd: int, number: int) -> None:
        """Take out of the file what is there of data whose writing failed, whole lines included."""
        if self._torn is not None and self._torn[0] == number:
            if self._ops.stat(fd).st_size > self._torn[1]:
                self._ops.truncate(fd, self._torn[1])
            self._torn = None

    def _mend(self, fd: int) -> int:
        """Bring the end of the file to the end of a line; return its size then."""
        size = end = self._ops.stat(fd).st_size
        rest = b""
        while end:
            begin = max(0, end - _TAIL_BLOCK)
            block = self._ops.read_at(fd, end - begin, begin)
            cut = block.rfind(b"\n")
            rest = block[cut + 1 :] + rest
            if cut >= 0:
                break
            end = begin
        decision = mend(size, rest)
        if decision.keep != size:
            self._ops.truncate(fd, decision.keep)
        if decision.newline:
            self._ops.write(fd, b"\n")
        return decision.keep + decision.newline

    def _sync_directory(self) -> None:
        """Make the new file's name survive power loss; a file system that cannot says EINVAL, which is no fault."""
        fd = self._ops.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with suppress(OSError):
                self._ops.fsync(fd)
        finally:
            self._ops.close(fd)
