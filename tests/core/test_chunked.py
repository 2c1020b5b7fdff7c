"""The chunked decoder: what it returns, what it refuses, and that llhttp agrees with all it accepts."""

import contextlib

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_supervisor.core.chunked import MAX_LINE, MAX_OVERHEAD, MAX_TRAILER, MAX_TRAILERS, ChunkedBody, ChunkError

GOOD = b"5;name=value\r\nhello\r\n1\r\n!\r\n0\r\nTrailer: x\r\n\r\n"


def _decode(raw: bytes, cuts: list[int]) -> tuple[bytes, bool, bytes]:
    body = ChunkedBody()
    out, rest, start = b"", b"", 0
    for end in [*sorted({cut for cut in cuts if cut < len(raw)}), len(raw)]:
        piece = raw[start:end]
        start = end
        if body.done:
            rest += piece
        else:
            out += body.feed(piece)
            rest += body.rest
    return out, body.done, rest


@given(st.lists(st.integers(0, len(GOOD) + 5), max_size=8))
def test_any_split_gives_the_same_body(cuts: list[int]):
    """However the bytes are cut, body, end and rest are the same."""
    assert _decode(GOOD + b"GET /", cuts) == (b"hello!", True, b"GET /")


@pytest.mark.parametrize(
    "raw",
    [
        b"5\nhello\r\n0\r\n\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhello0\r\n\r\n",
        b"5\r\nhell\r\n0\r\n\r\n",
        b" 5\r\nhello\r\n0\r\n\r\n",
        b"5 \r\nhello\r\n0\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"+5\r\nhello\r\n0\r\n\r\n",
        b"-5\r\nhello\r\n0\r\n\r\n",
        b"5_0\r\nhello\r\n0\r\n\r\n",
        b"\r\n5\r\nhello\r\n0\r\n\r\n",
        b";a=b\r\nhello\r\n0\r\n\r\n",
        b"1ffffffffffffffff\r\nhello\r\n0\r\n\r\n",
        b"5;a=\x00\r\nhello\r\n0\r\n\r\n",
        b"5;a=b\rc\r\nhello\r\n0\r\n\r\n",
        b"5;" + b"a" * 5000 + b"\r\nhello\r\n0\r\n\r\n",
        b"5;" + b"a" * 5000,
        b"0\r\nbad trailer\r\n\r\n",
        b"0\r\n folded: x\r\n\r\n",
        b"0\r\nTrailer: x\n\r\n",
        b"0\r\nTrailer: " + b"x" * 9000,
        b"0\r\n" + b"Trailer: x\r\n" * 200 + b"\r\n",
    ],
)
def test_broken_coding_is_refused(raw: bytes):
    """Whatever two servers could read differently is an error, whole or byte by byte."""
    with pytest.raises(ChunkError):
        _decode(raw, [])
    with pytest.raises(ChunkError):
        _decode(raw, list(range(len(raw))))


class _Events:
    def __init__(self) -> None:
        self.body = b""
        self.complete = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


@given(
    st.lists(
        st.sampled_from(
            [b"0", b"1", b"5", b"a", b"\r\n", b"\r", b"\n", b";", b"=", b" ", b"hello", b"x", b":", b"T: y", b"\x80"]
        ),
        max_size=25,
    )
)
def test_what_is_accepted_llhttp_accepts_too(parts: list[bytes]):
    """A body we take as complete is complete for llhttp, with the same bytes."""
    raw = b"".join(parts)
    try:
        out, done, rest = _decode(raw, [])
    except ChunkError:
        return
    if not done:
        return
    events = _Events()
    parser = httptools.HttpRequestParser(events)
    parser.feed_data(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + raw[: len(raw) - len(rest)])
    assert events.complete
    assert events.body == out


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6))
def test_random_bytes_only_ever_raise_the_one_error(raw: bytes, cuts: list[int]):
    """Garbage, cut anywhere, raises ChunkError or nothing."""
    with contextlib.suppress(ChunkError):
        _decode(raw, cuts)


def _fed(raw: bytes, step: int = 65536) -> None:
    body = ChunkedBody()
    for at in range(0, len(raw), step):
        body.feed(raw[at : at + step])


SMALL = MAX_OVERHEAD // 3  # chunks of one byte, each of which costs three bytes beyond the ratio


@pytest.mark.parametrize(
    "raw",
    [
        b"1\r\nx\r\n" * SMALL,
        b"1\r\nx\r\n" * SMALL + b"10000\r\n" + b"x" * 0x10000 + b"\r\n" + b"1\r\nx\r\n" * SMALL,
        b"3\r\nabc\r\n" * 100_000,
        b"005\r\nhello\r\n" * 10_000,
        b"400;chunk-signature=%b\r\n%b\r\n" % (b"f" * 64, b"x" * 1024) * 1000,
        b"1;%b\r\nx\r\n" % (b"a" * (MAX_LINE - 2)),
        b"0\r\n" + b"a:\r\n" * MAX_TRAILERS + b"\r\n",
        b"0\r\na:" + b"x" * (MAX_TRAILER - 4) + b"\r\n\r\n",
    ],
)
def test_what_clients_send_is_within_the_limits(raw: bytes):
    """Small chunks for a while, chunks of three bytes for ever, signed chunks, and a full trailer section pass."""
    _fed(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"1\r\nx\r\n" * (SMALL + 1),
        b"10000\r\n" + b"x" * 0x10000 + b"\r\n" + b"1\r\nx\r\n" * (SMALL + 1),
        b"2;a\r\nxy\r\n" * 10_000,
        b"000000000000001\r\nx\r\n" * 1000,
        b"1;%b\r\nx\r\n" % (b"a" * 400) * 50,
        b"1;%b\r\nx\r\n" % (b"a" * (MAX_LINE - 1)),
        b"0\r\n" + b"a:\r\n" * (MAX_TRAILERS + 1) + b"\r\n",
        b"0\r\na:" + b"x" * (MAX_TRAILER - 3) + b"\r\n\r\n",
    ],
)
@pytest.mark.parametrize("step", [1, 65536])
def test_a_coding_beyond_its_limits_is_refused(raw: bytes, step: int):
    """Many tiny chunks, long extensions and many or long trailers are errors, in pieces of any size."""
    with pytest.raises(ChunkError):
        _fed(raw, step)


class _Searched(bytes):
    """Bytes that count how many of them are searched."""

    total = 0

    def find(self, sub: bytes, begin: int = 0, end: int = 1 << 30) -> int:  # type: ignore[override]
        at = super().find(sub, begin, end)
        type(self).total += (min(end, len(self)) if at < 0 else at + 1) - begin
        return at


class _Held(bytearray):
    """The same for what is held of a line."""

    def find(self, sub: bytes, begin: int = 0, end: int = 1 << 30) -> int:  # type: ignore[override]
        _Searched.total += min(end % (len(self) + 1), len(self)) - begin
        return super().find(sub, begin, end)


@pytest.mark.parametrize(
    "raw",
    [
        b"0\r\na:" + b"x" * (MAX_TRAILER - 4) + b"\r\n\r\n",
        b"400;%b\r\n%b\r\n" % (b"a" * 500, b"x" * 1024) * 8,
        b"3\r\nabc\r\n" * 1000,
        b"0\r\n" + b"a:\r\n" * MAX_TRAILERS + b"\r\n",
    ],
)
@pytest.mark.parametrize("step", [1, 2, 7, 65536])
def test_every_byte_is_searched_a_fixed_number_of_times(raw: bytes, step: int):
    """However a body is cut, the bytes that are searched for a line end are a small multiple of its bytes."""
    body = ChunkedBody()
    body._held = _Held()
    _Searched.total = 0
    for at in range(0, len(raw), step):
        body.feed(_Searched(raw[at : at + step]))
    assert _Searched.total <= 3 * len(raw)
