"""Take over listening sockets that the service manager has bound for us (socket activation).

Rules:
* They are ours only if LISTEN_PID is our pid: a wrapper's variables reach every process below it.
* Every one is a stream socket that listens; anything else is a mistake in the socket unit, told by its name.
* Their files are the service manager's: we never unlink them.

Source of facts: sd_listen_fds(3), systemd.socket(5).
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_supervisor.core.address import Address, TcpAddress, UnixAddress
from vllm_supervisor.core.errors import SetupError

_FIRST = 3  # SD_LISTEN_FDS_START


@dataclass(frozen=True, slots=True)
class GivenSocket:
    """One socket, non-blocking and not inherited further; `name` is its FileDescriptorName (the unit's name by default)."""

    sock: socket.socket
    name: str
    address: Address


def take(environ: Mapping[str, str], first: int = _FIRST) -> list[GivenSocket]:
    """Return what was given, in the unit's order; empty without socket activation. Raises SetupError."""
    count = environ.get("LISTEN_FDS", "")
    if environ.get("LISTEN_PID") != str(os.getpid()) or not count.isdecimal():
        return []
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    names += ["unknown"] * (int(count) - len(names))
    return [_take(first + at, names[at] or "unknown") for at in range(int(count))]


def _take(fd: int, name: str) -> GivenSocket:
    try:
        sock = socket.socket(fileno=fd)
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise SetupError(f"{name}: descriptor {fd} is no socket ({error.strerror}); see its socket unit") from None
    families = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
    if not listens or sock.type != socket.SOCK_STREAM or sock.family not in families:
        sock.detach()
        raise SetupError(f"{name}: descriptor {fd} is no listening stream socket; use ListenStream= and Accept=no")
    os.set_inheritable(fd, False)
    sock.setblocking(False)
    where = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return GivenSocket(sock, name, UnixAddress(where if isinstance(where, str) else os.fsdecode(where)))
    return GivenSocket(sock, name, TcpAddress(where[0], where[1]))
