"""Every fault of the stand-in engine that is not an end of the process shows what its sentence says."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fakes.mock_process import MockEngine

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "ignore_eos": True}
LONG = ASK | {"max_tokens": 4000}
TOKENS = "vllm:generation_tokens_total"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MockEngine]:
    """One engine of two data-parallel ranks for all tests of this file."""
    args = ["--data-parallel-size", "2", "--mock-tokens-per-second", "200", "--disable-uvicorn-access-log"]
    with MockEngine(*args, directory=tmp_path_factory.mktemp("mock")) as started:
        yield started.wait_ready()


@pytest.fixture
def engine(shared: MockEngine) -> Iterator[MockEngine]:
    """Lend the shared engine, healthy again and idle after each test."""
    yield shared
    for fault in shared.get("/mock/fault").json["faults"]:
        if fault["value"] is not None:
            shared.clear(fault["name"])
    until(lambda: shared.get("/load").json["server_load"] == 0)


def until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    """Ask again until `condition()` holds; each question is a request to the engine."""
    limit = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < limit


def flat(mock: MockEngine, name: str, **labels: str) -> bool:
    """Whether a series keeps its value over 30 scrapes, in which a working engine makes many tokens."""
    return len({mock.metric(name, **labels) for _ in range(30)}) == 1


def chunks(events: list[str]) -> list[dict]:
    """Give the JSON of the `data:` lines, `[DONE]` left out."""
    lines = [line for event in events for line in event.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


def waits_for(engine: MockEngine, act: Callable[[], object]) -> threading.Thread:
    """Do something that should not come to an end now, in a thread."""
    thread = threading.Thread(target=act)
    thread.start()
    return thread


# -- the table over HTTP ---------------------------------------------------------------------------------------


def test_faults_are_listed_set_and_cleared(engine: MockEngine) -> None:
    """The list shows what is on; wrong names and values are 400 with a sentence."""
    engine.fault("slow_term", "2s")
    on = {
        fault["name"]: fault["value"]
        for fault in engine.get("/mock/fault").json["faults"]
        if fault["value"] is not None
    }
    assert on == {"slow_term": "2s"}
    assert engine.post("/mock/fault", {"name": "nothing"}).status == 400
    assert "no whole number" in engine.post("/mock/fault", {"name": "cut_answers", "value": "x"}).json["error"]


def test_faults_cannot_be_set_where_others_can_connect() -> None:
    """On an address that other machines reach, /mock/fault does not exist."""
    with MockEngine("--host", "0.0.0.0", "--port", "0", port=0) as public:  # the last --host wins
        public.wait_ready()
        import psutil

        public.port = next(c.laddr.port for c in psutil.Process(public.process.pid).net_connections("tcp"))
        assert public.get("/mock/fault").status == 404


# -- answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGES, RESPONSES])
def test_cut_answers_end_without_an_end(engine: MockEngine, path: str) -> None:
    """A cut stream carries its tokens and then breaks; a cut whole answer is shorter than announced."""
    body = LONG | {"prompt": "x"} if path != RESPONSES else {"input": "x"}
    engine.fault("cut_answers", 3)
    with engine.stream(path, body) as stream, pytest.raises(http.client.IncompleteRead):
        list(stream)
    with pytest.raises(http.client.IncompleteRead):
        engine.post(path, body)


@pytest.mark.parametrize(
    ("path", "last"),
    [(CHAT, "[DONE]"), (TEXT, "[DONE]"), (MESSAGES, "message_stop"), (RESPONSES, "response.completed")],
)
def test_no_done_leaves_out_the_last_event_alone(engine: MockEngine, path: str, last: str) -> None:
    """The framing ends cleanly and the stream's last event is missing; without the fault it is there."""
    body = ASK | {"prompt": "x"} if path != RESPONSES else {"input": "x"}
    with engine.stream(path, body) as stream:
        whole = list(stream)
    engine.fault("no_done")
    with engine.stream(path, body) as stream:
        short = list(stream)
    assert last in whole[-1]
    assert last not in short[-1]
    assert len(short) >= 1


def test_abort_answers_end_with_abort_and_done(engine: MockEngine) -> None:
    """Chat ends with finish_reason abort and [DONE], whole answers carry it, messages have no stop_reason."""
    engine.fault("abort_answers", 3)
    with engine.stream(CHAT, LONG) as stream:
        events = list(stream)
    assert events[-1] == "data: [DONE]"
    assert chunks(events)[-1]["choices"][0]["finish_reason"] == "abort"
    assert engine.post(CHAT, LONG).json["choices"][0]["finish_reason"] == "abort"
    with engine.stream(MESSAGES, LONG) as stream:
        events = list(stream)
    assert chunks(events)[-2]["delta"]["stop_reason"] is None


def test_error_events_stand_before_done(engine: MockEngine) -> None:
    """Chat carries an error object and still [DONE]; messages and responses end with it; a whole answer is 500."""
    engine.fault("error_event", 3)
    with engine.stream(CHAT, LONG) as stream:
        events = list(stream)
    assert events[-1] == "data: [DONE]"
    assert chunks(events)[-1]["error"]["code"] == 500
    for path, body in ((MESSAGES, LONG), (RESPONSES, {"input": "x"})):
        with engine.stream(path, body) as stream:
            assert list(stream)[-1].startswith("event: error")
    assert engine.post(CHAT, LONG).status == 500


def test_statuses_hit_inference_or_everything(engine: MockEngine) -> None:
    """inference_status leaves health and metrics alone; every_status does not, but can be cleared."""
    engine.fault("inference_status", 502)
    assert [engine.post(CHAT, ASK).status, engine.get("/health").status] == [502, 200]
    engine.fault("every_status")
    assert [engine.get("/health").status, engine.get("/metrics").status, engine.get("/nope").status] == [503, 503, 503]


# -- progress --------------------------------------------------------------------------------------------------


def test_hang_steps_freezes_one_engine_of_two(engine: MockEngine) -> None:
    """The hung rank's counters stay and its running gauge keeps 1, the other goes on; cleared, both complete."""
    with engine.stream(CHAT, LONG | {"max_tokens": 400}) as one, engine.stream(CHAT, LONG | {"max_tokens": 400}) as two:
        until(lambda: engine.metric("vllm:num_requests_running", engine="1") == 1)
        engine.fault("hang_steps", 1)
        until(lambda: flat(engine, TOKENS, engine="1"))
        assert engine.metric("vllm:num_requests_running", engine="1") == 1
        assert not flat(engine, TOKENS, engine="0")
        engine.clear("hang_steps")
        assert [list(stream)[-1] for stream in (one, two)] == ["data: [DONE]"] * 2


def test_hang_scheduling_leaves_requests_waiting(engine: MockEngine) -> None:
    """Nothing runs, requests wait by the gauge; cleared, they complete."""
    engine.fault("hang_scheduling")
    with engine.stream(CHAT, ASK) as stream:
        until(lambda: engine.metric("vllm:num_requests_waiting", engine="0") == 1)
        assert engine.metric("vllm:num_requests_running", engine="0") == 0
        engine.clear("hang_scheduling")
        assert list(stream)[-1] == "data: [DONE]"


def test_hang_first_step_looks_idle(engine: MockEngine) -> None:
    """With a request open, running and waiting read 0 and nothing is counted; cleared, it completes."""
    engine.fault("hang_first_step")
    with engine.stream(CHAT, ASK) as stream:
        until(lambda: engine.get("/load").json["server_load"] == 1)
        assert flat(engine, TOKENS, engine="0")
        assert engine.metric("vllm:num_requests_running", engine="0") == 0
        assert engine.metric("vllm:num_requests_waiting", engine="0") == 0
        engine.clear("hang_first_step")
        assert list(stream)[-1] == "data: [DONE]"


def test_hang_first_step_lets_running_work_end(engine: MockEngine) -> None:
    """A stream that was under way when the fault was set completes."""
    with engine.stream(CHAT, LONG | {"max_tokens": 100}) as stream:
        events = iter(stream)
        next(events)
        engine.fault("hang_first_step")
        assert list(events)[-1] == "data: [DONE]"


def test_hang_http_answers_nobody(engine: MockEngine) -> None:
    """Connections are taken and stay without an answer, health included, until it is cleared."""
    engine.fault("hang_http")
    replies: list[int] = []
    thread = waits_for(engine, lambda: replies.append(engine.get("/health").status))
    assert engine.get("/mock/fault").status == 200
    assert replies == []
    engine.clear("hang_http")
    thread.join(10)
    assert replies == [200]


def test_long_prefill_is_flat(engine: MockEngine) -> None:
    """During a long prefill no counter and no gauge moves; when it is over the answer comes."""
    engine.fault("long_prefill", "1h")
    with engine.stream(CHAT, ASK) as stream:
        until(lambda: engine.get("/load").json["server_load"] == 1)
        assert flat(engine, TOKENS, engine="0")
        assert flat(engine, "vllm:iteration_tokens_total_count", engine="0")
        engine.clear("long_prefill")
        assert list(stream)[-1] == "data: [DONE]"


def test_a_long_prefill_ends_after_its_time(engine: MockEngine) -> None:
    """Left alone, a long prefill takes as long as it was told to."""
    engine.fault("long_prefill", "300ms")
    started = time.monotonic()
    assert engine.post(CHAT, ASK).status == 200
    assert time.monotonic() - started >= 0.3


def test_never_finish_counts_and_delivers_nothing(engine: MockEngine) -> None:
    """Steps and tokens are counted while the stream stays without a byte of body."""
    engine.fault("never_finish")
    with engine.stream(CHAT, ASK) as stream:
        before = engine.metric(TOKENS, engine="0") or 0.0
        until(lambda: (engine.metric(TOKENS, engine="0") or 0.0) > before + ASK["max_tokens"])
        assert stream.headers["transfer-encoding"] == "chunked"
        assert engine.metric("vllm:num_requests_running", engine="0") == 1


def test_a_clients_fin_is_its_leaving(engine: MockEngine) -> None:
    """Half a close by the client takes its request out while the engine has nothing to send."""
    engine.fault("hang_steps")
    body = json.dumps(ASK).encode()
    head = f"POST {CHAT} HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(engine.uds)
        raw.sendall(head.encode() + body)
        until(lambda: engine.get("/load").json["server_load"] == 1)
        raw.shutdown(socket.SHUT_WR)
        until(lambda: engine.get("/load").json["server_load"] == 0)


def test_keep_running_ignores_that_the_client_left(engine: MockEngine) -> None:
    """The engine makes every token of a request whose client is gone."""
    engine.fault("keep_running")
    before = engine.metric("vllm:request_success_total", engine="0", finished_reason="length") or 0.0
    with engine.stream(CHAT, LONG | {"max_tokens": 60}) as stream:
        next(iter(stream))
    until(lambda: engine.metric("vllm:request_success_total", engine="0", finished_reason="length") == before + 1)


@pytest.mark.parametrize(("fault", "awake"), [("asleep", 0.0), ("paused", 1.0)])
def test_sleep_and_pause_let_requests_wait(engine: MockEngine, fault: str, awake: float) -> None:
    """Requests wait; the sleep gauge shows sleep and hides a pause."""
    engine.fault(fault)
    with engine.stream(CHAT, ASK) as stream:
        until(lambda: engine.metric("vllm:num_requests_waiting", engine="0") == 1)
        assert engine.metric("vllm:engine_sleep_state", engine="0", sleep_state="awake") == awake
        engine.clear(fault)
        assert list(stream)[-1] == "data: [DONE]"


# -- metrics and health ----------------------------------------------------------------------------------------


def test_stale_gauges_keep_their_values(engine: MockEngine) -> None:
    """After every client left, running still reads what it read when the fault was set."""
    with engine.stream(CHAT, LONG):
        until(lambda: engine.metric("vllm:num_requests_running", engine="0") == 1)
        engine.fault("stale_gauges")
    until(lambda: engine.get("/load").json["server_load"] == 0)
    assert engine.metric("vllm:num_requests_running", engine="0") == 1
    engine.clear("stale_gauges")
    until(lambda: engine.metric("vllm:num_requests_running", engine="0") == 0)


def test_metrics_can_be_missing_partial_renamed_or_failing(engine: MockEngine) -> None:
    """Each variant of /metrics has and lacks what its sentence says."""

    def page(fault: str, value: str | None = None) -> tuple[int, str]:
        engine.fault(fault, value)
        reply = engine.get("/metrics")
        engine.clear(fault)
        return reply.status, reply.body.decode()

    assert page("metrics_absent")[0] == 404
    assert page("metrics_status", "503")[0] == 503
    python_only = page("metrics_python_only")[1]
    assert ("vllm:" in python_only, "process_start_time_seconds" in python_only) == (False, True)
    multiprocess = page("metrics_multiprocess")[1]
    assert ("vllm:num_requests_running" in multiprocess, "process_" in multiprocess, "_created" in multiprocess) == (
        True,
        False,
        False,
    )
    renamed = page("metrics_renamed")[1]
    assert ("gpu_cache_usage_perc" in renamed, 'num_requests_running{engine="' in renamed) == (True, False)


def test_metrics_can_stay_zero(engine: MockEngine) -> None:
    """With metrics_zero every series is there and none shows that anything was done."""
    assert engine.post(CHAT, ASK).status == 200
    assert (engine.metric(TOKENS, engine="0") or 0) > 0
    engine.fault("metrics_zero")
    assert engine.metric(TOKENS, engine="0") == 0


def test_the_start_time_alternates(engine: MockEngine) -> None:
    """Scrapes see two start times in turn, as behind a balancing proxy."""
    engine.fault("start_time_alternates")
    seen = [engine.metric("process_start_time_seconds") for _ in range(4)]
    assert seen[0] != seen[1]
    assert seen[:2] == seen[2:]


@pytest.mark.parametrize(("fault", "path"), [("metrics_slow", "/metrics"), ("health_slow", "/health")])
def test_slow_paths_answer_late_and_hold_up_nobody(engine: MockEngine, fault: str, path: str) -> None:
    """The slow path takes its time, another answers meanwhile."""
    engine.fault(fault, "300ms")
    started = time.monotonic()
    thread = waits_for(engine, lambda: engine.get(path))
    assert engine.get("/version").status == 200
    thread.join(10)
    assert time.monotonic() - started >= 0.3


def test_health_can_fail_or_be_missing(engine: MockEngine) -> None:
    """Health answers with the status asked for; 404 has the body of a path that is not offered."""
    engine.fault("health_status")
    assert engine.get("/health").status == 503
    engine.fault("health_status", 404)
    assert (engine.get("/health").status, engine.post("/ping").json) == (404, {"detail": "Not Found"})


# -- output ----------------------------------------------------------------------------------------------------


def test_ugly_output_is_printed_on_demand(engine: MockEngine) -> None:
    """ANSI sequences, a very long line, bytes that are no UTF-8, and a flood appear in the output."""
    engine.fault("log_ansi")
    engine.wait_line("\x1b[1;31m")
    engine.fault("log_long", 200_000)
    assert len(engine.wait_line("x" * 1000)) == 200_000
    engine.fault("log_invalid")
    engine.wait_line("\ufffd")
    engine.fault("log_flood", 5000)
    engine.wait_line("flood line 400")


def test_the_load_prints_progress_that_returns_with_cr(tmp_path: Path) -> None:
    """A start with load_progress prints percentages divided by CR, the last one ended by a newline."""
    with MockEngine("--mock-fault", "load_progress", directory=tmp_path) as loading:
        line = loading.wait_ready().wait_line("Loading safetensors checkpoint shards")
    assert [part.split("%")[0].split()[-1] for part in line.rstrip("\n").split("\r")] == ["25", "50", "75", "100"]


def test_every_fault_is_tested_somewhere() -> None:
    """No fault of the table is missing from the tests of the stand-in engine."""
    from vllm_supervisor.mock.faults import FAULTS

    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_mock_*.py"))
    assert [fault.name for fault in FAULTS if fault.name not in tests] == []
