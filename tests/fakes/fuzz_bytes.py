"""What a fuzzer sends: HTTP requests made from a grammar in which any part may be wrong, then damaged byte by byte.

All of it follows from the `random.Random` that is given, so a seed repeats the bytes.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

PUBLIC = (
    "/livez", "/readyz", "/health", "/ping", "/startupz", "/metrics", "/v1/models", "/v1/chat/completions",
    "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/tokenize", "/version", "/v1/realtime",
    "/sleep", "/pause", "/reset_prefix_cache", "/nothing", "/",
)  # fmt: skip
# Not `/stop` and `/restart`: they do what they say.
CONTROL = ("/status", "/events", "/timeouts", "/ledger/summary", "/drain", "/resume", "/report", "/nothing", "/")

_METHODS = (
    "GET",
    "POST",
    "HEAD",
    "PUT",
    "DELETE",
    "OPTIONS",
    "CONNECT",
    "TRACE",
    "PATCH",
    "PRI",
    "get",
    "G@T",
    "",
    "M" * 300,
)
_QUERIES = (
    "",
    "?",
    "?n=3",
    "?n=-1",
    "?n=",
    "?n=1&n=2",
    "?follow=1",
    "?follow=1&n=9",
    "?n=%zz",
    "?%00=%ff",
    "?a;b",
    "?" + "q" * 3000,
)
_VERSIONS = ("HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/9.9", "HTTP/1.1 ", "http/1.1", "HTTP/1", "")
_FIELDS = (
    "Connection: close", "Connection: keep-alive", "Connection: upgrade\r\nUpgrade: websocket", "Upgrade: h2c",
    "Connection: x-request-id, host", "Expect: 100-continue", "Expect: x", "Content-Type: application/json",
    "Content-Length: 5", "Content-Length: -1", "Content-Length: +2", "Content-Length: 0x2", "Content-Length: 2, 2",
    "Content-Length: 99999999999999999999", "Content-Length:", "Transfer-Encoding: chunked", "Transfer-Encoding: gzip",
    "Transfer-Encoding: chunked, chunked", "Transfer-Encoding: xchunked", "Transfer-Encoding : chunked",
    "Host: b", "Host: \xff", "X-Request-Id: 1", "X:\x00y", "X y: z", ": x", "no colon", " folded: x", "\tfolded",
    "X: " + "y" * 9000, "Cookie: " + "c" * 200, "Accept-Encoding: *", "Authorization: Bearer x", "Trailer: X",
)  # fmt: skip
_DEEP = b"[" * 5000


class End(Enum):
    """How a caller ends its connection."""

    CLOSE = "close"
    RESET = "reset"
    HALF = "half"  # closes its sending side and reads on
    READ = "read"
    PARK = "park"  # leaves it open, unread


@dataclass(frozen=True, slots=True)
class Visit:
    """One connection: the pieces that are sent, how many seconds apart, and its end."""

    pieces: list[bytes]
    pause: float
    end: End


def visit(chance: random.Random, targets: Sequence[str]) -> Visit:
    """Make up one connection to a server that knows `targets`."""
    if chance.random() < 0.1:
        raw = chance.randbytes(chance.choice((1, 16, 300, 5000)))
    else:
        raw = b"".join(_request(chance, targets) for _ in range(chance.choice((1, 1, 1, 2, 5))))
    if chance.random() < 0.4:
        raw = _damaged(chance, raw)
    size = chance.choice((len(raw), len(raw), 1 + len(raw) // 3, 64, 7)) or 1
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)][:60]
    return Visit(pieces, chance.choice((0.0, 0.0, 0.0005, 0.003)), chance.choice(list(End)))


def _request(chance: random.Random, targets: Sequence[str]) -> bytes:
    odd = chance.random() < 0.5  # else every part is as it should be, but for what the fields say
    method = chance.choice(_METHODS if odd else ("GET", "POST", "HEAD"))
    version = chance.choice(_VERSIONS) if odd and chance.random() < 0.3 else "HTTP/1.1"
    lines = [f"{method} {_target(chance, targets, odd=odd)} {version}"]
    if not odd or chance.random() < 0.8:
        lines.append("Host: a")
    lines += chance.sample(_FIELDS, chance.choice((0, 1, 2, 6) if odd else (0, 0, 1)))
    body = _body(chance) if method == "POST" or chance.random() < 0.1 else b""
    match chance.randrange(4):
        case 0 if body:
            lines.append("Transfer-Encoding: chunked")
            body = _chunked(chance, body, odd=odd)
        case 1 if odd:
            pass
        case _:
            lines.append(f"Content-Length: {len(body)}")
    end = chance.choice(("\r\n", "\n", "\r", "\r\r\n")) if odd and chance.random() < 0.1 else "\r\n"
    return end.join([*lines, "", ""]).encode("latin-1") + body


def _target(chance: random.Random, targets: Sequence[str], *, odd: bool) -> str:
    target = chance.choice(targets) + (chance.choice(_QUERIES) if chance.random() < 0.3 else "")
    if not odd:
        return target
    return chance.choice(
        (
            target,
            target,
            f"http://h{target}",
            f"/{target}",
            "//[",
            "*",
            "a:1",
            "/../x",
            "/%2e%2e/",
            "/" + "p" * 9000,
            "\xe9",
        )
    )


def _body(chance: random.Random) -> bytes:
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}],
        "prompt": "a",
        "input": "a",
        "max_tokens": 3,
    }
    order = {
        "wait": chance.random() < 0.3,
        "timeout_s": chance.choice((0, 0.1, None, -1, "x", 1e400)),
        "source": "a",
        "reason": "b\n\x1b",
    }
    made = chance.choice(
        (chat, chat, {**chat, "stream": True}, {**chat, "stream": True, "n": 2}, order, order, [], 5, None, {})
    )
    return chance.choice(
        (json.dumps(made).encode(),) * 6 + (_DEEP, b'{"a":' * 3000, b"\xff\xfe", b"9" * 5000, b"", b" " * 70_000)
    )


def _chunked(chance: random.Random, body: bytes, *, odd: bool) -> bytes:
    size = chance.choice((1, 7, len(body))) if len(body) < 3000 else len(body)
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    framed = [b"%x%b\r\n%b\r\n" % (len(part), chance.choice((b"", b"", b";x=y")), part) for part in parts]
    ends = (b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"0\r\n", b"", b"-1\r\n\r\n", b"fffffffffffffffff\r\n", b"0\n\n")
    return b"".join(framed) + (chance.choice(ends) if odd else ends[0])


def _damaged(chance: random.Random, raw: bytes) -> bytes:
    data = bytearray(raw)
    for _ in range(chance.choice((1, 2, 8))):
        if not data:
            break
        at = chance.randrange(len(data))
        match chance.randrange(5):
            case 0:
                data[at] = chance.randrange(256)
            case 1:
                del data[at : at + chance.choice((1, 4, 50))]
            case 2:
                data[at:at] = chance.choice((b"\r\n", b"\0", b"\r\n\r\n", b" ", b"\n", b"\r" * 20, b"A" * 500))
            case 3:
                data[at:at] = data[at : at + 40]
            case _:
                del data[at:]
    return bytes(data)
