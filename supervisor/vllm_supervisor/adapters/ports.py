"""Bind what we listen on, and name who is in the way.

Rules:
* SO_REUSEADDR but never SO_REUSEPORT, and listening at once: a second server learns of the clash now, not after a load.
* A Unix socket's file is replaced only if nobody answers on it; its mode is kept.
* Every refusal is a SetupError of one line that says what to change.

Source of facts: proc(5) on /proc/net/tcp, unix(7) on SO_PEERCRED, ip(7), ipv6(7).
"""

import errno
import os
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path

from vllm_supervisor.core.address import Address, TcpAddress, UnixAddress
from vllm_supervisor.core.errors import SetupError
from vllm_supervisor.core.proc import command_words

_BACKLOG = 2048
_UNIX_PATH_BYTES = 107
_LISTENING = "0A"


def listen(address: Address, *, mode: int | None = None) -> socket.socket:
    """Return a non-blocking listening socket on `address`; `mode` is the permissions of a Unix socket.

    An empty host is every IPv4 address, as in vLLM; `::` takes IPv4 as well. Raises SetupError.
    """
    if isinstance(address, UnixAddress):
        return _listen_unix(address.path, mode)
    return _listen_tcp(address)


def _listen_tcp(address: TcpAddress) -> socket.socket:
    if not 0 <= address.port <= 65535:
        raise SetupError(f"port {address.port} is not between 0 and 65535; change --port")
    try:
        found = socket.getaddrinfo(
            address.host or "0.0.0.0", address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise SetupError(f"host {address.host!r} is unknown here ({error}); change --host") from error
    # A name with both kinds means its IPv4 address, as vLLM takes it.
    family, kind, proto, _, where = min(found, key=lambda one: one[0] != socket.AF_INET)
    sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(where)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise SetupError(_tcp_refusal(address, error)) from error
    return sock


def _tcp_refusal(address: TcpAddress, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{address} is in use by {_tcp_holder(address.port)}; stop it or choose another --port"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{address} may not be bound by this user (ports below 1024 need CAP_NET_BIND_SERVICE); choose another --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{address} is no address of this machine; change --host"
    return f"{address} cannot be bound: {error.strerror}; change --host or --port"


def _listen_unix(path: str, mode: int | None) -> socket.socket:
    if len(os.fsencode(path)) > _UNIX_PATH_BYTES:
        raise SetupError(f"socket path {path} is longer than {_UNIX_PATH_BYTES} bytes; choose a shorter one")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        kept = _clear_stale(path)
        mode = kept if mode is None else mode
        if mode is not None:
            os.fchmod(sock.fileno(), mode)  # the file is born with no more than this, whatever the umask
        sock.bind(path)
        if mode is not None:
            Path(path).chmod(mode)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise SetupError(f"socket {path} cannot be bound: {error.strerror}; choose another path") from error
    except SetupError:
        sock.close()
        raise
    return sock


def _clear_stale(path: str) -> int | None:
    """Remove a socket that nobody answers on and return its mode; None if there was nothing. Raises SetupError, OSError."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISSOCK(found.st_mode):
        raise SetupError(f"{path} exists and is no socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)  # noqa: PTH108 - the string is what bind gets
            return stat.S_IMODE(found.st_mode)
        except BlockingIOError:
            raise SetupError(f"socket {path} is in use by a busy server; stop it or choose another path") from None
        pid, _uid, _gid = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    raise SetupError(f"socket {path} is in use by {_process(pid)}; stop it or choose another path")


def _tcp_holder(port: int) -> str:
    """Name whoever listens on a port, as far as we may see."""
    inodes = {
        field[9]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for field in _rows(table)
        if field[3] == _LISTENING and int(field[1].rpartition(":")[2], 16) == port
    }
    wanted = {f"socket:[{inode}]" for inode in inodes}
    if wanted:
        for pid in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - names alone are wanted
            with suppress(OSError):
                for fd in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - names alone are wanted
                    with suppress(OSError):
                        if os.readlink(f"/proc/{pid}/fd/{fd}") in wanted:  # noqa: PTH115 - the bare text is compared
                            return _process(int(pid))
    return "a process that this user may not see"


def _rows(table: str) -> list[list[str]]:
    try:
        return [line.split() for line in Path(table).read_text("ascii").splitlines()[1:]]
    except OSError:  # a kernel without IPv6
        return []


def _process(pid: int) -> str:
    try:
        comm = Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
        cmdline = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return f"pid {pid}"
    return f"pid {pid} ({command_words(comm, cmdline)})"
