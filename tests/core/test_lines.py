"""Cutting a stream into lines without changing a byte."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_supervisor.core.lines import LIMIT, LineSplitter, text


@given(
    st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"\x01", b"\n").replace(b"\x02", b"\r")), max_size=20)
)
def test_no_byte_is_lost_or_changed(chunks: list[bytes]) -> None:
    """However the stream is cut into reads, the pieces joined are the stream."""
    lines = LineSplitter()
    pieces = [piece for chunk in chunks for piece in lines.feed(chunk)] + lines.flush()
    assert b"".join(pieces) == b"".join(chunks)
    assert not lines.pending


def test_lines_end_at_newline_and_carriage_return() -> None:
    """Newlines, carriage returns and both together end a line; what has no end waits."""
    lines = LineSplitter()
    assert lines.feed(b"one\ntwo\r\n 10%\r 20%\rrest\x0c\x85") == [b"one\n", b"two\r\n", b" 10%\r", b" 20%\r"]
    assert lines.pending
    assert lines.feed(b" more\n") == [b"rest\x0c\x85 more\n"]
    assert not lines.pending


def test_a_line_without_end_is_held_in_bounded_pieces() -> None:
    """A line far beyond the limit comes in pieces of at most the limit while it is still being printed."""
    lines = LineSplitter()
    pieces = lines.feed(b"x" * (3 * LIMIT + 5))
    assert [len(piece) for piece in pieces] == [LIMIT] * 3
    assert [len(piece) for piece in lines.flush()] == [5]


def test_text_survives_broken_bytes() -> None:
    """Undecodable bytes become replacement characters, and the line's end is gone."""
    assert text(b"caf\xe9 \xff\r\n") == "caf\ufffd \ufffd"
