"""The stand-in engine's HTTP, as captured from vLLM 0.32: routes, bodies, framing, queueing, clients that leave."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fakes.mock_process import MockEngine

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True}
LONG = ASK | {"max_tokens": 4000}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MockEngine]:
    """One engine for all tests of this file: two slots, 200 tokens a second."""
    args = ["--max-num-seqs", "2", "--mock-tokens-per-second", "200", "--root-path", "/root"]
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    with MockEngine(*args, directory=tmp_path_factory.mktemp("mock"), env=env) as started:
        yield started.wait_ready()


def data(events: list[str]) -> list[dict]:
    """Give the JSON of the `data:` lines, `[DONE]` left out."""
    lines = [line for event in events for line in event.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


def until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    """Ask again until `condition()` holds; each question is a request, so this spins on the engine's own clock."""
    limit = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < limit


@pytest.mark.parametrize(
    ("asked", "status", "headers", "body"),
    [
        (("GET", "/health"), 200, {"content-length": "0", "vary": "Origin", "server": "uvicorn"}, b""),
        (("POST", "/ping"), 200, {"content-length": "0"}, b""),
        (("GET", "/version"), 200, {"content-type": "application/json"}, b'{"version":"0.32.0"}'),
        (("GET", "/nope"), 404, {"content-type": "application/json"}, b'{"detail":"Not Found"}'),
        (("GET", CHAT), 405, {"allow": "POST"}, b'{"detail":"Method Not Allowed"}'),
        (("HEAD", "/health"), 405, {"allow": "GET", "content-length": "31"}, b""),
        (("GET", "/v1/embeddings"), 404, {}, b'{"detail":"Not Found"}'),
        (("GET", "/root/health"), 200, {}, b""),
        (("HEAD", "/metrics"), 200, {}, b""),
    ],
)
def test_routes_answer_as_vllms(
    engine: MockEngine, asked: tuple[str, str], status: int, headers: dict, body: bytes
) -> None:
    """Status, headers and body of the plain routes are vLLM's."""
    reply = engine.request(*asked)
    assert (reply.status, reply.body) == (status, body)
    assert headers.items() <= reply.headers.items()


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (CHAT, {}, 400, "{'type': 'missing', 'loc': 'body.messages'"),
        (CHAT, ASK | {"model": "nope"}, 404, "The model `nope` does not exist. Valid aliases: tiny."),
        (CHAT, ASK | {"max_tokens": -4}, 400, "max_tokens must be at least 1, got -4."),
        (CHAT, ASK | {"max_tokens": 5000}, 400, "max_tokens=5000 cannot be greater than max_model_len=4096."),
        (TEXT, {}, 400, "Either prompt or prompt_embeds must be provided and non-empty."),
        (TEXT, {"prompt": "x", "n": 0}, 400, "n must be at least 1, got 0."),
        (MESSAGES, {}, 400, "3 validation errors"),
        (RESPONSES, {}, 400, "body.input"),
        ("/tokenize", {}, 400, "2 validation errors"),
    ],
)
def test_mistakes_are_answered_with_vllms_bodies(
    engine: MockEngine, path: str, body: dict, status: int, message: str
) -> None:
    """A wrong body gets vLLM's status, code and message."""
    reply = engine.post(path, body)
    assert (reply.status, reply.json["error"]["code"]) == (status, status)
    assert message in reply.json["error"]["message"]


def test_bodies_that_are_no_json_are_refused(engine: MockEngine) -> None:
    """Broken JSON and another content type are 400 with vLLM's words."""
    broken = engine.request("POST", CHAT, raw=b"{bad", headers={"Content-Type": "application/json"})
    assert "json_invalid" in broken.json["error"]["message"]
    other = engine.request("POST", CHAT, raw=b"{}", headers={"Content-Type": "text/plain"})
    assert (broken.status, other.status) == (400, 400)
    assert "Unsupported Media Type" in other.json["error"]["message"]


def test_a_request_that_breaks_a_handler_is_500_and_the_engine_lives(engine: MockEngine) -> None:
    """A body nested deeper than the parser goes is answered with 500; the next request is served."""
    body = b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    reply = engine.request("POST", CHAT, raw=body, headers={"Content-Type": "application/json"})
    assert (reply.status, reply.body) == (500, b"Internal Server Error")
    assert engine.post(CHAT, ASK).status == 200


def test_whole_answers_carry_the_clients_id_and_every_choice(engine: MockEngine) -> None:
    """Ids hold X-Request-Id; n times prompts choices come in order with usage."""
    chat = engine.post(CHAT, ASK | {"n": 2}, {"X-Request-Id": "led-1"}).json
    assert chat["id"] == "chatcmpl-led-1"
    assert [(choice["index"], choice["finish_reason"]) for choice in chat["choices"]] == [(0, "length"), (1, "length")]
    text = engine.post(
        TEXT, {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "ignore_eos": True}, {"X-Request-Id": "x"}
    ).json
    assert (text["id"], len(text["choices"]), text["usage"]["completion_tokens"]) == ("cmpl-x", 4, 12)


def test_streams_begin_with_the_role_and_end_with_done(engine: MockEngine) -> None:
    """A chat stream is chunked, opens with each choice's role, closes with usage and [DONE]."""
    with engine.stream(CHAT, ASK | {"n": 2, "stream_options": {"include_usage": True}}) as stream:
        assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert stream.headers["transfer-encoding"] == "chunked"
        events = list(stream)
    chunks = data(events)
    assert events[-1] == "data: [DONE]"
    assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks[:2]] == ["assistant"] * 2
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    ends = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == [0, 1]


def test_a_stream_says_what_the_whole_answer_says(engine: MockEngine) -> None:
    """The pieces of a stream joined are the text of the same request answered whole."""
    ask = {"prompt": "x", "max_tokens": 9, "ignore_eos": True}
    with engine.stream(TEXT, ask) as stream:
        pieces = [chunk["choices"][0]["text"] for chunk in data(list(stream))]
    assert "".join(pieces) == engine.post(TEXT, ask).json["choices"][0]["text"]


def test_messages_and_responses_have_their_own_events(engine: MockEngine) -> None:
    """Anthropic streams end with message_stop, responses with response.completed, neither with [DONE]."""
    with engine.stream(MESSAGES, ASK | {"model": "tiny"}) as stream:
        events = list(stream)
    assert events[0].startswith("event: message_start")
    assert events[-1] == 'event: message_stop\ndata: {"type":"message_stop"}'
    assert data(events)[-2]["delta"]["stop_reason"] == "max_tokens"
    with engine.stream(RESPONSES, {"input": "hi", "max_output_tokens": 3}) as stream:
        chunks = data(list(stream))
    assert [chunk["sequence_number"] for chunk in chunks] == list(range(len(chunks)))
    assert chunks[-1]["type"] == "response.completed"
    assert engine.post(MESSAGES, ASK | {"model": "tiny"}).json["stop_reason"] == "max_tokens"
    assert engine.post(RESPONSES, {"input": "hi"}).json["status"] == "completed"


def test_a_background_response_is_queued_and_runs_on(engine: MockEngine) -> None:
    """background: true answers at once and can be asked for until it is completed, and be cancelled."""
    first = engine.post(RESPONSES, {"input": "hi", "background": True}).json
    assert first["status"] == "queued"
    until(lambda: engine.get(f"{RESPONSES}/{first['id']}").json["status"] == "completed")
    second = engine.post(RESPONSES, {"input": "hi", "background": True}).json
    assert engine.post(f"{RESPONSES}/{second['id']}/cancel").json["status"] == "cancelled"
    assert engine.get(f"{RESPONSES}/nothing").status == 404


def test_background_needs_the_store(tmp_path: Path) -> None:
    """Without vLLM's environment variable a background response is refused with its words."""
    with MockEngine(directory=tmp_path) as bare:
        reply = bare.wait_ready().post(RESPONSES, {"input": "hi", "background": True})
    assert reply.status == 400
    assert "VLLM_ENABLE_RESPONSES_API_STORE=1" in reply.json["error"]["message"]


def test_tokens_are_counted_without_the_engine(engine: MockEngine) -> None:
    """tokenize, detokenize and count_tokens agree on a count."""
    count = engine.post("/tokenize", {"prompt": "abcdefgh"}).json["count"]
    assert count == 2
    assert engine.post("/detokenize", {"tokens": [0, 1]}).json["prompt"]
    assert engine.post(f"{MESSAGES}/count_tokens", ASK | {"model": "tiny"}).json["input_tokens"] == 1


def test_requests_beyond_the_slots_wait_and_leave_with_their_clients(engine: MockEngine) -> None:
    """Two run and two wait by the gauges; when their clients leave, both gauges return to 0 and no success is counted."""
    until(lambda: engine.metric("vllm:num_requests_running") == 0)
    before = engine.metric("vllm:request_success_total", finished_reason="abort")
    streams = [engine.stream(CHAT, LONG) for _ in range(4)]
    until(lambda: engine.metric("vllm:num_requests_waiting") == 2)
    assert engine.metric("vllm:num_requests_running") == 2
    for stream in streams:
        stream.close()
    until(lambda: engine.metric("vllm:num_requests_waiting") == 0 and engine.metric("vllm:num_requests_running") == 0)
    assert engine.metric("vllm:request_success_total", finished_reason="abort") == before


def test_dev_mode_sleeps_and_pauses(engine: MockEngine) -> None:
    """Asleep or paused, requests wait; the sleep gauge shows sleep alone; waking lets them run."""
    for enter, leave, state in (("/sleep", "/wake_up", "sleeping"), ("/pause", "/resume", "paused")):
        assert engine.post(enter).status == 200
        assert engine.get(f"/is_{state}").json == {f"is_{state}": True}
        awake = engine.metric("vllm:engine_sleep_state", sleep_state="awake")
        assert awake == (0 if state == "sleeping" else 1)
        with engine.stream(CHAT, ASK) as stream:
            until(lambda: engine.metric("vllm:num_requests_waiting") == 1)
            assert engine.post(leave).status == 200
            assert list(stream)[-1] == "data: [DONE]"


def test_connections_are_kept_pipelined_and_closed_when_asked(engine: MockEngine) -> None:
    """Two requests sent at once are answered in order on one connection, the second with connection: close."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(10)
        raw.connect(engine.uds)
        raw.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nconnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.index(b"0.32.0") < answer.index(b"connection: close")


def test_chunked_bodies_and_100_continue_are_read(engine: MockEngine) -> None:
    """A chunked upload that waits for 100 Continue is answered."""
    body = json.dumps(ASK).encode()
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(10)
        raw.connect(engine.uds)
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        )
        raw.sendall(head + b"expect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n")
        assert raw.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


def test_what_is_no_http_gets_400(engine: MockEngine) -> None:
    """Broken framing is answered as uvicorn does and closes."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(10)
        raw.connect(engine.uds)
        raw.sendall(b"nonsense\r\n\r\n")
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert answer.endswith(b"Invalid HTTP request received.")


def test_a_key_guards_v1_alone(tmp_path: Path) -> None:
    """With a key /v1 wants it, /metrics and /tokenize stay open; the 401 body is vLLM's."""
    with MockEngine(directory=tmp_path, env={"VLLM_API_KEY": "k"}) as guarded:
        guarded.wait_ready()
        refused = guarded.get("/v1/models")
        assert (refused.status, refused.body) == (401, b'{"error":"Unauthorized"}')
        assert guarded.get("/v1/models", {"Authorization": "Bearer no"}).status == 401
        assert guarded.get("/v1/models", {"Authorization": "Bearer k"}).status == 200
        assert guarded.get("/metrics").status == 200
        assert guarded.post("/tokenize", {"prompt": "x"}).status == 200


def test_a_pooling_model_embeds_and_does_not_complete(tmp_path: Path) -> None:
    """With --runner pooling embeddings answer in both encodings and the generating routes are 404."""
    with MockEngine("--runner", "pooling", directory=tmp_path) as pooling:
        pooling.wait_ready()
        reply = pooling.post("/v1/embeddings", {"input": ["a", "b"]}, {"X-Request-Id": "e1"}).json
        assert (reply["id"], [len(item["embedding"]) for item in reply["data"]]) == ("embd-e1", [16, 16])
        assert isinstance(
            pooling.post("/v1/embeddings", {"input": "a", "encoding_format": "base64"}).json["data"][0]["embedding"],
            str,
        )
        assert pooling.get(TEXT).status == 404
        assert pooling.get("/v1/embeddings").status == 405
