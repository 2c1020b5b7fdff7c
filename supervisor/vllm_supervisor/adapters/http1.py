"""The HTTP/1.1 parsers (httptools, that is llhttp) behind two small shapes: a request head, an answer.

Rules:
* A request head comes here whole and already checked against the strict grammar; the body is not parsed here.
* An answer is fed as it comes, and gives back at once what was of its body: nothing of a stream is kept here.
* The parser is stopped where the answer ends: no byte behind that is parsed, let alone given out (`surplus`).
* A parser and its events hold each other; `close` breaks the ring so that no garbage waits for the collector.
* Heads repeat. One that is byte for byte a head that was parsed before, but for the number in its one Content-Length,
  means the same but for that number, so it is not parsed again.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import httptools

from vllm_supervisor.core.http_semantics import (
    AnswerHead,
    BadAnswerError,
    BadRequest,
    Fields,
    Framing,
    RequestHead,
    Shape,
    head_shape,
    plain_answer,
    read_answer,
    read_request,
    refused_method,
    well_formed,
)

_VERSIONS = frozenset({"1.0", "1.1"})
_MAX_INTERIM = 8  # 1xx answers before the real one
_REMEMBERED = 512  # heads
_REMEMBERED_BYTES = 2048  # of a head; a larger one is not kept
_END_OF_HEAD = b"\r\n\r\n"
_EMPTY_LINES = (
    b"\r\n\r\n\r\n",
    b"\r\n\r\n\n",
    b"\r\n\r\n\r",
)  # ends of what is more than an end of a head or of chunks

Head = TypeVar("Head", RequestHead, AnswerHead)


class _Known(dict[Shape, Head]):
    """Heads by their shape, bounded: when it is full it begins anew, which costs each head one more parsing."""

    def keep(self, shape: Shape, head: Head) -> None:
        if len(shape[0]) + len(shape[1]) <= _REMEMBERED_BYTES:
            if len(self) >= _REMEMBERED:
                self.clear()
            self[shape] = head


class _HeadEvents:
    __slots__ = ("fields", "target")

    def __init__(self) -> None:
        self.fields: Fields = []
        self.target = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name, value))

    def on_url(self, target: bytes) -> None:
        self.target += target


def parse_request(head: bytes, *, max_body: int) -> RequestHead | BadRequest:
    """Parse a whole, well-formed request head (up to and with its empty line)."""
    events = _HeadEvents()
    parser = httptools.HttpRequestParser(events)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass  # the head is complete; whether anything is upgraded is decided by the engine
    except httptools.HttpParserError:
        return BadRequest(400, "the request is not valid HTTP/1.1")
    return read_request(
        parser.get_method(), events.target, events.fields, old=parser.get_http_version() == "1.0", max_body=max_body
    )


class RequestHeads:
    """Reads the request heads of one front door."""

    def __init__(self, max_body: int) -> None:
        """Refuse bodies that are announced as larger than `max_body` bytes."""
        self._max_body = max_body
        self._known: _Known[RequestHead] = _Known()

    def read(self, raw: bytes) -> RequestHead | BadRequest:
        """Say what a complete raw head (up to and with its empty line) asks for."""
        shape, digits = head_shape(raw)
        head = self._known.get(shape)
        if head is not None:
            length = int(digits) if digits else head.length
            if length == head.length:
                return head
            if length <= self._max_body:
                return head.with_length(length)
        refused = refused_method(raw)
        if refused is not None:
            return refused
        if not well_formed(raw):
            return BadRequest(400, "the request head is not valid HTTP/1.1")
        read = parse_request(raw, max_body=self._max_body)
        if not isinstance(read, BadRequest):
            self._known.keep(shape, read)
        return read


class AnswerHeads:
    """The heads of whole answers that one front door has seen."""

    def __init__(self) -> None:
        """Begin empty."""
        self._known: _Known[AnswerHead] = _Known()

    def whole(self, data: bytes) -> tuple[AnswerHead, bytes] | None:
        """Return head and body if `data` is a whole answer with a known head, which needs no parser; else None."""
        end = data.find(_END_OF_HEAD) + len(_END_OF_HEAD)
        if end < len(_END_OF_HEAD):
            return None
        shape, digits = head_shape(data[:end])
        head = self._known.get(shape)
        if head is None or head.length is None:
            return None
        length = digits or head.length
        if int(length) != len(data) - end:
            return None
        if length != head.length:
            head = head.with_length(length)
        return head, data[end:]

    def keep(self, raw: bytes, head: AnswerHead) -> None:
        """Remember the head of an answer, if its end is plain and tells the length of the body."""
        if head.framing is Framing.LENGTH and plain_answer(raw):
            self._known.keep(head_shape(raw)[0], head)


class Answer:
    """One answer of the engine while it passes. `head` is set once it is complete, `interim` before that for 1xx."""

    # What begins so stands here, once, not in every answer: the usual one changes two of these.
    head: AnswerHead | None = None
    interim: tuple[AnswerHead, ...] = ()
    trailers: Sequence[tuple[bytes, bytes]] = ()
    complete = False
    surplus = False  # bytes came after the end, or of a body that this answer cannot have
    tunnelled = b""  # bytes behind a 101
    _opening = b""  # what may be the raw head, if it came in one piece
    _reason = b""
    _quiet = 0  # bytes read since the last one of a body
    _interims = 0  # 1xx answers so far
    _parser: Any = None
    _fields: Fields
    _pieces: list[bytes]

    def __init__(self, *, to_head: bool, heads: AnswerHeads | None = None) -> None:
        """`to_head`: the request was HEAD, so whatever the fields say there is no body. `heads` are those known."""
        self._to_head = to_head
        self._bodiless = to_head
        self._heads = None if to_head else heads

    # -- events of the parser ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Stop the parser at a second message, which nobody asked for, before it reads anything of it."""
        if self.complete:
            raise BadAnswerError("bytes after the end of an answer")

    def on_status(self, reason: bytes) -> None:
        """Keep the reason phrase, which may come in parts."""
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep one field of the head, or of the trailer section."""
        self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        """Decide what the head means."""
        parser = self._parser
        version = parser.get_http_version()
        if version not in _VERSIONS:
            raise BadAnswerError(f"HTTP {version}")
        head = read_answer(
            parser.get_status_code(), self._reason, self._fields, old=version == "1.0", to_head=self._to_head
        )
        self._fields = []
        self._reason = b""
        if head.status < 200 and not head.switches:
            self._opening = b""  # is not the head of this answer
            self._interims += 1
            if self._interims > _MAX_INTERIM:
                raise BadAnswerError("interim answers without end")
            self.interim = (*self.interim, head)
            return
        self.head = head
        if self._to_head or head.switches:
            self.complete = True
        elif head.framing is Framing.NONE:
            self._bodiless = True
        elif self._opening and self._heads is not None:
            self._heads.keep(self._opening, head)

    def on_message_complete(self) -> None:
        """Note the end, unless it is that of an interim answer."""
        if self.head is not None and not self.complete:
            self.complete = True
            self.trailers = self._fields

    # -- what the exchange uses --------------------------------------------------------------------------------

    def feed(self, data: bytes, max_head: int) -> bytes:
        """Parse the next bytes from the engine and return those of the body; raises BadAnswerError."""
        parser = self._parser
        if parser is None:
            if self.complete:
                self.surplus = True
                return b""
            parser = self._begin(data)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self.tunnelled = data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            if not self.complete:
                raise BadAnswerError(str(error.__context__ or error)) from error
            self.surplus = True
        pieces = self._pieces
        if not pieces:
            if not self.complete:
                # Inside a head, an extension or a trailer section, which the parser would collect without end.
                self._quiet += len(data)
                if self._quiet > max_head:
                    raise BadAnswerError("a head or trailer section without end")
            elif not self.tunnelled and self._followed(data, b""):
                self.surplus = True
            return b""
        self._quiet = 0
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self._bodiless:
            self.surplus = True
            return b""
        if self.complete and self._followed(data, body):
            self.surplus = True
        return body

    def _followed(self, data: bytes, body: bytes) -> bool:
        """Say whether something follows the end of the answer in `data` that the parser has passed over in silence.

        That can only be empty lines, or chunks without content after HEAD. One that is overlooked does no harm: what was
        read with an answer is dropped with it.
        """
        framing = self.head.framing if self.head is not None else Framing.NONE
        if framing is Framing.LENGTH and body:
            return not data.endswith(body)
        if framing is not Framing.CHUNKED and self._opening:  # it ends with its head, which came at once
            return len(data) > len(self._opening)
        return data.endswith(_EMPTY_LINES)

    def _begin(self, data: bytes) -> Any:
        end = data.find(_END_OF_HEAD) + len(_END_OF_HEAD)
        if end >= len(_END_OF_HEAD):
            self._opening = data[:end]
        self._fields = []
        self._pieces = []
        self.on_body = self._pieces.append  # called by the parser without a Python frame
        parser = self._parser = httptools.HttpResponseParser(self)
        return parser

    def close(self) -> None:
        """Let go of the parser."""
        self._parser = None
