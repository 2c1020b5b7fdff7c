"""Non-blocking sockets: accept, connect, and the few options a front door sets. Decides nothing.

Sources: accept(2), connect(2), unix(7), tcp(7), socket(7).
"""

import contextlib
import errno
import os
import socket
import ssl
import struct

import trio

from vllm_supervisor.core.address import Address, UnixAddress

# What a non-blocking call raises when the kernel (or TLS) has nothing yet.
WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
READ_SIZE = 64 * 1024  # bytes asked for in one read; also the bound of what is in hand for a slow peer

_KEEPALIVE_IDLE, _KEEPALIVE_INTERVAL, _KEEPALIVE_PROBES = 60, 15, 4
_UNIX_RETRY, _UNIX_RETRY_MAX = 0.002, 0.1


def accept(listener: socket.socket) -> socket.socket | None:
    """Take one waiting connection, non-blocking and prepared, or None if there is none.

    Raises OSError when descriptors or memory have run out; a client that gave up in the queue is skipped.
    """
    while True:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in {errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.EINTR}:
                continue
            raise
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # the client may be gone already; the first read says so
                _prepare_tcp(sock)
        return sock


def _prepare_tcp(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)


async def connect(address: Address) -> socket.socket:
    """Connect to `address` without blocking; raises OSError. The caller bounds the time."""
    if isinstance(address, UnixAddress):
        return await _connect_unix(address.path)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        code = sock.connect_ex((address.host, address.port))
        if code == errno.EINPROGRESS:
            await trio.lowlevel.wait_writable(sock)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        _check(code)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


async def _connect_unix(path: str) -> socket.socket:
    """Connect at once, or wait: a full backlog says EAGAIN and nothing tells when it has room (unix(7))."""
    pause = _UNIX_RETRY
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        while (code := sock.connect_ex(path)) == errno.EAGAIN:
            await trio.sleep(pause)
            pause = min(2 * pause, _UNIX_RETRY_MAX)
        _check(code)
    except BaseException:
        sock.close()
        raise
    return sock


def _check(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))


def reset(sock: socket.socket) -> None:
    """Close so that the peer sees a reset, not an end: the only way to break off an answer that ends with the connection."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def finish_sending(sock: socket.socket) -> None:
    """Tell the peer that nothing more comes (FIN, after TLS's own farewell) while still reading."""
    if isinstance(sock, ssl.SSLSocket):
        say_goodbye(sock)
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)


def say_goodbye(sock: ssl.SSLSocket) -> None:
    """Send TLS's close_notify without waiting for the peer's."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: the handshake never ended
        sock.unwrap()
