"""The engine's Unix socket, kept within reach when somebody removes its file.

Rules:
* A descriptor opened with O_PATH names the socket itself: connect(2) to `/proc/self/fd/N` reaches it whatever became of
  its path, and however long that is (tried on Linux 6.18).
* The path wins while it is there: an engine that binds anew is followed. The number of the descriptor never changes.

Source of facts: open(2) on O_PATH, proc(5) on /proc/PID/fd, unix(7).
"""

import os
import stat

from vllm_supervisor.core.address import UnixAddress


class EngineSocket:
    """The socket of one incarnation; `hold` it once the engine has bound it."""

    def __init__(self, address: UnixAddress) -> None:
        """Nothing is opened yet."""
        self._given = address
        self._fd = -1

    @property
    def address(self) -> UnixAddress:
        """Where to connect to: the socket that is held, else its path."""
        return self._given if self._fd < 0 else UnixAddress(f"/proc/self/fd/{self._fd}")

    def hold(self) -> bool:
        """Take hold of the socket as its path names it now; False if a socket that is held has no path any more."""
        try:
            fd = os.open(self._given.path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return self._fd < 0
        found = os.fstat(fd)
        if not stat.S_ISSOCK(found.st_mode):
            os.close(fd)
            return self._fd < 0
        if self._fd < 0:
            self._fd = fd
            return True
        if not os.path.samestat(found, os.fstat(self._fd)):
            os.dup2(fd, self._fd, inheritable=False)
        os.close(fd)
        return True

    def close(self) -> None:
        """Let go of it; from here on only the path is left."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
