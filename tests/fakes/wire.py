"""One HTTP exchange as bytes: what is sent is exactly what is given, what comes back is kept field by field."""

import http.client
import socket
from dataclasses import dataclass

LIMIT = 60.0  # seconds without a byte after which an exchange fails

Address = str | int  # a Unix socket's path, or a port on 127.0.0.1
Fields = list[tuple[str, str]]


@dataclass(frozen=True)
class Answer:
    """An answer: `fields` sorted, names in lower case; `body` without its framing."""

    status: int
    reason: str
    fields: Fields
    body: bytes

    def without(self, *names: str) -> Fields:
        """Give the fields but those of these names."""
        return [field for field in self.fields if field[0] not in names]

    def field(self, name: str) -> str | None:
        """Give the first value of a field."""
        return next((value for found, value in self.fields if found == name), None)


def connect(address: Address) -> socket.socket:
    """Connect to an address."""
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(LIMIT)
        sock.connect(address)
        return sock
    return socket.create_connection(("127.0.0.1", address), LIMIT)


def ask(address: Address, request: bytes) -> Answer:
    """Send `request` on a connection of its own and read the one answer to its end."""
    with connect(address) as sock:
        return ask_on(sock, request)


def ask_on(sock: socket.socket, request: bytes) -> Answer:
    """Send `request` and read the answer to its end, and no byte beyond what belongs to it."""
    sock.sendall(request)
    answer = http.client.HTTPResponse(sock, method=request.split(b" ", 1)[0].decode())
    answer.begin()
    body = answer.read()
    fields = sorted((name.lower(), value) for name, value in answer.getheaders())
    return Answer(answer.status, answer.reason, fields, body)
