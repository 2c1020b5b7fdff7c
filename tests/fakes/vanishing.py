"""Clients that vanish at random moments: by FIN or reset, before, during and after each part of an exchange.

A moment is a number of bytes sent or received, or a time that a client was ready to wait: never a guess at how fast the
server is.
"""

import concurrent.futures
import contextlib
import enum
import random
import socket
import struct
from dataclasses import dataclass

from fakes.exchanges import post
from fakes.supervisor_process import chat_body
from fakes.wire import LIMIT, connect

_AT_ONCE = 50
_PATIENCE = 0.3  # seconds
_ENDLESS = {"max_tokens": 30_000, "ignore_eos": True}
_SHORT = {"max_tokens": 4, "ignore_eos": True}


class Moment(enum.Enum):
    """When a client vanishes."""

    IN_ITS_HEAD = enum.auto()
    IN_ITS_BODY = enum.auto()
    ASKED = enum.auto()  # some time after its request, whatever has come
    ANSWERED_IN_PART = enum.auto()  # after some bytes of the answer, the head's first
    ANSWERED = enum.auto()  # after the last byte


@dataclass(frozen=True)
class Vanishing:
    """One client."""

    moment: Moment
    stream: bool
    reset: bool
    share: float  # of the request's part, of the patience, or of some bytes of the answer

    @property
    def request(self) -> bytes:
        """What it would send."""
        ends = self.moment is Moment.ANSWERED or (self.moment is Moment.ANSWERED_IN_PART and not self.stream)
        return post("/v1/chat/completions", chat_body(stream=self.stream, **(_SHORT if ends else _ENDLESS)))

    def live(self, port: int) -> bool:
        """Do it; say whether it got a byte of a good answer."""
        with connect(port) as sock:
            got = self._talk(sock)
            if self.reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                sock.shutdown(socket.SHUT_WR)
                _until_the_end(sock)
        good = b"HTTP/1.1 200 OK"
        assert got[: len(good)] == good[: len(got)], got[:300]
        return got != b""

    def _talk(self, sock: socket.socket) -> bytes:
        request = self.request
        head = request.index(b"\r\n\r\n") + 4
        if self.moment is Moment.IN_ITS_HEAD:
            sock.sendall(request[: int(self.share * head)])
            return b""
        if self.moment is Moment.IN_ITS_BODY:
            sock.sendall(request[: head + int(self.share * (len(request) - head))])
            return b""
        sock.sendall(request)
        if self.moment is Moment.ASKED:
            sock.settimeout(self.share * _PATIENCE)
            with contextlib.suppress(TimeoutError):
                return sock.recv(65536)
            return b""
        if self.moment is Moment.ANSWERED_IN_PART:
            return _receive(sock, 1 + int(self.share * (4000 if self.stream else 300)))
        return _receive_all(sock)


def _receive(sock: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        data = sock.recv(size - len(got))
        assert data, f"the answer ended after {got!r}"
        got += data
    return got


def _receive_all(sock: socket.socket) -> bytes:
    """Receive an answer to its last byte, told by its length or its last chunk."""
    got = b""
    while True:
        head, there, body = got.partition(b"\r\n\r\n")
        fields = head.lower()
        if there and b"transfer-encoding: chunked" in fields and body.endswith(b"0\r\n\r\n"):
            return got
        if there and b"content-length: " in fields:
            length = int(fields.partition(b"content-length: ")[2].split(b"\r\n")[0])
            if len(body) >= length:
                return got
        data = sock.recv(65536)
        assert data, f"the answer ended after {got[-300:]!r}"
        got += data


def _until_the_end(sock: socket.socket) -> None:
    """Read on until the server lets go as well: a client whose FIN goes unnoticed fails here."""
    sock.settimeout(LIMIT)
    with contextlib.suppress(ConnectionError):
        while sock.recv(65536):
            pass


def crowd(count: int, seed: int) -> list[Vanishing]:
    """Make `count` clients; every kind of moment, shape and way to go comes up, in a random order."""
    chance = random.Random(seed)
    kinds = [(moment, stream, reset) for moment in Moment for stream in (False, True) for reset in (False, True)]
    clients = [Vanishing(*kinds[index % len(kinds)], chance.random()) for index in range(count)]
    chance.shuffle(clients)
    return clients


def let_vanish(clients: list[Vanishing], port: int) -> int:
    """Let them all live, many at once; give how many got a byte of an answer. What goes wrong with one is raised."""
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        return sum(pool.map(lambda client: client.live(port), clients))
