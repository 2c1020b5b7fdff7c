"""Attacks on where a request ends and what its path is: what is sent, what is answered, what the engine may see of it.

`/second` and `/sleep` stand for what an attacker wants to be read as a request of its own. A body that reads like one
is only ever a body.
"""

from dataclasses import dataclass, field

from fakes.malformed import CHUNKED, MALFORMED

HOST = b"Host: a\r\n"
SLEEP = b"POST /sleep?level=2 HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"
SECOND = b"GET /second HTTP/1.1\r\nHost: a\r\n\r\n"
SERVED = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
WEBSOCKET = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
KEYS = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"

Request = tuple[str, str, bytes]  # method, raw path, body


@dataclass(frozen=True)
class Attack:
    """One attack. `answers` are the statuses that may come, in order, with a `-` behind those without a body.

    After an answer of ours that refuses, the connection ends; after any other it serves the next request, unless
    `ends` says that it does not. `taken` is what the engine may see, all of it and in this order; `fields` must be among
    the fields of the first of these requests. `late` attacks show in their body alone: where that comes in pieces, the
    engine may have seen the beginning, but never a request with a body that has ended.
    """

    raw: bytes
    answers: tuple[str, ...]
    taken: tuple[Request, ...] = ()
    fields: dict[str, str] = field(default_factory=dict)
    ends: bool = False
    late: bool = False

    @property
    def open(self) -> bool:
        """Whether the connection must serve another request."""
        return not self.ends and self.answers[-1].rstrip("-") == "200"


def head(line: bytes, *fields: bytes, host: bytes = HOST) -> bytes:
    """Build a request head from a request line without version and field lines without CRLF."""
    return line + b" HTTP/1.1\r\n" + host + b"".join(one + b"\r\n" for one in fields) + b"\r\n"


def sized(line: bytes, body: bytes, *fields: bytes) -> bytes:
    """Build a request with a length."""
    return head(line, *fields, b"Content-Length: %d" % len(body)) + body


def chunked(line: bytes, body: bytes, *fields: bytes) -> bytes:
    """Build a request with two chunks."""
    pieces = body[:7], body[7:]
    coded = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return head(line, *fields, b"Transfer-Encoding: chunked") + coded + b"0\r\n\r\n"


def refused(raw: bytes, status: str, *, late: bool = False) -> Attack:
    """Build an attack that we answer ourselves; what stands behind it is never read."""
    return Attack(raw + SLEEP, (status,), late=late)


def plain(raw: bytes, method: str, path: str = "/x", body: bytes = b"", **fields: str) -> Attack:
    """Build an attack that is an ordinary request, with an ordinary one behind it."""
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    mark = "-" if method == "HEAD" else ""
    return Attack(raw + SECOND, ("200" + mark, "200"), ((method, path, body), ("GET", "/second", b"")), named)


ATTACKS: dict[str, Attack] = {}

# -- methods -------------------------------------------------------------------------------------------------------

_PADDED = b"\r\n" * 33_000 + SLEEP
ATTACKS |= {
    "CONNECT with a body": Attack(sized(b"CONNECT /v1/models", _PADDED), ("405",)),
    "CONNECT with chunks": refused(chunked(b"CONNECT /v1/models", SLEEP), "405"),
    "CONNECT without body": refused(head(b"CONNECT /v1/models"), "405"),
    "CONNECT with an upgrade": refused(head(b"CONNECT /ws", b"Connection: Upgrade", b"Upgrade: websocket"), "405"),
    "CONNECT to an authority": refused(head(b"CONNECT a:80"), "405"),
    "CONNECT in HTTP/1.0": refused(b"CONNECT / HTTP/1.0\r\n\r\n", "405"),
    "HTTP/2 preface": refused(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "405"),
    "method of 40 letters": refused(head(b"A" * 40 + b" /x"), "400"),
}
for _method in (
    *("TRACE", "TRACK", "PRI", "BREW", "SOURCE", "PROPFIND", "M-SEARCH", "QUERY", "DESCRIBE", "PLAY", "ANNOUNCE"),
    *("post", "Get", "GETS", "PO", "X-HTTP-METHOD", "!#$%&'*+-.^_`|~", "1"),
):
    ATTACKS[f"method {_method}"] = refused(sized(_method.encode() + b" /x", b"body"), "405")
for _method in SERVED:
    _line = _method.encode() + b" /x"
    ATTACKS |= {
        f"{_method} with a request for body": plain(sized(_line, SLEEP), _method, body=SLEEP),
        f"{_method} with a request in chunks": plain(chunked(_line, SLEEP), _method, body=SLEEP),
        f"{_method} with an empty body": plain(sized(_line, b""), _method),
        f"{_method} with no chunk": plain(head(_line, b"Transfer-Encoding: chunked") + b"0\r\n\r\n", _method),
        f"{_method} without body": plain(head(_line), _method),
        f"{_method} with an upgrade and a body": plain(
            sized(_line, SLEEP, b"Connection: Upgrade", b"Upgrade: websocket"), _method, body=SLEEP
        ),
        f"{_method} with an upgrade and chunks": plain(
            chunked(_line, SLEEP, b"Connection: Upgrade", b"Upgrade: websocket"), _method, body=SLEEP
        ),
    }
ATTACKS["TRACE inside a body"] = plain(
    sized(b"POST /x", b"TRACE / HTTP/1.1\r\n\r\n"), "POST", body=b"TRACE / HTTP/1.1\r\n\r\n"
)
ATTACKS["a body shorter than what follows"] = Attack(
    sized(b"POST /x", b"12345") + SLEEP, ("200", "403"), (("POST", "/x", b"12345"),)
)
ATTACKS["a body of a megabyte of requests"] = plain(sized(b"POST /x", SLEEP * 15_000), "POST", body=SLEEP * 15_000)

# -- upgrades ------------------------------------------------------------------------------------------------------

for _name, _fields in {
    "h2c": (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA"),
    "TLS": (b"Connection: Upgrade", b"Upgrade: TLS/1.0"),
    "a list": (b"Connection: Upgrade", b"Upgrade: websocket, h2c"),
    "a parameter": (b"Connection: Upgrade", b"Upgrade: websocket/13"),
    "quotes": (b"Connection: Upgrade", b'Upgrade: "websocket"'),
    "nothing": (b"Connection: Upgrade", b"Upgrade:"),
    "a field alone": (b"Upgrade: websocket",),
    "an option alone": (b"Connection: Upgrade",),
    "two fields, h2c last": (b"Connection: Upgrade", b"Upgrade: websocket", b"Upgrade: h2c"),
    "keys alone": (b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="),
    "proxy connection": (b"Proxy-Connection: Upgrade", b"Upgrade: websocket"),
}.items():
    ATTACKS[f"upgrade by {_name}"] = plain(head(b"GET /x", *_fields), "GET")
    ATTACKS[f"upgrade by {_name} before an admin path"] = Attack(
        head(b"GET /x", *_fields) + SLEEP, ("200", "403"), (("GET", "/x", b""),)
    )
ATTACKS |= {
    "upgrade by HEAD": plain(b"HEAD /x HTTP/1.1\r\n" + HOST + WEBSOCKET + b"\r\n", "HEAD"),
    "upgrade by OPTIONS": plain(b"OPTIONS /x HTTP/1.1\r\n" + HOST + WEBSOCKET + b"\r\n", "OPTIONS"),
    "upgrade in HTTP/1.0": Attack(
        b"GET /x HTTP/1.0\r\n" + HOST + WEBSOCKET + b"\r\n" + SLEEP, ("200",), (("GET", "/x", b""),), ends=True
    ),
    "upgrade of a health path": Attack(b"GET /livez HTTP/1.1\r\n" + HOST + WEBSOCKET + b"\r\n" + SLEEP, ("200", "403")),
    "upgrade of an admin path": refused(b"GET /sleep HTTP/1.1\r\n" + HOST + WEBSOCKET + KEYS + b"\r\n", "403"),
    "upgrade of an admin path under the root": refused(
        b"GET /api/pause HTTP/1.1\r\n" + HOST + WEBSOCKET + KEYS + b"\r\n", "403"
    ),
}

# -- lengths and chunks --------------------------------------------------------------------------------------------

for _name, _value in {
    "zeros before it": b"0000000000000005",
    "space before it": b" \t 5",
}.items():
    ATTACKS[f"length with {_name}"] = plain(
        head(b"POST /x", b"Content-Length:" + _value) + b"hello", "POST", body=b"hello"
    )
for _name, _value in {
    "a sign": b"+5",
    "a list": b"5,5",
    "a list with another": b"5, 0",
    "a comma behind": b"5,",
    "a dot": b"5.0",
    "an exponent": b"5e0",
    "a hexadecimal": b"0x5",
    "words": b"five",
    "two numbers": b"5 5",
    "quotes": b'"5"',
    "a minus": b"-0",
    "20 digits": b"18446744073709551621",
    "zeros without end": b"0" * 40 + b"5",
    "a semicolon": b"5;a=b",
    "high digits": b"\xb2",
}.items():
    ATTACKS[f"length with {_name}"] = refused(head(b"POST /x", b"Content-Length: " + _value) + b"hello", "400")
ATTACKS["length too large"] = refused(head(b"POST /x", b"Content-Length: 999999999999999"), "413")
for _name, _value in {"upper case": b"CHUNKED", "space before": b" \t chunked"}.items():
    ATTACKS[f"chunked with {_name}"] = plain(
        head(b"POST /x", b"Transfer-Encoding:" + _value) + b"5\r\nhello\r\n0\r\n\r\n", "POST", body=b"hello"
    )
for _name, _value in {
    "another before it": b"identity, chunked",
    "another behind it": b"chunked, gzip",
    "itself twice": b"chunked, chunked",
    "a comma before": b",chunked",
    "a comma behind": b"chunked,",
    "a parameter": b"chunked;q=1",
    "a letter less": b"chunke",
    "nothing": b"",
    "a tab inside": b"chun\tked",
    "deflate": b"deflate",
    "trailers": b"trailers",
}.items():
    ATTACKS[f"encoding of {_name}"] = refused(head(b"POST /x", b"Transfer-Encoding: " + _value) + b"0\r\n\r\n", "400")
_CODED = head(b"POST /x", b"Transfer-Encoding: chunked")
for _name, _body in {
    "zeros before the size": b"0005\r\nhello\r\n000\r\n\r\n",
    "an extension": b"5;a=b\r\nhello\r\n0;c\r\n\r\n",
    "a quoted extension": b'5;a="b;c"\r\nhello\r\n0\r\n\r\n',
    "a trailer": b"5\r\nhello\r\n0\r\nX-Sum: 1\r\n\r\n",
    "a length for a trailer": b"5\r\nhello\r\n0\r\nContent-Length: 70\r\n\r\n",
    "an encoding for a trailer": b"5\r\nhello\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a host and an upgrade for trailers": b"5\r\nhello\r\n0\r\nHost: b\r\nUpgrade: websocket\r\n\r\n",
    "upper-case hexadecimals": b"5\r\nhello\r\n0\r\n\r\n".replace(b"5", b"00005"),
}.items():
    ATTACKS[f"chunks with {_name}"] = plain(_CODED + _body, "POST", body=b"hello")
for _name, _body in {
    "a request for a trailer": b"0\r\n" + SLEEP,
    "a size of 16 digits": b"0000000000000005\r\nhello\r\n0\r\n\r\n",
    "a size over 64 bits": b"10000000000000005\r\nhello\r\n0\r\n\r\n",
    "a size of nothing": b";a\r\n0\r\n\r\n",
    "a sign": b"-0\r\n\r\n",
    "an underscore": b"0_0\r\n\r\n",
    "a space before": b" 0\r\n\r\n",
    "a tab behind": b"0\t\r\n\r\n",
    "CR for a line end": b"0\r\r\n\r\n",
    "LF for a line end": b"0\n\r\n",
    "LF in an extension": b"0;\n\r\n\r\n",
    "CR in an extension": b"0;a\rb\r\n\r\n",
    "NUL in an extension": b"0;\x00\r\n\r\n",
    "LF after a chunk": b"1\r\nx\n0\r\n\r\n",
    "a longer chunk": b"1\r\nxyz\r\n0\r\n\r\n",
    "a folded trailer": b"0\r\nX: a\r\n b\r\n\r\n",
    "a space in a trailer's name": b"0\r\nX : a\r\n\r\n",
    "a bare CR in a trailer": b"0\r\nX: a\rb\r\n\r\n",
}.items():
    ATTACKS[f"chunks with {_name}"] = refused(_CODED + _body, "400", late=True)

# -- fields, hosts, versions ---------------------------------------------------------------------------------------

_BODY = (b"Content-Length: 5",)
for _name, _fields, _seen in (
    ("a name of every sign", (b"!#$%&'*+-.^_`|~09Az: x",), {"!#$%&'*+-.^_`|~09az": "x"}),
    ("length with an underscore", (b"Content_Length: 70",), {"content_length": "70"}),
    ("encoding with an underscore", (b"Transfer_Encoding: chunked",), {"transfer_encoding": "chunked"}),
    ("length with another name before", (b"X-Content-Length: 70",), {"x-content-length": "70"}),
    ("high bytes in a value", (b"X: \xff\xa0\x85",), {"x": "\xff\xa0\x85"}),
    ("an empty value", (b"X:",), {"x": ""}),
    ("a method in a field", (b"X-HTTP-Method-Override: CONNECT",), {"x-http-method-override": "CONNECT"}),
    ("a path in a field", (b"X-Original-URL: /sleep", b"X-Rewrite-URL: /sleep"), {"x-original-url": "/sleep"}),
    ("a prefix in a field", (b"X-Forwarded-Prefix: /sleep",), {"x-forwarded-prefix": "/sleep"}),
    ("x-request-id named as hop-by-hop", (b"Connection: x-request-id", b"X-Request-Id: led-mine"), {"x-request-id": "led-mine"}),
    ("authorization named", (b"Connection: authorization", b"Authorization: Bearer x"), {"authorization": "Bearer x"}),
    ("cookie named", (b"Connection: close-not, cookie", b"Cookie: a=b"), {"cookie": "a=b"}),
    ("a proxy's field named", (b"Connection: x-forwarded-for", b"X-Forwarded-For: 10.0.0.1"), {"x-forwarded-for": "10.0.0.1"}),
    ("the host named", (b"Connection: host",), {"host": "a"}),
    ("the type named", (b"Connection: content-type, content-encoding", b"Content-Type: a/b"), {"content-type": "a/b"}),
    ("accept named", (b"Connection: Accept", b"Accept: text/x"), {"accept": "text/x"}),
    ("TE", (b"TE: trailers, chunked", b"Trailer: Content-Length"), {}),
    ("keep-alive", (b"Keep-Alive: timeout=5", b"Connection: keep-alive, keep-alive"), {}),
    ("a length named", (b"Connection: content-length",), {"content-length": "5"}),
):  # fmt: skip
    ATTACKS[f"field: {_name}"] = Attack(
        head(b"POST /x", *_fields, *_BODY) + b"hello" + SECOND,
        ("200", "200"),
        (("POST", "/x", b"hello"), ("GET", "/second", b"")),
        _seen,
    )
ATTACKS["field: an encoding named"] = plain(
    chunked(b"POST /x", b"0123456789", b"Connection: transfer-encoding"), "POST", body=b"0123456789"
)
for _name, _hosts, _status in (
    ("two", b"Host: a\r\nHost: a\r\n", "400"),
    ("two in different case", b"Host: a\r\nHOST: b\r\n", "400"),
    ("none", b"", "400"),
    ("a user", b"Host: user@a\r\n", "400"),
    ("a path", b"Host: a/sleep\r\n", "400"),
    ("a scheme", b"Host: http://a\r\n", "400"),
    ("a space", b"Host: a b\r\n", "400"),
    ("a backslash", b"Host: a\\b\r\n", "400"),
    ("a question", b"Host: a?b\r\n", "400"),
    ("a fragment", b"Host: a#b\r\n", "400"),
):
    ATTACKS[f"host: {_name}"] = refused(head(b"GET /x", host=_hosts), _status)
for _name, _hosts in (("nothing", b"Host:\r\n"), ("a port", b"Host: [::1]:80\r\n"), ("upper case", b"HOST: A\r\n")):
    ATTACKS[f"host: {_name}"] = plain(head(b"GET /x", host=_hosts), "GET")
ATTACKS |= {
    "HTTP/1.0 without host": Attack(
        b"GET /x HTTP/1.0\r\n\r\n" + SLEEP, ("200",), (("GET", "/x", b""),), {"host": "localhost"}, ends=True
    ),
    "HTTP/1.0 with host": Attack(
        b"GET /x HTTP/1.0\r\nHost: b\r\n\r\n", ("200",), (("GET", "/x", b""),), {"host": "b"}, ends=True
    ),
    "HTTP/1.0 that is kept": Attack(
        b"POST /x HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 5\r\n\r\nhello" + SLEEP,
        ("200",),
        (("POST", "/x", b"hello"),),
        ends=True,
    ),
    "HTTP/1.0 with chunks": refused(b"POST /x HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400"),
    "HTTP/1.0 with two hosts": refused(b"GET /x HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", "400"),
    "close": Attack(head(b"GET /x", b"Connection: close") + SLEEP, ("200",), (("GET", "/x", b""),), ends=True),
    "close among others": Attack(
        head(b"GET /x", b"Connection: keep-alive, Close, x") + SLEEP, ("200",), (("GET", "/x", b""),), ends=True
    ),
    "empty lines before": plain(b"\r\n\r\n" + head(b"GET /x"), "GET"),
    "expectation met by the body": plain(sized(b"POST /x", SLEEP, b"Expect: 100-Continue"), "POST", body=SLEEP),
    "expectation without body": plain(head(b"GET /x", b"Expect: 100-continue"), "GET"),
    "expectation of two kinds": refused(sized(b"POST /x", b"a", b"Expect: x", b"Expect: 100-continue"), "417"),
    "expectation of a list": refused(sized(b"POST /x", b"a", b"Expect: 100-continue, x"), "417"),
    "expectation of nothing": refused(sized(b"POST /x", b"a", b"Expect:"), "417"),
    "a health path with a body": Attack(sized(b"GET /livez", SLEEP), ("200",), ends=True),
    "a health path with chunks": Attack(chunked(b"GET /livez", SLEEP), ("200",), ends=True),
    "many at once": Attack(
        b"".join(head(b"GET /%d" % number) for number in range(8)) + SLEEP,
        ("200",) * 8 + ("403",),
        tuple(("GET", f"/{number}", b"") for number in range(8)),
    ),
}  # fmt: skip

# -- paths ---------------------------------------------------------------------------------------------------------

for _path in (
    *(b"/sleep", b"//sleep", b"/./sleep", b"/x/../sleep", b"/sleep/", b"/%73leep", b"/%2573leep", b"/SLEEP"),
    *(b"/sleep%0a", b"/sleep%20", b"/sleep;a=b", b"/sleep%3ba", b"/sleep%2f", b"/%2fsleep", b"/x%2f..%2fsleep"),
    *(b"/%5csleep", b"/x\\..\\sleep", b"/sleep?a", b"/sleep?/../x", b"/sleep?%23"),
    *(
        b"/api/sleep",
        b"/api//sleep",
        b"/API/sleep",
        b"/api/api/sleep",
        b"/%61pi/sleep",
        b"/api/./sleep",
        b"//api/sleep",
    ),
    *(b"/api%2fsleep", b"/api/x/../sleep", b"/x/../api/sleep", b"/api;x/sleep", b"/api/sleep/"),
    *(
        b"/collective_rpc",
        b"/collective%5frpc",
        b"/api/collective_rpc",
        b"/v1/load_lora_adapter",
        b"/v1//load_lora_adapter",
    ),
    *(b"/adapters", b"/adapters/x", b"/adapters/..", b"/adapters/%2e%2e", b"/adapters/.%2e", b"/adapters/%2e."),
    *(b"/adapters/..;x", b"/adapters/..%3bx", b"/adapters/.", b"/adapters/%2E", b"/adapters/..%2f", b"/adapters/../"),
    *(b"/adapters/x/..", b"/adapters/x/../..", b"/adapters/..\\", b"/adapters/%252e%252e", b"/adapters/../v1/models"),
    *(b"/api/adapters/..", b"/api/adapters/%2e%2e", b"/ADAPTERS/..", b"//adapters//..", b"/adapters/../adapters/.."),
    *(b"/adapters/..?x", b"/adapters/...", b"/adapters/..%00", b"/adapters/..%20", b"/x/../adapters/.."),
):
    ATTACKS[f"path {_path.decode()}"] = refused(sized(b"POST " + _path, b"{}"), "403")
ATTACKS |= {
    "target with a server": plain(sized(b"POST http://b:81/x?y=1", b"{}"), "POST", "/x", b"{}", host="b:81"),
    "target with a server, admin path": refused(sized(b"POST http://a/sleep", b"{}"), "403"),
    "target with a server, spelt otherwise": refused(sized(b"POST HTTPS://a//%73leep/", b"{}"), "403"),
    "target with a server for path": refused(sized(b"POST http://a/x/../http://a/../../sleep", b"{}"), "403"),
    "target with a server alone": plain(head(b"GET http://b", host=b"Host: a\r\n"), "GET", "/", host="b"),
    "target with a server and a query": plain(head(b"GET http://b?x=/sleep"), "GET", "/", host="b"),
    "target with a user": refused(sized(b"POST http://u@a/x", b"{}"), "400"),
    "target of an asterisk": Attack(head(b"OPTIONS *") + SECOND, ("200", "200"), (("GET", "/second", b""),)),
    "target of an asterisk with a body": Attack(sized(b"OPTIONS *", SLEEP) + SLEEP, ("200",), ends=True),
    "target that looks like a server's": plain(sized(b"POST //a@b:80/sleep", b"{}"), "POST", "//a@b:80/sleep", b"{}"),
    "target with a URL for path": plain(sized(b"POST /http://a/sleep", b"{}"), "POST", "/http://a/sleep", b"{}"),
}

ATTACKS |= {
    f"malformed: {name}": refused(raw, "400 405 413 417", late=raw.startswith(CHUNKED))
    for name, raw in MALFORMED.items()
}
