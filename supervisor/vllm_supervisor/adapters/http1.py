"""The HTTP/1.1 parsers (httptools, that is llhttp) behind two small shapes: a request head, an answer.

Rules:
* A request head comes here whole and already checked against the strict grammar; the body is not parsed here.
* An answer is fed as it comes. What it held since the last look is taken by `take_body`; the collector never
  sees a stream larger than one read.
* A parser and its events hold each other; `close` breaks the ring so that no garbage waits for the collector.
"""

from typing import Any

import httptools

from vllm_supervisor.core.http_semantics import (
    AnswerHead,
    BadAnswerError,
    BadRequest,
    Fields,
    RequestHead,
    read_answer,
    read_request,
)

_MAX_INTERIM = 8  # 1xx answers before the real one


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


class Answer:
    """One answer of the engine while it passes. `head` is set once it is complete, `interim` before that for 1xx."""

    __slots__ = (
        "_fields",
        "_parser",
        "_pieces",
        "_quiet",
        "_reason",
        "_to_head",
        "complete",
        "head",
        "interim",
        "on_body",
        "surplus",
        "trailers",
        "tunnelled",
    )

    def __init__(self, *, to_head: bool) -> None:
        """`to_head`: the request was HEAD, so whatever the fields say there is no body."""
        self._to_head = to_head
        self._fields: Fields = []
        self._reason = b""
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # called by the parser without a Python frame
        self._quiet = 0  # bytes read since the last one of a body
        self.head: AnswerHead | None = None
        self.interim: list[AnswerHead] = []
        self.trailers: Fields = []
        self.complete = False
        self.surplus = False  # bytes came after the end
        self.tunnelled = b""  # bytes behind a 101
        self._parser: Any = httptools.HttpResponseParser(self)

    # -- events of the parser ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Note a message; a second one behind a complete answer is unasked for."""
        if self.complete:
            self.surplus = True

    def on_status(self, reason: bytes) -> None:
        """Keep the reason phrase, which may come in parts."""
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep one field of the head, or of the trailer section."""
        self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        """Decide what the head means."""
        if self.complete:
            return
        parser = self._parser
        old = parser.get_http_version() == "1.0"
        head = read_answer(parser.get_status_code(), self._reason, self._fields, old=old, to_head=self._to_head)
        self._fields = []
        self._reason = b""
        if head.status < 200 and not head.switches:
            self.interim.append(head)
            return
        self.head = head
        if self._to_head or head.switches:
            self.complete = True

    def on_message_complete(self) -> None:
        """Note the end, unless it is that of an interim answer."""
        if self.head is not None and not self.complete:
            self.complete = True
            self.trailers = self._fields

    # -- what the exchange uses --------------------------------------------------------------------------------

    def feed(self, data: bytes, max_head: int) -> None:
        """Parse the next bytes from the engine; raises BadAnswerError."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self.tunnelled = data[upgrade.args[0] :]
        except httptools.HttpParserCallbackError as error:
            raise BadAnswerError(str(error.__context__)) from error
        except httptools.HttpParserError as error:
            if not self.complete:
                raise BadAnswerError(str(error)) from error
            self.surplus = True
        if self._pieces:
            self._quiet = 0
        elif not self.complete:
            # Inside a head, an extension or a trailer section, which the parser would collect without end.
            self._quiet += len(data)
            if self._quiet > max_head or len(self.interim) > _MAX_INTERIM:
                raise BadAnswerError("a head or trailer section without end")
        if self._to_head and self._pieces:
            self._pieces.clear()
            self.surplus = True

    def take_body(self) -> bytes:
        """Return the body bytes read since the last call."""
        pieces = self._pieces
        if len(pieces) == 1:
            return pieces.pop()
        body = b"".join(pieces)
        pieces.clear()
        return body

    def close(self) -> None:
        """Let go of the parser."""
        self._parser = None
