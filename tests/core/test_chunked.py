"""The chunked decoder: what it returns, what it refuses, and that llhttp agrees with all it accepts."""

import contextlib

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_supervisor.core.chunked import ChunkedBody, ChunkError

GOOD = b"5;name=value\r\nhello\r\n1\r\n!\r\n0\r\nTrailer: x\r\n\r\n"


def _decode(raw: bytes, cuts: list[int]) -> tuple[bytes, bool, bytes]:
    body = ChunkedBody(max_trailer=1000)
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
        b"0\r\nTrailer: " + b"x" * 2000,
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
