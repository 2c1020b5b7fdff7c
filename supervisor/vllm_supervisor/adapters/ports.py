"""Bind what we listen on, and name who is in the way.

Rules:
* SO_REUSEADDR but never SO_REUSEPORT, and listening at once: a second server learns of the clash now, not after a load.
* Bare vLLM binds its port before its load and listens after it. With SO_REUSEADDR on both sides such a port is not in use
  for bind(2), and no table of /proc shows it. A bind without SO_REUSEADDR finds it on every kernel; that such a bind also
  fails for connections of a server that has ended is told apart by /proc/net/tcp, which shows those.
* A Unix socket's file is replaced only if nobody answers on it and it is this user's; its mode is kept. At the end it is
  removed only if it is still the one we made.
* Every refusal is a SetupError of one line that says what to change.

Source of facts: proc(5) on /proc/net/tcp, unix(7) on SO_PEERCRED, ip(7), ipv6(7), sock_diag(7); Linux 6.8 and newer list
sockets that are only bound (include/net/tcp_states.h: TCP_BOUND_INACTIVE).
"""

import errno
import os
import socket
import stat
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_supervisor.core.address import Address, TcpAddress, UnixAddress
from vllm_supervisor.core.errors import SetupError
from vllm_supervisor.core.neighbours import address as address_of
from vllm_supervisor.core.neighbours import serve_arguments
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


def remover(path: str) -> Callable[[], None]:
    """Return what removes the socket that stands at `path` now; another one that took its place by then stays."""
    made = os.lstat(path)

    def remove() -> None:
        with suppress(OSError):
            if os.path.samestat(made, os.lstat(path)):
                os.unlink(path)  # noqa: PTH108 - the string is what bind got

    return remove


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
    if address.port:
        _refuse_where_bound(address, family, where)
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
    if found.st_uid != os.geteuid():
        raise SetupError(f"socket {path} belongs to uid {found.st_uid}; remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)  # noqa: PTH108 - the string is what bind gets
            return stat.S_IMODE(found.st_mode)
        except BlockingIOError:
            raise SetupError(f"socket {path} is in use by a busy server; stop it or choose another path") from None
        pid = listener_pid(probe)
    raise SetupError(f"socket {path} is in use by {_process(pid)}; stop it or choose another path")


def listener_pid(connected: socket.socket) -> int:
    """Return the pid of whoever listens on the Unix socket that this one is connected to (SO_PEERCRED, unix(7))."""
    pid: int = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid


def _refuse_where_bound(address: TcpAddress, family: int, where: tuple[Any, ...]) -> None:
    """Raise SetupError where somebody has bound this address and does not listen yet."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind(where)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return  # the bind that counts says it
        else:
            return
    shown = {field[3] for field in _on_port(address.port)}
    if _LISTENING in shown:
        return  # as above, with its holder
    bound = _only_bound(address.port, socket.inet_pton(family, where[0].partition("%")[0]))
    server = _loading_server(address.host, address.port)
    if shown and not bound and server is None:
        return  # connections of a server that has ended
    holder = _holder(bound) if bound else _UNSEEN if server is None else _process(server)
    raise SetupError(f"{address} is bound by {holder}, which does not listen yet; stop it or choose another --port")


_UNSEEN = "a process that this user may not see"
_ANYWHERE = {bytes(4), bytes(16)}
_ANY_HOST = {"", "0.0.0.0", "::"}
_DIAG = struct.Struct("=BBBB HH16s16sI8x IIIII")  # include/uapi/linux/inet_diag.h: inet_diag_msg
_BY_FAMILY, _DUMP, _DONE, _ERROR = (
    20,
    0x301,
    3,
    2,
)  # SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, NLMSG_DONE, NLMSG_ERROR
_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
_BOUND_INACTIVE = 1 << 13


def _only_bound(port: int, host: bytes) -> set[str]:
    """Return the inodes of sockets that have bound the port on an address that clashes with `host` and do nothing else.

    Empty as well where the kernel cannot tell (before 6.8, or without sock_diag).
    """
    found = set()
    with suppress(OSError), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        for family in (socket.AF_INET, socket.AF_INET6):
            wanted = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, _BOUND_INACTIVE)
            whom = struct.pack(">HH", port, 0) + bytes(36) + b"\xff" * 8
            kernel.sendto(struct.pack("=IHHII", 72, _BY_FAMILY, _DUMP, 1, 0) + wanted + whom, (0, 0))
            for row in _answers(kernel):
                length = 4 if family == socket.AF_INET else 16
                theirs = row[6][:length]
                clash = host in _ANYWHERE or theirs in _ANYWHERE or theirs == host
                if socket.ntohs(row[4]) == port and clash:
                    found.add(str(row[-1]))
    return found


def _answers(kernel: socket.socket) -> Iterator[tuple[Any, ...]]:
    """Read one dump to its end."""
    while True:
        data = kernel.recv(1 << 16)
        at = 0
        while at + 16 <= len(data):
            length, kind = struct.unpack_from("=IH", data, at)
            if kind in {_DONE, _ERROR} or length < 16:
                return
            yield _DIAG.unpack_from(data, at + 16)
            at += (length + 3) & ~3


def _loading_server(host: str, port: int) -> int | None:
    """Return the pid of a vLLM server in our network whose command line names an address that clashes with this one."""
    for pid in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - names alone are wanted
        with suppress(OSError):
            arguments = serve_arguments(Path(f"/proc/{pid}/cmdline").read_bytes())
            if arguments is None or not _same_network(pid):
                continue
            theirs, at = address_of(arguments)
            if at == port and (host in _ANY_HOST or theirs in _ANY_HOST or theirs == host):
                return int(pid)
    return None


def _same_network(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino == Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        return False


def _on_port(port: int) -> list[list[str]]:
    """Return the rows of the kernel's tables whose local port it is."""
    tables = ("/proc/net/tcp", "/proc/net/tcp6")
    return [field for table in tables for field in _rows(table) if int(field[1].rpartition(":")[2], 16) == port]


def _tcp_holder(port: int) -> str:
    """Name whoever listens on a port, as far as we may see."""
    return _holder({field[9] for field in _on_port(port) if field[3] == _LISTENING})


def _holder(inodes: Collection[str]) -> str:
    """Name whoever has one of these sockets, as far as we may see."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    if wanted:
        for pid in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - names alone are wanted
            with suppress(OSError):
                for fd in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - names alone are wanted
                    with suppress(OSError):
                        if os.readlink(f"/proc/{pid}/fd/{fd}") in wanted:  # noqa: PTH115 - the bare text is compared
                            return _process(int(pid))
    return _UNSEEN


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
