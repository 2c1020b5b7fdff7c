"""Heads: what a request may look like, what an answer says, and what is sent on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_supervisor.core.http_semantics import (
    CHUNKED,
    METHODS,
    BadAnswerError,
    BadRequest,
    Framing,
    RequestHead,
    broken_line,
    client_head,
    engine_head,
    plain_answer,
    read_answer,
    read_request,
    refused_method,
    trailer_lines,
    well_formed,
)

HOST = (b"Host", b"a:1")


def _read(*fields: tuple[bytes, bytes], method: bytes = b"POST", old: bool = False) -> RequestHead | BadRequest:
    return read_request(method, b"/x", list(fields), old=old, max_body=1000)


def _status(*fields: tuple[bytes, bytes], old: bool = False) -> int:
    result = _read(*fields, old=old)
    return result.status if isinstance(result, BadRequest) else 200


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ((HOST,), 200),
        ((), 400),
        ((HOST, HOST), 400),
        (((b"Host", b"a b"),), 400),
        (((b"Host", b"a/b"),), 400),
        (((b"Host", b"[::1]:80"),), 200),
        ((HOST, (b"Content-Length", b"5")), 200),
        ((HOST, (b"Content-Length", b"5"), (b"Content-Length", b"5")), 400),
        ((HOST, (b"Content-Length", b"5"), (b"content-length", b"6")), 400),
        ((HOST, (b"Content-Length", b"5, 5")), 400),
        ((HOST, (b"Content-Length", b"+5")), 400),
        ((HOST, (b"Content-Length", b"")), 400),
        ((HOST, (b"Content-Length", b"9" * 30)), 400),
        ((HOST, (b"Content-Length", b"1001")), 413),
        ((HOST, (b"Transfer-Encoding", b"Chunked")), 200),
        ((HOST, (b"Transfer-Encoding", b"chunked"), (b"Content-Length", b"5")), 400),
        ((HOST, (b"Transfer-Encoding", b"gzip, chunked")), 400),
        ((HOST, (b"Transfer-Encoding", b"identity")), 400),
        ((HOST, (b"Transfer-Encoding", b"chunked"), (b"Transfer-Encoding", b"chunked")), 400),
        ((HOST, (b"Transfer-Encoding", b"\x0bchunked")), 400),
        ((HOST, (b"Expect", b"100-Continue"), (b"Content-Length", b"5")), 200),
        ((HOST, (b"Expect", b"200-ok")), 417),
        ((HOST, (b"Expect", b"200-ok"), (b"Expect", b"100-continue")), 417),
        ((HOST, *[(b"x-%d" % n, b"") for n in range(300)]), 431),
    ],
)
def test_framing_of_requests(fields: tuple[tuple[bytes, bytes], ...], status: int):
    """Only framing that everybody reads alike is accepted."""
    assert _status(*fields) == status


def test_old_requests_have_no_transfer_encoding_and_need_no_host():
    """HTTP/1.0 without Host is fine, with chunks it is not."""
    assert _status(old=True) == 200
    assert _status((b"Transfer-Encoding", b"chunked"), old=True) == 400


@pytest.mark.parametrize(
    ("line", "fits"),
    [
        (b"GET / HTTP/1.1", True),
        (b"GET /a?b=c&d=%20\"'<> HTTP/1.1", True),
        (b"GET /a HTTP/1.0", True),
        (b"GET http://a/ HTTP/1.1", True),
        (b"GET HTTPS://[::1]:8000?x HTTP/1.1", True),
        (b"GET http:///a HTTP/1.1", False),
        (b"GET http://u@a/ HTTP/1.1", False),
        (b"GET http://a/#b HTTP/1.1", False),
        (b"GET ws://a/ HTTP/1.1", False),
        (b"CONNECT a:80 HTTP/1.1", False),
        (b"OPTIONS * HTTP/1.1", True),
        (b"OPTIONS ** HTTP/1.1", False),
        (b"OPTIONS HTTP/1.1", False),
        (b"OPTIONS  HTTP/1.1", False),
        (b"GET /a#b HTTP/1.1", False),
        (b"GET /a b HTTP/1.1", False),
        (b"GET  /a HTTP/1.1", False),
        (b"GET\t/a HTTP/1.1", False),
        (b"GET /a\x7f HTTP/1.1", False),
        (b"GET /\xc3\xa4 HTTP/1.1", False),
        (b"GET /a HTTP/2.0", False),
        (b"GET /a HTTP/1.1 ", False),
        (b"GET /a", False),
        (b"G@T /a HTTP/1.1", False),
        (b" GET /a HTTP/1.1", False),
    ],
)
def test_request_lines(line: bytes, fits: bool):
    """Only paths, URLs without a user and `*`, in visible ASCII, with single spaces and HTTP/1.x, fit the grammar."""
    assert well_formed(line + b"\r\nHost: a\r\n\r\n") == fits


@pytest.mark.parametrize(
    ("field", "fits"),
    [
        (b"A: b", True),
        (b"A:", True),
        (b"A:b \t c\xff", True),
        (b"A : b", False),
        (b" A: b", False),
        (b"A: b\r\n c", False),
        (b"A: b\x00", False),
        (b"A: b\x0b", False),
        (b"A(: b", False),
        (b"A\xc3: b", False),
        (b": b", False),
        (b"A", False),
        (b"A: b\rc", False),
        (b"A: b\nC: d", False),
    ],
)
def test_field_lines(field: bytes, fits: bool):
    """No folding, no control characters, no space around names, no line end but CRLF."""
    assert well_formed(b"GET / HTTP/1.1\r\n" + field + b"\r\n\r\n") == fits


def test_broken_line_is_seen_before_the_head_is_whole():
    """A bare LF or a CR in the middle is known to be wrong at once; a CR that may still get its LF is not."""
    assert broken_line(b"GET / HTTP/1.1\n")
    assert broken_line(b"GET / HTTP/1.1\rX")
    assert not broken_line(b"GET / HTTP/1.1\r")
    assert not broken_line(b"GET / HTTP/1.1\r\nHo")


def test_head_for_the_engine():
    """Hop-by-hop fields go, exactly one framing field comes, the rest is untouched, whatever Connection names."""
    head = _read(
        HOST,
        (b"Keep-Alive", b"5"),
        (b"Connection", b"keep-alive, X-Named, Host, content-length"),
        (b"X-Named", b"1"),
        (b"HTTP2-Settings", b"AA"),
        (b"X-End", b"2"),
        (b"Upgrade", b"h2c"),
        (b"TE", b"trailers"),
        (b"Expect", b"100-continue"),
        (b"Proxy-Authorization", b"x"),
        (b"Content-Length", b"5"),
    )
    assert isinstance(head, RequestHead)
    assert head.expects_continue
    assert engine_head(head, b"id-1") == (
        b"POST /x HTTP/1.1\r\nHost: a:1\r\nX-Named: 1\r\nX-End: 2\r\nX-Request-Id: id-1\r\nContent-Length: 5\r\n\r\n"
    )
    chunked = _read(HOST, (b"Transfer-Encoding", b"chunked"), (b"x-request-id", b"mine"))
    assert isinstance(chunked, RequestHead)
    assert chunked.length == CHUNKED
    assert engine_head(chunked, b"id-1") == (
        b"POST /x HTTP/1.1\r\nHost: a:1\r\nx-request-id: mine\r\nTransfer-Encoding: chunked\r\n\r\n"
    )


@pytest.mark.parametrize(
    "name", [b"X-Request-Id", b"Host", b"Authorization", b"Cookie", b"Content-Type", b"X-Forwarded-Host", b"Accept"]
)
def test_no_field_is_taken_away_by_naming_it(name: bytes):
    """A request goes on with each field that `Connection` names, unless it is hop-by-hop by itself; so does an answer."""
    field = (name, b"a")
    named = (b"Connection", b"close, " + name.lower())
    head = _read(named, *([field] if name == b"Host" else [HOST, field]))
    assert isinstance(head, RequestHead)
    assert b"%b: a\r\n" % name in engine_head(head, b"id-1")
    answer = read_answer(200, b"", [named, field], old=False, to_head=False)
    assert b"%b: a\r\n" % name in answer.fields


def test_the_first_of_two_request_ids_is_the_one_the_engine_takes():
    """Starlette's headers give the first of several, so this is what the engine calls the request."""
    head = _read(HOST, (b"X-Request-Id", b"one"), (b"x-request-id", b"two"))
    assert isinstance(head, RequestHead)
    assert head.request_id == b"one"


def test_an_old_request_without_host_goes_on_with_one():
    """HTTP/1.0 may leave the Host out; HTTP/1.1, as which it goes on, may not."""
    head = _read(old=True)
    assert isinstance(head, RequestHead)
    assert engine_head(head, b"i").startswith(b"POST /x HTTP/1.1\r\nHost: localhost\r\n")
    named = _read((b"host", b""), old=True)
    assert isinstance(named, RequestHead)
    assert engine_head(named, b"i").startswith(b"POST /x HTTP/1.1\r\nhost: \r\nX-")


@pytest.mark.parametrize(
    ("start", "served"),
    [
        *((method, True) for method in sorted(METHODS)),
        *((b"\r\n" + method, True) for method in sorted(METHODS)),
        *((method.lower(), False) for method in sorted(METHODS)),
        *((method, False) for method in (b"CONNECT", b"TRACE", b"PRI", b"SOURCE", b"GETS", b"G", b"\r\nCONNECT")),
    ],
)
def test_methods_are_a_fixed_list(start: bytes, served: bool):
    """Any other method is answered with 405 and those that are served, whatever target follows it."""
    for target in (b"/x", b"a:80", b"*", b"http://a/x"):
        refusal = refused_method(start + b" " + target + b" HTTP/1.1\r\n\r\n")
        assert (refusal is None) == served
        if refusal is not None:
            assert refusal.status == 405
            assert refusal.fields == b"Allow: GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS\r\n"


@pytest.mark.parametrize("start", [b"", b" GET", b"G@T", b"\x16\x03", b"A" * 33, b"GET\t"])
def test_what_is_no_method_is_left_to_the_grammar(start: bytes):
    """405 is for methods; what is none is a broken request line."""
    assert refused_method(start + b" /x HTTP/1.1\r\n\r\n") is None
    assert not well_formed(start + b" /x HTTP/1.1\r\n\r\n")


@pytest.mark.parametrize(
    ("fields", "method", "upgrade"),
    [
        (((b"Connection", b"Upgrade"), (b"Upgrade", b"WebSocket")), b"GET", True),
        (((b"Connection", b"Upgrade"), (b"Upgrade", b"h2c")), b"GET", False),
        (((b"Upgrade", b"websocket"),), b"GET", False),
        (((b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")), b"POST", False),
        (((b"Connection", b"Upgrade"), (b"Upgrade", b"websocket"), (b"Content-Length", b"5")), b"GET", False),
    ],
)
def test_only_websockets_are_upgraded(fields: tuple[tuple[bytes, bytes], ...], method: bytes, upgrade: bool):
    """An upgrade is a GET without a body that asks for a websocket in both fields; nothing else is passed on."""
    head = _read(HOST, *fields, method=method)
    assert isinstance(head, RequestHead)
    assert head.upgrade == upgrade
    assert (b"Upgrade: " in engine_head(head, b"i")) == upgrade


@pytest.mark.parametrize(
    ("status", "fields", "to_head", "framing", "head"),
    [
        (200, [(b"Content-Length", b"5")], False, Framing.LENGTH, b"Content-Length: 5\r\n"),
        (200, [(b"Content-Length", b"5")], True, Framing.NONE, b"Content-Length: 5\r\n"),
        (200, [(b"Transfer-Encoding", b"chunked")], False, Framing.CHUNKED, b"Transfer-Encoding: chunked\r\n"),
        (200, [], False, Framing.CLOSE, b"Transfer-Encoding: chunked\r\n"),
        (204, [(b"Content-Length", b"0")], False, Framing.NONE, b""),
        (304, [(b"Content-Length", b"7")], False, Framing.NONE, b"Content-Length: 7\r\n"),
    ],
)
def test_framing_of_answers(
    status: int, fields: list[tuple[bytes, bytes]], to_head: bool, framing: Framing, head: bytes
):
    """The end of a body is told as RFC 9112 says, and the client gets exactly one framing field, or none."""
    answer = read_answer(status, b"Why", fields, old=False, to_head=to_head)
    assert answer.framing is framing
    assert client_head(answer, old=False, close=False, ledger_id=None) == b"HTTP/1.1 %d Why\r\n%b\r\n" % (status, head)


def test_old_clients_get_no_chunks():
    """For HTTP/1.0 an answer of unknown length ends with the connection."""
    answer = read_answer(200, b"OK", [(b"Transfer-Encoding", b"chunked")], old=False, to_head=False)
    assert client_head(answer, old=True, close=True, ledger_id=b"x") == (
        b"HTTP/1.1 200 OK\r\nX-Ledger-Id: x\r\nConnection: close\r\n\r\n"
    )


@pytest.mark.parametrize(
    "fields",
    [
        [(b"Content-Length", b"5"), (b"Content-Length", b"6")],
        [(b"Content-Length", b"x")],
        [(b"Content-Length", b"5"), (b"Transfer-Encoding", b"chunked")],
        [(b"Transfer-Encoding", b"gzip")],
    ],
)
def test_answers_that_cannot_be_trusted(fields: list[tuple[bytes, bytes]]):
    """Contradictory framing from the engine is the engine's fault, never guessed at."""
    with pytest.raises(BadAnswerError):
        read_answer(200, b"OK", fields, old=False, to_head=False)


def _trusted(status: int, *fields: tuple[bytes, bytes], reason: bytes = b"", old: bool = False) -> bool:
    try:
        read_answer(status, reason, list(fields), old=old, to_head=False)
    except BadAnswerError:
        return False
    return True


@pytest.mark.parametrize(
    ("statuses", "known"),
    [
        ((100, 102, 103, 200, 204, 299, 304, 404, 418, 499, 503, 599), True),
        ((0, 1, 20, 99, 104, 110, 150, 199, 600, 999, 1000, 2000), False),
    ],
)
def test_statuses_that_http_knows(statuses: tuple[int, ...], known: bool):
    """Interim answers are those that are defined; everything else is between 200 and 599."""
    assert {_trusted(status) for status in statuses} == {known}


@pytest.mark.parametrize(
    ("reason", "trusted"),
    [(b"", True), (b"Not \tFound", True), (b"\xe4", True), (b"a\x00", False), (b"a\x1bb", False), (b"a\rb", False), (b"\x7f", False)],
)  # fmt: skip
def test_reason_phrases_hold_no_control_characters(reason: bytes, trusted: bool):
    """What the engine says of a status goes to the client as it is, so it must fit a status line."""
    assert _trusted(200, reason=reason) == trusted


@pytest.mark.parametrize(
    ("fields", "trusted"),
    [
        (((b"Connection", b"Upgrade"), (b"Upgrade", b"WebSocket")), True),
        (((b"Connection", b"Upgrade"),), False),
        (((b"Upgrade", b"websocket"),), False),
        (((b"Connection", b"Upgrade"), (b"Upgrade", b"h2c")), False),
        ((), False),
    ],
)
def test_101_switches_to_a_websocket_or_is_none(fields: tuple[tuple[bytes, bytes], ...], trusted: bool):
    """Nothing else was asked for."""
    assert _trusted(101, *fields) == trusted


def test_old_answers_have_neither_chunks_nor_interim_ones():
    """HTTP/1.0 knows neither."""
    assert _trusted(200, old=True)
    assert not _trusted(200, (b"Transfer-Encoding", b"chunked"), old=True)
    assert not _trusted(103, old=True)


def test_event_streams_are_marked_for_proxies_unless_they_say_so_themselves():
    """`X-Accel-Buffering: no` is added once, to event streams alone."""
    stream = [(b"Content-Type", b"text/event-stream; charset=utf-8")]
    own = [*stream, (b"x-accel-buffering", b"yes")]
    assert b"X-Accel-Buffering: no" in read_answer(200, b"", stream, old=False, to_head=False).fields
    assert b"X-Accel-Buffering: no" not in read_answer(200, b"", own, old=False, to_head=False).fields
    assert (
        read_answer(200, b"", [(b"Content-Type", b"text/plain")], old=False, to_head=False).fields.count(b"\r\n") == 1
    )


@pytest.mark.parametrize(
    ("old", "fields", "keep"),
    [
        (False, [(b"Content-Length", b"1")], True),
        (False, [(b"Content-Length", b"1"), (b"Connection", b"x, Close")], False),
        (True, [(b"Content-Length", b"1")], False),
        (False, [], False),
    ],
)
def test_engine_connection_is_kept_only_where_the_engine_keeps_it(
    old: bool, fields: list[tuple[bytes, bytes]], keep: bool
):
    """HTTP/1.0, `Connection: close` and a body up to the end leave nothing to reuse."""
    assert read_answer(200, b"", fields, old=old, to_head=False).keep_alive == keep


def test_trailers_lose_what_only_a_head_may_say():
    """Framing in a trailer section is dropped."""
    assert trailer_lines([(b"X", b"1"), (b"Content-Length", b"5")]) == b"X: 1\r\n"


@given(st.binary(max_size=200))
def test_random_heads_are_judged_without_error(raw: bytes):
    """Garbage is only ever refused."""
    well_formed(raw + b"\r\n\r\n")
    broken_line(raw)


@pytest.mark.parametrize(
    ("head", "plain"),
    [
        (b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\n\r\n", True),
        (b"HTTP/1.0 200 OK\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\nA: b\n\nbody\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nA: b\n\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nA: b\rc\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\n\r\nbody\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nA: b\r\n", False),
    ],
)
def test_a_plain_head_ends_where_every_reader_ends_it(head: bytes, plain: bool):
    """Only a head without a bare CR or LF, up to its first empty line, may be recognized by its bytes."""
    assert plain_answer(head) == plain


@pytest.mark.parametrize(
    ("target", "path", "host"),
    [
        (b"http://b/v1/models?x=1", b"/v1/models?x=1", b"b"),
        (b"HTTPS://b:8443/v1/models", b"/v1/models", b"b:8443"),
        (b"http://[::1]:80//x", b"//x", b"[::1]:80"),
        (b"http://b", b"/", b"b"),
        (b"http://b?x=http://c/", b"/?x=http://c/", b"b"),
        (b"/v1/models", b"/v1/models", b"a"),
    ],
)
def test_an_absolute_target_gives_path_and_host(target: bytes, path: bytes, host: bytes):
    """The engine gets the path alone; the host of the target counts, and the Host field keeps its place."""
    head = read_request(b"GET", target, [(b"X", b"1"), (b"host", b"a"), (b"Y", b"2")], old=False, max_body=1)
    assert isinstance(head, RequestHead)
    assert head.target == path
    assert head.fields == b"X: 1\r\nhost: %b\r\nY: 2\r\n" % host


@pytest.mark.parametrize("target", [b"*", b"a:80", b"?x", b"", b"ftp://a/"])
def test_no_other_target_is_a_path(target: bytes):
    """What the engine could read in another way is refused."""
    refusal = read_request(b"GET", target, [(b"Host", b"a")], old=False, max_body=1)
    assert isinstance(refusal, BadRequest)
    assert refusal.status == 400
