"""What the head of an HTTP/1.1 message means: framing, lifetime of the connection, and the head that is sent on.

Rules:
* A request whose framing two servers could read differently is a refusal, never forwarded (RFC 9112, 6.3 and 11.2).
* Methods are a fixed list. Of any other token nobody here knows how the engine's parsers end its message: llhttp ends a
  CONNECT with its head, whatever length it announces, and reads the body as the next request.
* An upgrade is asked for only by a GET of a websocket without body; any other `Upgrade` field is dropped, as RFC 9110,
  7.8 allows, since llhttp takes what follows such a request for another protocol.
* The heads sent on are built anew: the hop-by-hop fields are dropped (RFC 9110, 7.6.1), exactly one framing field is
  sent, and always one Host; every other field keeps its spelling, value and place.
* Hop-by-hop is what RFC 9110 and 9113 define so, and nothing that only `Connection` names. Removing what a client
  names lets it take away what a proxy before us has added (X-Forwarded-For, a user's identity) or what we rely on
  (X-Request-Id), and the engine itself, asked directly, would have read every one of these fields.
* A raw request head is checked against one strict grammar before the parser sees it; both must accept it. The grammar
  knows no bare LF, no folding and no control characters.
* The engine gets targets in origin form alone. Of an absolute form (RFC 9112, 3.2.2) the path is taken, and its host
  stands for the Host field; `OPTIONS *` is ours to answer.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from vllm_supervisor.core import forwarding

Fields = list[tuple[bytes, bytes]]
Shape = tuple[bytes, bytes]

CHUNKED = -1  # RequestHead.length of a body whose end only its chunks tell
MAX_FIELDS = 256  # as vLLM's own limit (`--h11-max-header-count`)
_MAX_LENGTH_DIGITS = 18
_MAX_OPTIONS = 64  # in one Connection field

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
_REQUEST_HEAD = re.compile(
    rb"(?:\r\n)?"  # RFC 9112, 2.2: one empty line before a request is forgiven
    + _TOKEN
    # No '#': a fragment is cut off by some servers and kept by others.
    + rb"{1,32}+ (?:/[!\"$-~]*+|[Hh][Tt][Tt][Pp][Ss]?://[0-9A-Za-z.\-_~%!$&'()*+,;=\[\]:]++(?:[/?][!\"$-~]*+)?+|\*)"
    + rb" HTTP/1\.[01]\r\n"
    + rb"(?:"
    + _TOKEN
    + rb"++:[\t -~\x80-\xff]*+\r\n)*+\r\n"
)
_ANSWER_HEAD = re.compile(rb"HTTP/1\.1 [^\r\n]++\r\n(?:[^\r\n]++\r\n)*+\r\n")
_PLAIN_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ?([1-9][0-9]{0,17})\r\n")

# What vLLM and our own paths serve. Every method here has a body exactly if its framing says so, in llhttp and in h11.
METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"})
_METHOD = re.compile(rb"(?:\r\n)?(" + _TOKEN + rb"{1,32}+) ")
ALLOW = b"Allow: GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS\r\n"

_HOST = re.compile(rb"[0-9A-Za-z.\-_~%!$&'()*+,;=\[\]:]*")

_ABSOLUTE = re.compile(rb"[Hh][Tt][Tt][Pp][Ss]?://([^/?]+)(.*)")
EVERYWHERE = b"*"  # the target of an OPTIONS that asks about the server itself

REPEATABLE = frozenset({b"GET", b"HEAD", b"OPTIONS"})  # asking twice is asking once (RFC 9110, 9.2.1)

# Fields that mean something to us; every other field is passed on unread.
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"content-length",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOTED_IN_REQUESTS = _HOP_BY_HOP | forwarding.NOTED | {b"host", b"expect", b"x-request-id"}
_NOTED_IN_ANSWERS = _HOP_BY_HOP | {b"content-type", b"x-accel-buffering"}
_INTERIM = frozenset({100, 101, 102, 103})  # the others are not known to have no body
_REASON = re.compile(rb"[\t -~\x80-\xff]*")


@dataclass(frozen=True, slots=True)
class BadRequest:
    """A request head that is refused: HTTP status, one sentence for a person, and further header lines."""

    status: int
    message: str
    fields: bytes = b""


class RequestHead(NamedTuple):
    """A request that may be served. `length` is the body's bytes, or CHUNKED; `fields` end each with CRLF.

    `forwarded` are the values of X-Forwarded-For and X-Forwarded-Proto, which are not among the fields; None: neither came.
    """

    method: bytes
    target: bytes
    old: bool  # HTTP/1.0: no chunks, one answer a connection
    length: int
    keep_alive: bool
    upgrade: bool  # asks for a websocket
    expects_continue: bool
    request_id: bytes | None
    fields: bytes
    forwarded: forwarding.Said | None = None

    def with_length(self, length: int) -> "RequestHead":
        """Return the same with another length, in a third of the time that `_replace` needs."""
        return RequestHead(
            self.method, self.target, self.old, length,
            self.keep_alive, self.upgrade, self.expects_continue, self.request_id, self.fields, self.forwarded,
        )  # fmt: skip


class Framing(Enum):
    """How the end of an answer's body is told."""

    NONE = auto()
    LENGTH = auto()
    CHUNKED = auto()
    CLOSE = auto()


class AnswerHead(NamedTuple):
    """The head of an engine's answer; `fields` without framing and hop-by-hop, each ending with CRLF."""

    status: int
    reason: bytes
    framing: Framing
    length: bytes | None
    media_type: bytes
    event_stream: bool
    switches: bool  # 101
    keep_alive: bool  # the engine will take another request on this connection
    fields: bytes

    def with_length(self, length: bytes) -> "AnswerHead":
        """Return the same with another length."""
        return AnswerHead(
            self.status, self.reason, self.framing, length,
            self.media_type, self.event_stream, self.switches, self.keep_alive, self.fields,
        )  # fmt: skip

    @property
    def open_ended(self) -> bool:
        """Whether the length of the body is not known in advance."""
        return self.framing is Framing.CHUNKED or self.framing is Framing.CLOSE


class BadAnswerError(Exception):
    """The engine's answer breaks the protocol; the fault is the engine's."""


def broken_line(head: bytes | bytearray, begin: int = 0) -> bool:
    """Say whether an incomplete request head holds, from `begin` on, a line end that can never become a valid one.

    A line end without CR, or a CR without LF but at the very end, can be refused before the head is complete. `begin` may
    stand anywhere but between CR and LF.
    """
    whole = head.count(b"\r\n", begin)
    return head.count(b"\n", begin) != whole or head.count(b"\r", begin) - head.endswith(b"\r", begin) != whole


def well_formed(head: bytes) -> bool:
    """Say whether a complete raw request head (with its final empty line) fits the strict grammar."""
    return _REQUEST_HEAD.fullmatch(head) is not None


def refused_method(head: bytes) -> BadRequest | None:
    """Return the refusal of a raw request head whose method is none of ours, or None."""
    method = _METHOD.match(head)
    if method is None or method[1] in METHODS:
        return None
    return BadRequest(405, "this method is not served", ALLOW)


def head_shape(head: bytes) -> tuple[Shape, bytes]:
    """Return what stands before and behind the digits of the first plain Content-Length of a raw head, and the digits.

    Without such a field everything stands before. If one head of a shape is valid, so is every other, and they differ
    in that number alone: it has no other such field. Zero is no such number, since an empty body means more than that.
    """
    found = _PLAIN_LENGTH.search(head)
    if found is None:
        return (head, b""), b""
    start, end = found.span(1)
    return (head[:start], head[end:]), found[1]


def plain_answer(head: bytes) -> bool:
    """Say whether a raw head of an answer ends with its first empty line for every reader: no bare CR or LF in it."""
    return _ANSWER_HEAD.fullmatch(head) is not None


def read_request(method: bytes, target: bytes, fields: Fields, *, old: bool, max_body: int) -> RequestHead | BadRequest:
    """Decide what a parsed request head asks for; `old` means HTTP/1.0."""
    if len(fields) > MAX_FIELDS:
        return BadRequest(431, f"more than {MAX_FIELDS} header fields")
    authority: bytes | None = None
    if not target.startswith(b"/") and (target != EVERYWHERE or method != b"OPTIONS"):
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is None:
            return BadRequest(400, "the target of the request is no path")
        authority, target = absolute[1], absolute[2]
        if not target.startswith(b"/"):
            target = b"/" + target
    kept: Fields = []
    options: set[bytes] = set()
    lengths: list[bytes] = []
    encodings: list[bytes] = []
    hosts = 0
    expects = False
    upgrade = b""
    request_id: bytes | None = None
    chain: bytes | None = None
    proto: bytes | None = None
    for field in fields:
        name, value = field
        name = name.lower()
        if name not in _NOTED_IN_REQUESTS:
            kept.append(field)
        elif name == b"host":
            hosts += 1
            if _HOST.fullmatch(value) is None:
                return BadRequest(400, "the Host field is not a host name")
            kept.append(field if authority is None else (field[0], authority))
        elif name == b"content-length":
            lengths.append(value)
        elif name == b"connection":
            if value.count(b",") >= _MAX_OPTIONS:
                return BadRequest(400, "too many connection options")
            options.update(option.strip().lower() for option in value.split(b","))
        elif name == b"x-request-id":
            if request_id is None:  # the engine takes the first, too
                request_id = value
            kept.append(field)
        elif name == b"transfer-encoding":
            encodings.append(value)
        elif name == b"expect":
            if value.lower() != b"100-continue":
                return BadRequest(417, "only 100-continue can be expected")
            expects = True
        elif name == b"upgrade":
            upgrade = value
        elif name == forwarding.FOR:
            chain = value if chain is None else chain + b", " + value
        elif name == forwarding.PROTO:
            proto = value
    if hosts > 1 or (hosts == 0 and not old):
        return BadRequest(400, "a request needs exactly one Host field")
    length = _request_length(lengths, encodings, old=old)
    if isinstance(length, BadRequest):
        return length
    if length > max_body:
        return BadRequest(413, f"the body is larger than {max_body} bytes")
    wants_websocket = (
        not old and length == 0 and method == b"GET" and b"upgrade" in options and upgrade.lower() == b"websocket"
    )
    lines = _lines(kept)
    if not hosts:
        lines = (_NO_HOST if authority is None else b"Host: %b\r\n" % authority) + lines
    if wants_websocket:
        lines += b"Connection: upgrade\r\nUpgrade: " + upgrade + b"\r\n"
    return RequestHead(
        method,
        target,
        old,
        length,
        keep_alive=not old and b"close" not in options,
        upgrade=wants_websocket,
        expects_continue=expects and not old and length != 0,
        request_id=request_id,
        fields=lines,
        forwarded=None if chain is None and proto is None else (chain, proto),
    )


def _request_length(lengths: list[bytes], encodings: list[bytes], *, old: bool) -> int | BadRequest:
    if encodings:
        if lengths:
            return BadRequest(400, "Content-Length and Transfer-Encoding exclude each other")
        if old:
            return BadRequest(400, "HTTP/1.0 knows no Transfer-Encoding")
        if len(encodings) != 1 or encodings[0].lower() != b"chunked":
            return BadRequest(400, "the only transfer encoding that is understood is chunked")
        return CHUNKED
    if not lengths:
        return 0
    if len(lengths) != 1:
        return BadRequest(400, "more than one Content-Length")
    if not lengths[0].isdigit() or len(lengths[0]) > _MAX_LENGTH_DIGITS:
        return BadRequest(400, "Content-Length is not a number")
    return int(lengths[0])


def engine_head(head: RequestHead, request_id: bytes, client: bytes = b"") -> bytes:
    """Build the head sent to the engine; `request_id` is ours, used only where the client sent none.

    `client` are the header lines that tell whose request it is (`core/forwarding.py`).
    """
    ids = b"X-Request-Id: %b\r\n" % request_id if head.request_id is None else b""
    framing = b""
    if head.length == CHUNKED:
        framing = b"Transfer-Encoding: chunked\r\n"
    elif head.length or head.method in _BODY_METHODS:
        framing = b"Content-Length: %d\r\n" % head.length
    return b"%b %b HTTP/1.1\r\n%b%b%b%b\r\n" % (head.method, head.target, head.fields, client, ids, framing)


# Without these the engine gives its whole page, as it is, or an error.
_NOT_FOR_A_PAGE = (b"accept-encoding:", b"if-", b"range:", b"connection:", b"upgrade:")


def page_head(head: RequestHead, client: bytes) -> bytes:
    """Build the head with which the engine is asked for a page that is to be added to, with the client's own fields."""
    kept = b"".join(
        line + b"\r\n" for line in head.fields.split(b"\r\n")[:-1] if not line.lower().startswith(_NOT_FOR_A_PAGE)
    )
    return b"GET %b HTTP/1.1\r\n%b%bConnection: close\r\n\r\n" % (head.target, kept, client)


_BODY_METHODS = frozenset({b"POST", b"PUT", b"PATCH"})
# An HTTP/1.0 request needs no Host, but goes on as HTTP/1.1, and h11 refuses that without one. The name is no client's.
_NO_HOST = b"Host: localhost\r\n"


def read_answer(status: int, reason: bytes, fields: Fields, *, old: bool, to_head: bool) -> AnswerHead:
    """Decide what the head of an engine's answer says; `old` means HTTP/1.0, `to_head` that it answers HEAD.

    Raises BadAnswerError when its framing cannot be trusted.
    """
    known = 200 <= status < 600 or (status in _INTERIM and not old)
    if not known or _REASON.fullmatch(reason) is None:
        raise BadAnswerError("a status line that HTTP does not know")
    kept: Fields = []
    options: set[bytes] = set()
    length: bytes | None = None
    encoding: bytes | None = None
    media_type = b""
    buffering = False
    upgrade = b""
    for field in fields:
        name, value = field
        name = name.lower()
        if name not in _NOTED_IN_ANSWERS:
            kept.append(field)
        elif name == b"content-type":
            media_type = value
            kept.append(field)
        elif name == b"content-length":
            if length is not None or not value.isdigit():
                raise BadAnswerError("a Content-Length that cannot be trusted")
            length = value
        elif name == b"transfer-encoding":
            if encoding is not None or value.lower() != b"chunked":
                raise BadAnswerError("a Transfer-Encoding other than chunked")
            encoding = value
        elif name == b"connection":
            options.update(option.strip().lower() for option in value.split(b","))
        elif name == b"x-accel-buffering":
            buffering = True
            kept.append(field)
        elif name == b"upgrade":
            upgrade = value
    if length is not None and encoding is not None:
        raise BadAnswerError("both Content-Length and Transfer-Encoding")
    if encoding is not None and old:
        raise BadAnswerError("chunks in HTTP/1.0")
    if status == 101 and (upgrade.lower() != b"websocket" or b"upgrade" not in options):
        raise BadAnswerError("101 without a switch to a websocket")
    if status < 200 or status == 204:
        framing, length = Framing.NONE, None
    elif to_head or status == 304:
        framing = Framing.NONE
    elif encoding is not None:
        framing = Framing.CHUNKED
    elif length is not None:
        framing = Framing.LENGTH
    else:
        framing = Framing.CLOSE
    event_stream = media_type[:17].lower() == b"text/event-stream"
    lines = _lines(kept)
    if event_stream and not buffering:
        lines += b"X-Accel-Buffering: no\r\n"
    if status == 101:
        lines += b"Connection: upgrade\r\nUpgrade: " + upgrade + b"\r\n"
    keep_alive = not old and b"close" not in options and framing is not Framing.CLOSE
    return AnswerHead(status, reason, framing, length, media_type, event_stream, status == 101, keep_alive, lines)


def client_head(head: AnswerHead, *, old: bool, close: bool, ledger_id: bytes | None) -> bytes:
    """Build the head sent to the client: its framing is chunked wherever the length is not known in advance."""
    framing = b""
    if head.length is not None:
        framing = b"Content-Length: %b\r\n" % head.length
    elif head.open_ended and not old:
        framing = b"Transfer-Encoding: chunked\r\n"
    ids = b"" if ledger_id is None else b"X-Ledger-Id: %b\r\n" % ledger_id
    end = b"Connection: close\r\n\r\n" if close and not head.switches else b"\r\n"
    return b"HTTP/1.1 %d %b\r\n%b%b%b%b" % (head.status, head.reason, head.fields, framing, ids, end)


def interim_heads(heads: Iterable[AnswerHead]) -> bytes:
    """Build what a client of HTTP/1.1 gets of 1xx answers: all but 100, which is ours to say."""
    kept = (head for head in heads if head.status != 100)
    return b"".join([client_head(head, old=False, close=False, ledger_id=None) for head in kept])


def trailer_lines(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Build the trailer section of a chunked answer, without the fields that only make sense in a head."""
    return _lines((name, value) for name, value in fields if name.lower() not in _NOTED_IN_ANSWERS)


def _lines(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join([b"%b: %b\r\n" % field for field in fields])
