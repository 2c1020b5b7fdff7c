"""One supervisor a state directory, held by a lock that the kernel releases with us.

Rules:
* flock on a file that stays: removing it would let two hold two files of one name.
* The file names its holder, for the one who comes second; nobody believes it without the lock being held.
* The instance is the directory itself (device, inode and path), so the mark of one instance is never that of another
  container with an equal path.

Source of facts: flock(2).
"""

import fcntl
import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from vllm_supervisor.core.errors import SetupError

_NAME = "lock"


class StateLock:
    """The held lock. `instance` marks this state directory in the engine's environment."""

    def __init__(self, state_dir: Path, *, run: str, name: str) -> None:
        """Make `state_dir` (0700) if needed and lock it.

        Raises SetupError, naming the holder if there is one, or what cannot be written.
        """
        try:
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(state_dir / _NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SetupError(f"state directory {state_dir} cannot be used: {error.strerror}; set state_dir") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(self._fd)
            os.close(self._fd)
            raise SetupError(
                f"state directory {state_dir} is held by {holder}; use another --name or state_dir"
            ) from None
        except OSError as error:
            os.close(self._fd)
            raise SetupError(
                f"state directory {state_dir} cannot be locked: {error.strerror}; set state_dir"
            ) from error
        with suppress(OSError):  # a full disk: then it names nobody
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps({"pid": os.getpid(), "run": run, "name": name}).encode() + b"\n", 0)
        found = state_dir.stat()
        identity = f"{found.st_dev}:{found.st_ino}:{state_dir.resolve()}"
        self.instance = hashlib.sha256(identity.encode()).hexdigest()[:16]

    def release(self) -> None:
        """Let the directory go."""
        os.close(self._fd)


def _holder(fd: int) -> str:
    """Name the holder as the file does; a file half written names nobody."""
    try:
        told = json.loads(os.pread(fd, 4096, 0))
        return f"the supervisor {told['name']!r} (pid {int(told['pid'])}, run {told['run']})"
    except (ValueError, KeyError, TypeError):
        return "another supervisor"
