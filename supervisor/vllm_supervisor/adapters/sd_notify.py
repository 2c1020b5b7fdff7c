"""Tell systemd how we are: one datagram a message to the socket it named, path or abstract.

Rules: without a socket nothing is sent; a service manager that does not listen costs a message, never us.
Source of facts: sd_notify(3), sd_watchdog_enabled(3).
"""

import os
import socket
from collections.abc import Mapping


class Notifier:
    """The way to the service manager that started us, if there is one."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Read NOTIFY_SOCKET and WATCHDOG_*; `watchdog_s` is the service manager's patience in seconds, or None."""
        path = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self._socket: socket.socket | None = None
        if path.startswith(("/", "@")):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self.watchdog_s = _watchdog(environ) if self._socket is not None else None

    @property
    def enabled(self) -> bool:
        """Whether somebody listens for our messages."""
        return self._socket is not None

    def send(self, *assignments: str) -> bool:
        """Send `KEY=VALUE` lines as one message; False if it did not get there."""
        if self._socket is None or not assignments:
            return False
        try:
            self._socket.sendto("\n".join(assignments).encode(), self._address)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Send nothing more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _watchdog(environ: Mapping[str, str]) -> float | None:
    usec = environ.get("WATCHDOG_USEC", "")
    pid = environ.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or int(usec) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 1e6
