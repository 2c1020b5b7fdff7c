"""Both parsers under random cuts and random bytes: one error type, no hang, bounded memory, one meaning."""

import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_supervisor.adapters.http1 import Answer, AnswerHeads, RequestHeads, parse_request
from vllm_supervisor.core.chunked import ChunkError
from vllm_supervisor.core.http_semantics import AnswerHead, BadAnswerError, BadRequest, RequestHead, well_formed
from vllm_supervisor.core.upload import BodyTooLargeError, Upload

LIMIT = 64 * 1024
TOTAL = 10_000_000  # bytes fed to each parser

ANSWERS = [
    b'HTTP/1.1 200 OK\r\ncontent-length: 11\r\ncontent-type: application/json\r\n\r\n{"a": "bcd"}'[:-1],
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\nX-Sum: 1\r\n\r\n",
    b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\n\r\nto the end",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n\x81\x02hi",
]
REQUESTS = [
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\nT: 1\r\n\r\n",
    b"GET /v1/realtime HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"GET / HTTP/1.0\r\n\r\n",
]


def _told(head: AnswerHead) -> tuple[object, ...]:
    return head.status, head.reason, head.framing, head.length, head.fields, head.keep_alive


def _read(
    raw: bytes, cuts: list[int], *, to_head: bool = False, heads: AnswerHeads | None = None
) -> tuple[object, ...]:
    """Read an answer that comes in pieces as the front door does: its first piece may be all of a known kind."""
    ends = [*sorted({cut for cut in cuts if cut < len(raw)}), len(raw)]
    whole = None if to_head or heads is None else heads.whole(raw[: ends[0]])
    if whole is not None and ends[0] == len(raw):
        return whole[1], True, [], [], _told(whole[0])
    answer = Answer(to_head=to_head, heads=heads)
    body, start = b"", 0
    for end in ends:
        body += answer.feed(raw[start:end], LIMIT)
        start = end
    head = answer.head
    result = (
        body,
        answer.complete,
        list(answer.trailers),
        [interim.status for interim in answer.interim],
        head and _told(head),
    )
    answer.close()
    return result


@pytest.mark.parametrize("raw", ANSWERS)
@given(cuts=st.lists(st.integers(0, 200), max_size=10))
def test_any_split_of_an_answer_means_the_same(raw: bytes, cuts: list[int]):
    """However an answer is cut, head, body, trailers and end are the same."""
    if raw.startswith(b"HTTP/1.1 101"):
        raw = raw[: raw.index(b"\r\n\r\n") + 4]
    assert _read(raw, cuts) == _read(raw, [])


@pytest.mark.parametrize("raw", ANSWERS)
@given(cuts=st.lists(st.integers(0, 200), max_size=10))
def test_a_known_head_means_the_same(raw: bytes, cuts: list[int]):
    """An answer whose head was seen before is read as the first time, in one piece and in any others."""
    if raw.startswith(b"HTTP/1.1 101"):
        raw = raw[: raw.index(b"\r\n\r\n") + 4]
    heads, plain = AnswerHeads(), _read(raw, [])
    for several in ([], [], cuts):
        assert _read(raw, several, heads=heads) == plain


def test_a_whole_answer_with_a_known_head_needs_no_parser():
    """The second answer with the same head is taken without parsing; a part of it, or one with more behind it, is not."""
    heads = AnswerHeads()
    assert heads.whole(ANSWERS[0]) is None
    _read(ANSWERS[0], [], heads=heads)
    whole = heads.whole(ANSWERS[0])
    assert whole is not None
    assert (whole[0].status, whole[1]) == (200, b'{"a": "bcd"')
    for other in (ANSWERS[0][:-1], ANSWERS[0] + b"x", ANSWERS[0] * 2, ANSWERS[0][:20], b""):
        assert heads.whole(other) is None
    longer = Answer(to_head=False, heads=heads)
    assert longer.feed(ANSWERS[0] + b"x", LIMIT) == b'{"a": "bcd"'
    assert longer.surplus


_OK = b"HTTP/1.1 200 OK\r\n"
# An answer, its body, and whether it answers HEAD.
_ENDED: dict[str, tuple[bytes, bytes, bool]] = {
    "length": (_OK + b"Content-Length: 5\r\n\r\nhello", b"hello", False),
    "length of a body of line ends": (_OK + b"Content-Length: 6\r\n\r\n" + b"\r\n" * 3, b"\r\n" * 3, False),
    "no length": (_OK + b"Content-Length: 0\r\n\r\n", b"", False),
    "chunks": (_OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", b"hello", False),
    "trailers": (_OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nA: b\r\n\r\n", b"hello", False),
    "no chunk": (_OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"", False),
    "204": (b"HTTP/1.1 204 No\r\n\r\n", b"", False),
    "204 with a length": (b"HTTP/1.1 204 No\r\nContent-Length: 5\r\n\r\n", b"", False),
    "204 with chunks": (b"HTTP/1.1 204 No\r\nTransfer-Encoding: chunked\r\n\r\n", b"", False),
    "304 with a length": (b"HTTP/1.1 304 No\r\nContent-Length: 5\r\n\r\n", b"", False),
    "304 with chunks": (b"HTTP/1.1 304 No\r\nTransfer-Encoding: chunked\r\n\r\n", b"", False),
    "HEAD": (_OK + b"Content-Length: 500\r\n\r\n", b"", True),
    "HEAD with chunks": (_OK + b"Transfer-Encoding: chunked\r\n\r\n", b"", True),
    "HEAD without length": (_OK + b"\r\n", b"", True),
    "interim first": (b"HTTP/1.1 103 E\r\nA: b\r\n\r\n" + _OK + b"Content-Length: 5\r\n\r\nhello", b"hello", False),
    "closing": (_OK + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello", b"hello", False),
}
_SKIPPED = {"an empty line", "half an empty line", "the other half"}  # by the parser, without a word
_BEHIND: dict[str, bytes] = {
    "an answer": _OK + b"Content-Length: 4\r\n\r\nevil",
    "an answer in chunks": _OK + b"Transfer-Encoding: chunked\r\n\r\n4\r\nevil\r\n0\r\n\r\n",
    "an answer without end": _OK + b"\r\nevil",
    "half an answer": _OK,
    "a letter": b"H",
    "junk": b"evil",
    "NUL": b"\0",
    "an empty line": b"\r\n",
    "half an empty line": b"\r",
    "the other half": b"\n",
    "empty lines and an answer": b"\r\n\r\n" + _OK + b"Content-Length: 4\r\n\r\nevil",
    "a chunk": b"4\r\nevil\r\n",
    "a last chunk": b"0\r\n\r\n",
    "interim answers": b"HTTP/1.1 103 E\r\n\r\n" * 20,
    "a switch": b"HTTP/1.1 101 S\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\nevil",
    "the same again": b"",
}


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("behind", _BEHIND)
@pytest.mark.parametrize("ended", _ENDED)
def test_no_byte_behind_the_end_of_an_answer_is_given_out(ended: str, behind: str, known: bool):
    """Whatever follows an answer in the same read: its own body and no more, and the rest is told as surplus."""
    raw, body, to_head = _ENDED[ended]
    more = _BEHIND[behind] or raw
    heads = AnswerHeads()
    if known:
        _read(raw, [], to_head=to_head, heads=heads)
    assert heads.whole(raw + more) is None
    for cut in range(0, len(raw), 7):
        answer = Answer(to_head=to_head, heads=heads)
        got = answer.feed(raw[:cut], LIMIT) if cut else b""
        if not answer.complete:  # after HEAD, it is with its head
            got += answer.feed(raw[cut:] + more, LIMIT)
            empty = behind in _SKIPPED and (cut or "line ends" in ended or ended == "interim first")
            empty = empty or (cut and (ended, behind) == ("HEAD with chunks", "a last chunk"))
            assert answer.surplus or empty
        assert got == body
        assert answer.complete
        assert answer.head is not None
        assert answer.tunnelled == b""
        answer.close()


@pytest.mark.parametrize("ended", _ENDED)
@given(cuts=st.lists(st.integers(0, 120), max_size=8))
def test_an_answer_that_ends_where_it_should_has_no_surplus(ended: str, cuts: list[int]):
    """However it is cut; an engine connection would be thrown away for nothing."""
    raw, body, to_head = _ENDED[ended]
    answer = Answer(to_head=to_head)
    got, start = b"", 0
    for end in [*sorted({cut for cut in cuts if 0 < cut < len(raw)}), len(raw)]:
        got += answer.feed(raw[start:end], LIMIT)
        start = end
    assert (got, answer.complete, answer.surplus) == (body, True, False)
    answer.close()


def test_the_head_of_an_interim_answer_is_not_remembered_for_the_real_one():
    """The two come in two reads; the next answer that begins with that interim head is read on its own."""
    heads = AnswerHeads()
    interim, real = b"HTTP/1.1 103 E\r\nA: b\r\n\r\n", _OK + b"Content-Length: 5\r\n\r\n"
    answer = Answer(to_head=False, heads=heads)
    answer.feed(interim, LIMIT)
    answer.interim = ()  # as the front door does once it has passed them on
    assert answer.feed(real + b"hello", LIMIT) == b"hello"
    assert heads.whole(interim + b"hello") is None


_NONSENSE: dict[str, bytes] = {
    **{f"status {status}": b"HTTP/1.1 %b X\r\nContent-Length: 0\r\n\r\n" % status.encode() for status in (
        "000", "001", "099", "104", "150", "199", "600", "999", "0200", "2000", "20", "2", "-200", "+200", "2e2", "",
    )},
    **{f"version {version}": b"HTTP/%b 200 X\r\nContent-Length: 0\r\n\r\n" % version.encode() for version in (
        "0.9", "1.2", "2.0", "3.0", "1", "11",
    )},
    "ICY": b"ICY 200 OK\r\nContent-Length: 0\r\n\r\n",
    "101 to nothing": b"HTTP/1.1 101 S\r\n\r\n",
    "101 to h2c": b"HTTP/1.1 101 S\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
    "control in the reason": b"HTTP/1.1 200 a\x01b\r\nContent-Length: 0\r\n\r\n",
    "NUL in the reason": b"HTTP/1.1 200 a\x00b\r\nContent-Length: 0\r\n\r\n",
    "folded field": _OK + b"Content-Length: 0\r\nX: a\r\n b\r\n\r\n",
    "tab folded field": _OK + b"Content-Length: 0\r\nX: a\r\n\tb\r\n\r\n",
    "folded length": _OK + b"Content-Length:\r\n 0\r\n\r\n",
    "bare CR in a field": _OK + b"Content-Length: 0\r\nX: a\rY: b\r\n\r\n",
    "bare CR after a length": _OK + b"Content-Length: 0\rX: a\r\n\r\n",
    "bare LF": _OK + b"Content-Length: 0\nX: a\r\n\r\n",
    "bare LF after the status": b"HTTP/1.1 200 OK\nContent-Length: 0\r\n\r\n",
    "space before a colon": _OK + b"Content-Length : 0\r\n\r\n",
    "NUL in a value": _OK + b"Content-Length: 0\r\nX: \0\r\n\r\n",
    "NUL in a name": _OK + b"Content-Length: 0\r\nX\0: a\r\n\r\n",
    "no name": _OK + b"Content-Length: 0\r\n: a\r\n\r\n",
    "two lengths": _OK + b"Content-Length: 0\r\nContent-Length: 0\r\n\r\n",
    "list of lengths": _OK + b"Content-Length: 0, 0\r\n\r\n",
    "signed length": _OK + b"Content-Length: +0\r\n\r\n",
    "length beyond numbers": _OK + b"Content-Length: 99999999999999999999\r\n\r\n",
    "length and chunks": _OK + b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks twice": _OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and gzip": _OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "interim in HTTP/1.0": b"HTTP/1.0 103 E\r\n\r\nHTTP/1.1 204 No\r\n\r\n",
    "interim answers without end": b"HTTP/1.1 103 E\r\n\r\n" * 9 + _OK + b"Content-Length: 0\r\n\r\n",
    "chunk size ended by LF": _OK + b"Transfer-Encoding: chunked\r\n\r\n0\n\r\n",
    "chunk size with a space": _OK + b"Transfer-Encoding: chunked\r\n\r\n1 \r\nx\r\n0\r\n\r\n",
    "chunk size beyond numbers": _OK + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    "chunk longer than said": _OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nxyz\r\n0\r\n\r\n",
    "bare CR in a trailer": _OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: a\rb\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("pieces", [1, 1000])
@pytest.mark.parametrize("raw", _NONSENSE.values(), ids=_NONSENSE.keys())
def test_an_answer_that_two_readers_could_read_differently_is_the_engines_fault(raw: bytes, pieces: int):
    """It is a BadAnswerError (the client reads 502) before any of it is passed on, whole or byte by byte."""
    answer = Answer(to_head=False, heads=AnswerHeads())
    size = max(1, len(raw) // pieces)
    with pytest.raises(BadAnswerError):
        _feed_all(answer, [raw[start : start + size] for start in range(0, len(raw), size)])
    assert not answer.complete


def test_interim_answers_that_come_one_by_one_are_counted():
    """Their number is bounded however they come, and whatever has been passed on of them."""
    answer = Answer(to_head=False)
    for _ in range(8):
        answer.feed(b"HTTP/1.1 102 P\r\n\r\n", LIMIT)
        answer.interim = ()
    with pytest.raises(BadAnswerError):
        answer.feed(b"HTTP/1.1 102 P\r\n\r\n", LIMIT)


def test_what_follows_a_switch_is_no_surplus():
    """It belongs to the websocket."""
    answer = Answer(to_head=False, heads=AnswerHeads())
    assert answer.feed(ANSWERS[4], LIMIT) == b""
    assert (answer.complete, answer.surplus, answer.tunnelled) == (True, False, b"\x81\x02hi")


@pytest.mark.parametrize("to_head", [False, True])
def test_a_known_head_is_not_used_for_an_answer_to_head(to_head: bool):
    """The same bytes mean another length of the body after HEAD."""
    raw = ANSWERS[0].replace(b'{"a": "bcd"', b"").replace(b"11", b"0")
    heads = AnswerHeads()
    assert _read(raw, [], heads=heads, to_head=to_head) == _read(raw, [], to_head=to_head)
    assert _read(raw, [], heads=heads, to_head=True) == _read(raw, [], to_head=True)


def test_known_request_heads_are_bounded_and_refusals_are_not_kept(monkeypatch: pytest.MonkeyPatch):
    """A head is parsed once, is forgotten when too many others came, and one that is refused is refused each time."""
    parsed: list[bytes] = []

    def parse(head: bytes, *, max_body: int) -> RequestHead | BadRequest:
        parsed.append(head)
        return parse_request(head, max_body=max_body)

    monkeypatch.setattr("vllm_supervisor.adapters.http1.parse_request", parse)
    heads = RequestHeads(10)
    raw = REQUESTS[0].partition(b"hello")[0]
    assert heads.read(raw) is heads.read(raw)
    assert parsed == [raw]
    large = raw.replace(b": 5", b": 11")
    for _ in range(2):
        assert isinstance(heads.read(large), BadRequest)
        assert isinstance(heads.read(raw.replace(b"\r\n", b"\n")), BadRequest)
    assert parsed == [raw, large, large]
    for number in range(1000):
        heads.read(b"GET /%d HTTP/1.0\r\n\r\n" % number)
    heads.read(raw)
    assert parsed.count(raw) == 2
    long = b"GET / HTTP/1.0\r\nA: %b\r\n\r\n" % (b"a" * 5000)
    assert heads.read(long) is not heads.read(long)


_LENGTHS = [
    b"0",
    b"1",
    b"5",
    b"05",
    b"11",
    b"1001",
    b"9" * 18,
    b"9" * 19,
    b"",
    b"+5",
    b"5 ",
    b"5, 5",
    b"5\r\nContent-Length: 6",
]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"Content-Length: ", b"content-length:", b"CONTENT-LENGTH: ", b"X-Content-Length: "]),
            st.sampled_from(_LENGTHS),
            st.sampled_from([b"", b"Content-Length: 7\r\n", b"Transfer-Encoding: chunked\r\n", b"X: 1\r\n"]),
        ),
        max_size=12,
    )
)
def test_known_heads_with_other_lengths_mean_what_a_parser_says(fields: list[tuple[bytes, bytes, bytes]]):
    """Whatever was seen before, a request head is refused or read just as it is by itself."""
    heads = RequestHeads(1000)
    for name, length, more in fields:
        raw = b"POST / HTTP/1.1\r\nHost: a\r\n%b%b\r\n%b\r\n" % (name, length, more)
        alone: object = RequestHeads(1000).read(raw)
        assert heads.read(raw) == alone


@given(st.lists(st.tuples(st.sampled_from([b"Content-Length: ", b"content-length:"]), st.sampled_from(_LENGTHS))))
def test_known_answers_with_other_lengths_mean_what_a_parser_says(fields: list[tuple[bytes, bytes]]):
    """Whatever was seen before, an answer is refused or read just as it is by itself."""
    heads = AnswerHeads()
    for name, length in fields:
        body = b"x" * (int(length) if length.isdigit() and int(length) < 2000 else 5)
        raw = b"HTTP/1.1 200 OK\r\nDate: now\r\n%b%b\r\n\r\n%b" % (name, length, body)
        told: list[object] = []
        for known in (heads, None):
            try:
                told.append(_read(raw, [], heads=known))
            except BadAnswerError:
                told.append(None)
        assert told[0] == told[1]


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6), st.booleans())
def test_random_bytes_raise_the_one_error(raw: bytes, cuts: list[int], to_head: bool):
    """Garbage from the engine raises BadAnswerError or nothing."""
    with contextlib.suppress(BadAnswerError):
        _read(b"HTTP/1.1 200 OK\r\n" + raw, cuts, to_head=to_head)


@pytest.mark.parametrize("endless", [b"X: " + b"a" * 100 + b"\r\n", b"a" * 1000])
@pytest.mark.parametrize(
    "start", [b"HTTP/1.1 200 OK\r\nY: ", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\nY: "]
)
def test_heads_and_trailers_without_end_are_refused(start: bytes, endless: bytes):
    """Whatever the engine goes on sending in place of a head or its trailers, it is bounded."""
    answer = Answer(to_head=False)
    answer.feed(start, LIMIT)
    with pytest.raises(BadAnswerError):
        _feed_all(answer, [endless] * (4 * LIMIT // len(endless)))


def test_interim_answers_without_end_are_refused():
    """An engine that only ever sends interim answers is bounded too."""
    with pytest.raises(BadAnswerError):
        _feed_all(Answer(to_head=False), [b"HTTP/1.1 103 E\r\nA: b\r\n\r\n"] * 100)


def _feed_all(answer: Answer, pieces: list[bytes]) -> None:
    for piece in pieces:
        answer.feed(piece, LIMIT)


def _damaged(rng: random.Random, raw: bytes) -> bytes:
    """Return `raw` with a few bytes changed, removed, doubled, or put in from the other end."""
    data = bytearray(raw)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at : at + rng.randrange(1, 4)]
            case 2:
                data[at:at] = data[at : at + rng.randrange(1, 20)]
            case _:
                data[at:at] = rng.choice([b"\r", b"\n", b"\r\n", b"\x00", b"Content-Length: 1\r\n", b"0\r\n\r\n", b" "])
    return bytes(data) or b"x"


def test_ten_million_damaged_bytes_for_the_answer_parser():
    """Damaged answers in random pieces, one after another on a connection: BadAnswerError at most, and it goes on."""
    rng = random.Random(20260901)
    fed = 0
    while fed < TOTAL:
        answer = Answer(to_head=rng.random() < 0.1)
        raw = b"".join(_damaged(rng, rng.choice(ANSWERS)) for _ in range(rng.randrange(1, 40)))
        fed += len(raw)
        with contextlib.suppress(BadAnswerError):
            while raw:
                size = rng.randrange(1, 400)
                answer.feed(raw[:size], LIMIT)
                raw = raw[size:]
        answer.close()


def test_ten_million_damaged_bytes_for_the_request_parser():
    """Damaged requests with bodies in random pieces: a refusal or a meaning, and both parsers agree on what is valid."""
    rng = random.Random(20260902)
    fed = accepted = 0
    while fed < TOTAL:
        raw = _damaged(rng, rng.choice(REQUESTS)) + rng.randbytes(rng.randrange(600))
        fed += len(raw)
        head, found, body = raw.partition(b"\r\n\r\n")
        if not found or not well_formed(head + found):
            continue
        parsed = parse_request(head + found, max_body=1000)
        if isinstance(parsed, BadRequest):
            continue
        accepted += 1
        assert isinstance(parsed, RequestHead)
        upload = Upload(parsed.length, max_body=1000)
        with contextlib.suppress(ChunkError, BodyTooLargeError):
            while body:
                size = rng.randrange(1, 30)
                upload.feed(body[:size])
                body = body[size:]
    assert accepted > 100
