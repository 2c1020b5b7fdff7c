"""Completion, judged from bytes cut anywhere: the table of the rules, and that splits change nothing."""

import json
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_supervisor.core import completion
from vllm_supervisor.core.completion import MAX_WHOLE, Judgement, judge_for
from vllm_supervisor.core.event_lines import MAX_LINE
from vllm_supervisor.core.words import RequestClass

CHAT, RESPONSES, MESSAGES = RequestClass.CHAT, RequestClass.RESPONSES, RequestClass.MESSAGES


def _choice(index: int = 0, finish: str | None = None, **more: object) -> bytes:
    event = {"choices": [{"index": index, "delta": {"content": "x"}, "finish_reason": finish, **more}]}
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def _named(name: str, **data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode()


DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error": {"message": "no", "type": "InternalServerError", "code": 500}}\n\n'
USAGE = b'data: {"choices":[],"usage":{"total_tokens":3}}\n\n'
TOOL = _choice(delta={"tool_calls": [{"index": 1, "function": {"arguments": '{"finish_reason":"abort"}'}}]})
QUOTED = _choice(delta={"content": 'say "index":7, "error": [DONE] "finish_reason":"abort" event: error'})


def _judge(cls: RequestClass, body: bytes, *, stream: bool, choices: int | None = None, size: int = 0) -> Judgement:
    judge = judge_for(cls, 200, event_stream=stream, choices=choices)
    step = size or len(body) or 1
    for start in range(0, len(body), step):
        judge.feed(body[start : start + step])
    return judge.judge()


STREAMS = [
    ("plain", CHAT, None, _choice() + _choice(finish="stop") + DONE, ("completed", "", "[DONE]")),
    ("with usage", CHAT, None, _choice() + _choice(finish="length") + USAGE + DONE, ("completed", "", "[DONE]")),
    ("with tools", CHAT, None, TOOL + _choice(finish="tool_calls") + DONE, ("completed", "", "[DONE]")),
    ("quoted", CHAT, None, QUOTED + _choice(finish="stop") + DONE, ("completed", "", "[DONE]")),
    ("spaced json", CHAT, None, _choice(finish="stop").replace(b":", b": ") + DONE, ("completed", "", "[DONE]")),
    (
        "crlf",
        CHAT,
        None,
        (_choice() + _choice(finish="stop") + DONE).replace(b"\n", b"\r\n"),
        ("completed", "", "[DONE]"),
    ),
    ("no done", CHAT, None, _choice() + _choice(finish="stop"), ("failed", "no_done", "")),
    ("no finish", CHAT, None, _choice() + DONE, ("failed", "no_finish_reason", "[DONE]")),
    ("done alone", CHAT, None, DONE, ("failed", "no_finish_reason", "[DONE]")),
    ("nothing", CHAT, None, b"", ("failed", "no_done", "")),
    ("abort", CHAT, None, _choice() + _choice(finish="abort") + DONE, ("failed", "abort", "[DONE]")),
    ("error", CHAT, None, _choice() + ERROR + DONE, ("failed", "error_event", "[DONE]")),
    ("error after finish", CHAT, None, _choice(finish="stop") + ERROR + DONE, ("failed", "error_event", "[DONE]")),
    ("object error", CHAT, None, b'data: {"object":"error"}\n\n' + DONE, ("failed", "error_event", "[DONE]")),
    ("two, one open", CHAT, None, _choice(0, "stop") + _choice(1) + DONE, ("failed", "no_finish_reason", "[DONE]")),
    ("two", CHAT, 2, _choice(0, "stop") + _choice(1, "stop") + DONE, ("completed", "", "[DONE]")),
    ("two asked, one seen", CHAT, 2, _choice(0, "stop") + DONE, ("failed", "no_finish_reason", "[DONE]")),
    ("one asked, another index", CHAT, 1, _choice(7, "stop") + DONE, ("completed", "", "[DONE]")),
    ("one asked, no end", CHAT, 1, _choice(0) + DONE, ("failed", "no_finish_reason", "[DONE]")),
    ("one of two aborted", CHAT, None, _choice(0, "stop") + _choice(1, "abort") + DONE, ("failed", "abort", "[DONE]")),
    (
        "completions",
        RequestClass.COMPLETIONS,
        None,
        b'data: {"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}\n\n' + DONE,
        ("completed", "", "[DONE]"),
    ),
    (
        "responses",
        RESPONSES,
        None,
        _named("response.created", response={"error": None}) + _named("response.completed", response={}),
        ("completed", "", "response.completed"),
    ),
    (
        "responses by data alone",
        RESPONSES,
        None,
        b'data: {"type":"response.incomplete"}\n\n',
        ("completed", "", "response.incomplete"),
    ),
    ("responses failed", RESPONSES, None, _named("response.failed"), ("failed", "error_event", "response.failed")),
    ("responses open", RESPONSES, None, _named("response.created"), ("failed", "no_final_event", "")),
    ("responses error", RESPONSES, None, ERROR + DONE, ("failed", "error_event", "")),
    (
        "messages",
        MESSAGES,
        None,
        _named("message_start", message={"stop_reason": None})
        + _named("message_delta", delta={"stop_reason": "end_turn"})
        + _named("message_stop"),
        ("completed", "", "message_stop"),
    ),
    (
        "messages aborted",
        MESSAGES,
        None,
        _named("message_delta", delta={"stop_reason": None}) + _named("message_stop"),
        ("failed", "abort", "message_stop"),
    ),
    (
        "messages cut",
        MESSAGES,
        None,
        _named("message_delta", delta={"stop_reason": "end_turn"}),
        ("failed", "no_message_stop", ""),
    ),
    (
        "messages error",
        MESSAGES,
        None,
        _named("error", error={}) + _named("message_stop"),
        ("failed", "error_event", "message_stop"),
    ),
    ("other", RequestClass.AUDIO, None, b"data: {}\n\n" + DONE, ("completed", "", "")),
    ("other error", RequestClass.OTHER, None, ERROR + DONE, ("failed", "error_event", "")),
    ("other, word", RequestClass.OTHER, None, b'data: {"text": "an \\"error\\""}\n\n', ("completed", "", "")),
    ("other, no error", RequestClass.OTHER, None, b'data: {"error": null}\n\n', ("completed", "", "")),
]


@pytest.mark.parametrize("size", [0, 1, 7, 64])
@pytest.mark.parametrize(
    ("cls", "choices", "body", "expected"), [row[1:] for row in STREAMS], ids=[r[0] for r in STREAMS]
)
def test_streams(cls: RequestClass, choices: int | None, body: bytes, expected: tuple[str, str, str], size: int):
    """Each kind of stream completes exactly by its own rule, in pieces of any size."""
    judged = _judge(cls, body, stream=True, choices=choices, size=size)
    assert (judged.outcome, judged.why, judged.marker) == expected


SPELLINGS: list[Callable[[bytes], bytes]] = [
    lambda line: line,
    lambda line: line.replace(b'":', b'": '),
    lambda line: line.replace(b'":', b'": ').replace(b',"', b', "'),
    lambda line: line.replace(b'":', b'" :'),
    lambda line: line.replace(b'":', b'" : '),
    lambda line: line.replace(b'":', b'":  '),
    lambda line: line.replace(b'":', b'":\t'),
    lambda line: line.replace(b'_reason":', b'_reason": '),
    lambda line: line.replace(b'index":', b'index" :'),
]
EVENTS = [
    _choice(),
    _choice(1),
    _choice(finish="stop"),
    _choice(1, "stop"),
    _choice(finish="abort"),
    _choice(10),
    _choice(delta={"content": "finish_reason"}),
    _choice(delta={"content": '"finish_reason":null "finish_reason": null'}),
    _choice(delta={"content": "index"}),
    TOOL,
    QUOTED,
    USAGE,
    ERROR,
    DONE,
]


class _Slow:
    """The same judgement with every line read by the parser."""

    def __init__(self, choices: int | None) -> None:
        self.judge = judge_for(CHAT, 200, event_stream=True, choices=choices)
        self.judge.usual = lambda _events: False  # type: ignore[attr-defined]


@pytest.mark.parametrize("choices", [None, 1, 2])
@given(
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, len(SPELLINGS) - 1)), max_size=8),
    st.integers(1, 400),
)
def test_the_fast_judgement_is_the_parsers(choices: int | None, events: list[tuple[bytes, int]], step: int):
    """In every spelling of the keys, mixed and cut anywhere, it says what the parser says."""
    body = b"".join(SPELLINGS[spelling](event) for event, spelling in events)
    fast, slow = judge_for(CHAT, 200, event_stream=True, choices=choices), _Slow(choices).judge
    for at in range(0, len(body), step):
        fast.feed(body[at : at + step])
        slow.feed(body[at : at + step])
    assert fast.judge() == slow.judge()


@pytest.mark.parametrize("spell", SPELLINGS)
@pytest.mark.parametrize("finish", ["stop", "abort", None])
def test_a_spelling_cut_at_every_byte(spell: Callable[[bytes], bytes], finish: str | None):
    """Two pieces, cut anywhere, are judged as the whole is."""
    body = spell(_choice()) + spell(_choice(finish=finish)) + DONE
    expected = {"stop": ("completed", ""), "abort": ("failed", "abort"), None: ("failed", "no_finish_reason")}[finish]
    for cut in range(len(body) + 1):
        judge = judge_for(CHAT, 200, event_stream=True)
        judge.feed(body[:cut])
        judge.feed(body[cut:])
        assert (judge.judge().outcome, judge.judge().why) == expected


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_tokens_are_judged_without_the_parser(separators: tuple[str, str], monkeypatch: pytest.MonkeyPatch):
    """In both usual spellings a token of choice 0 costs no parsing."""
    monkeypatch.setattr(completion, "_parsed", lambda _payload: pytest.fail("parsed"))
    event = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]}
    line = b"data: " + json.dumps(event, separators=separators).encode() + b"\n\n"
    for choices in (None, 1):
        judge = judge_for(CHAT, 200, event_stream=True, choices=choices)
        judge.feed(line)
        judge.feed(line * 50)


WHOLE = [
    ("chat", CHAT, b'{"choices":[{"finish_reason":"stop"}]}', ("completed", "")),
    ("chat aborted", CHAT, b'{"choices":[{"finish_reason": "abort"}]}', ("failed", "abort")),
    ("chat batch", CHAT, b'[{"choices":[{"finish_reason":"stop"}]}]', ("completed", "")),
    ("chat quoting an abort", CHAT, json.dumps({"c": '"finish_reason":"abort"'}).encode(), ("completed", "")),
    ("chat cut", CHAT, b'{"choices":[', ("failed", "unparsable")),
    ("chat text", CHAT, b'"x"', ("failed", "unparsable")),
    ("chat deep", CHAT, b"[" * 100000, ("failed", "unparsable")),
    ("responses", RESPONSES, b'{"status":"completed"}', ("completed", "")),
    ("responses failed", RESPONSES, b'{"status":"failed"}', ("failed", "failed")),
    ("responses cancelled", RESPONSES, b'{"status":"cancelled"}', ("failed", "cancelled")),
    ("messages", MESSAGES, b'{"stop_reason":"end_turn"}', ("completed", "")),
    ("messages aborted", MESSAGES, b'{"stop_reason":null}', ("failed", "abort")),
    ("embeddings", RequestClass.EMBEDDINGS, b"\x00\x01", ("completed", "")),
]


@pytest.mark.parametrize("size", [0, 1, 5])
@pytest.mark.parametrize(("cls", "body", "expected"), [row[1:] for row in WHOLE], ids=[row[0] for row in WHOLE])
def test_whole_answers(cls: RequestClass, body: bytes, expected: tuple[str, str], size: int):
    """Each kind of whole answer completes exactly by its own rule, in pieces of any size."""
    judged = _judge(cls, body, stream=False, size=size)
    assert (judged.outcome, judged.why) == expected


def test_background_response_completes_while_the_engine_works_on():
    """`queued` completes the request and says that its execution still runs."""
    judged = _judge(RESPONSES, b'{"id":"resp_5f","status":"queued"}', stream=False)
    assert (judged.outcome, judged.running, judged.engine_id) == ("completed", True, "resp_5f")


def test_a_streamed_response_names_its_id_however_it_ends():
    """The id stands in the first event, so a stream that is cut has told it as well."""
    cut = (
        b'event: response.created\ndata: {"type":"response.created","response":{"id": "resp_0a","status":"queued"}}\n\n'
    )
    judged = _judge(RESPONSES, cut, stream=True)
    assert (judged.outcome, judged.engine_id) == ("failed", "resp_0a")
    assert _judge(CHAT, cut, stream=True).engine_id == ""


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, ("completed", "client_error")),
        (404, ("completed", "client_error")),
        (500, ("failed", "engine_error")),
        (503, ("failed", "engine_error")),
        (307, ("completed", "redirect")),
        (204, ("completed", "")),
    ],
)
def test_statuses(status: int, expected: tuple[str, str]):
    """A client's error is a completed request, an engine's a failed one, whatever the body says."""
    judge = judge_for(RequestClass.POOLING, status, event_stream=False)
    judge.feed(b"anything")
    assert (judge.judge().outcome, judge.judge().why) == expected


@pytest.mark.parametrize("size", [0, 1000, 4096])
def test_large_whole_answers_are_searched_as_they_pass(size: int):
    """Above the limit nothing is kept: an abort anywhere is found, the end is looked at."""
    filler = b'"' + b"x" * MAX_WHOLE + b'"'
    good = b'{"a":' + filler + b',"choices":[{"finish_reason":"stop"}]}'
    assert _judge(CHAT, good, stream=False, size=size).outcome == "completed"
    assert _judge(CHAT, good.replace(b"stop", b"abort"), stream=False, size=size).why == "abort"
    assert _judge(CHAT, good[:-1], stream=False, size=size).why == "unparsable" or good[-2:] == b"]}"
    assert _judge(CHAT, good[:-5], stream=False, size=size).why == "unparsable"
    messages = b'{"a":' + filler + b',"stop_reason":"end_turn"}'
    assert _judge(MESSAGES, messages, stream=False, size=size).outcome == "completed"
    assert _judge(MESSAGES, messages.replace(b'"end_turn"', b"null"), stream=False, size=size).why == "abort"


@pytest.mark.parametrize("size", [0, 1000, MAX_LINE // 3])
def test_overlong_lines_are_skipped_whole(size: int):
    """A line beyond the limit is not read, the next one is."""
    long = b'data: {"choices":[{"index":0,"finish_reason":"abort","x":"' + b"y" * MAX_LINE + b'"}]}\n\n'
    body = _choice() + long + _choice(finish="stop") + DONE
    assert _judge(CHAT, body, stream=True, size=size).outcome == "completed"


_LINES = st.sampled_from(
    [
        _choice(), _choice(1), _choice(0, "stop"), _choice(1, "length"), _choice(0, "abort"), TOOL, QUOTED, USAGE, DONE,
        ERROR, _named("response.completed"), _named("response.failed"), _named("message_stop"), _named("error"),
        _named("message_delta", delta={"stop_reason": "end_turn"}), b': comment "index":0\n', b"\n", b"\r\n", b"data:",
        b'"finish_reason":"', b'"index":', b"\xff\x00", b"event: error", b"data: [1,2]\n\n", b"data: {not json}\n\n",
    ]
)  # fmt: skip


@settings(max_examples=300)
@given(
    st.sampled_from(list(RequestClass)),
    st.sampled_from([None, 1, 2]),
    st.booleans(),
    st.lists(_LINES, max_size=12).map(b"".join),
    st.lists(st.integers(0, 2000), max_size=12),
)
def test_splits_change_nothing(cls: RequestClass, choices: int | None, stream: bool, body: bytes, cuts: list[int]):
    """Any split of any body gives the judgement of the whole, and no exception."""
    whole = _judge(cls, body, stream=stream, choices=choices)
    judge = judge_for(cls, 200, event_stream=stream, choices=choices)
    start = 0
    for end in [*sorted({cut for cut in cuts if cut < len(body)}), len(body)]:
        judge.feed(body[start:end])
        start = end
    assert judge.judge() == whole
    assert _judge(cls, body, stream=stream, choices=choices, size=1) == whole


def _split_over_lines(body: bytes) -> bytes:
    """Break each event's data after every colon and comma that stands between two JSON tokens."""
    lines = []
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            data = json.dumps(json.loads(line[6:]), indent=1)
            line = b"\n".join(b"data: " + part for part in data.replace(": ", ":\n").encode().split(b"\n"))  # noqa: PLW2901
        lines.append(line)
    return b"\n".join(lines)


FORMS = {
    "lf": lambda body: body,
    "crlf": lambda body: body.replace(b"\n", b"\r\n"),
    "cr": lambda body: body.replace(b"\n", b"\r"),
    "mixed": lambda body: body.replace(b"\n\n", b"\r\n\r").replace(b"\n", b"\r", 3),
    "many data lines": _split_over_lines,
    "many data lines with cr": lambda body: _split_over_lines(body).replace(b"\n", b"\r"),
    "no space": lambda body: body.replace(b"data: ", b"data:").replace(b"event: ", b"event:"),
    "no last line end": lambda body: body.removesuffix(b"\n"),
    "no line end at all": lambda body: body.rstrip(b"\n"),
    "more fields": lambda body: body.replace(b"data:", b"id: 7\nretry: 3\n: ping\ndata:"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("cls", "choices", "body", "expected"), [row[1:] for row in STREAMS], ids=[row[0] for row in STREAMS]
)
def test_every_way_to_write_an_event_is_judged_alike(
    form: str, cls: RequestClass, choices: int | None, body: bytes, expected: tuple[str, str, str]
):
    """Line ends, data over several lines and further fields are the standard's: they change no judgement, however cut."""
    written = FORMS[form](body)
    for size in (0, 1, 2, 3, 7, 64):
        judged = _judge(cls, written, stream=True, choices=choices, size=size)
        assert (str(judged.outcome), judged.why, judged.marker) == expected, (size, written)


def test_data_without_end_is_not_kept():
    """An event whose data lines have no end is bounded in memory and not judged; the next one is."""
    judge = judge_for(CHAT, 200, event_stream=True)
    for _ in range(3 * MAX_LINE // 1000):
        judge.feed(b"data: " + b"x" * 994 + b"\n")
    assert sum(map(len, judge._data)) <= MAX_LINE
    judge.feed(b"\n" + _choice(finish="stop") + DONE)
    assert judge.judge().outcome == "completed"


@given(st.sampled_from(list(RequestClass)), st.booleans(), st.binary(max_size=400))
def test_random_bytes_are_judged_without_error(cls: RequestClass, stream: bool, body: bytes):
    """Garbage gets a judgement, never an exception."""
    _judge(cls, body, stream=stream, size=3)


def test_a_line_without_end_in_small_pieces_costs_linear_work():
    """Thirty-two MiB of one line, in small pieces, are judged in bounded time and memory."""
    judge = judge_for(CHAT, 200, event_stream=True)
    piece = b"x" * 512
    began = time.process_time()
    for _ in range(64 * 1024):
        judge.feed(piece)
    assert judge.judge().why == "no_done"
    assert time.process_time() - began < 5
