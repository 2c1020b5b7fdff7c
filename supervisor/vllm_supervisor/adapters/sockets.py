"""Non-blocking sockets of clients: accept, the few options a front door sets, and the ways to end. Decides nothing.

Sources: accept(2), tcp(7), socket(7).
"""

import contextlib
import errno
import socket
import ssl
import struct

# What a non-blocking call raises when the kernel (or TLS) has nothing yet.
WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
READ_SIZE = 64 * 1024  # bytes asked for in one read; also the bound of what is in hand for a slow peer

_KEEPALIVE_IDLE, _KEEPALIVE_INTERVAL, _KEEPALIVE_PROBES = 60, 15, 4


def accept(listener: socket.socket) -> tuple[socket.socket, str | None] | None:
    """Take one waiting connection, non-blocking and prepared, and its peer's IP address; None if there is none.

    A peer on a Unix socket has no address.

    Raises OSError when descriptors or memory have run out; a client that gave up in the queue is skipped.
    """
    while True:
        try:
            sock, peer = listener.accept()
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in {errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.EINTR}:
                continue
            raise
        sock.setblocking(False)
        if sock.family == socket.AF_UNIX:
            return sock, None
        with contextlib.suppress(OSError):  # the client may be gone already; the first read says so
            _prepare_tcp(sock)
        return sock, peer[0]


def _prepare_tcp(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)


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
