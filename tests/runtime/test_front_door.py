"""The front door in its usual work: health, pass-through, refusals, and how each exchange ends."""

import json

import pytest
import trio

from fakes.door import READY, STARTING, Door, in_trio, open_door
from fakes.raw_engine import LAST_CHUNK, STREAM_HEAD, Call, event, ok, token
from vllm_supervisor.core.words import ClosedReason, Cut
from vllm_supervisor.runtime import own_answers
from vllm_supervisor.runtime.engine_links import EngineLink
from vllm_supervisor.runtime.relay import Relay

DONE = event(b"[DONE]")


@in_trio
async def test_a_whole_answer_passes_and_the_connection_is_kept():
    """Two requests on one client connection get the engine's answers over one engine connection."""
    async with open_door() as door:
        client = await door.client()
        for number in (1, 2):
            await client.post(b"/v1/completions", b'{"prompt":"hi"}')
            head, body = await client.answer()
            assert head.startswith(b"HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 1970 00:00:00 GMT\r\nserver: uvicorn\r\n")
            assert b"X-Ledger-Id: led-%d\r\n" % number in head
            assert json.loads(body)["choices"][0]["finish_reason"] == "stop"
        await door.idle()
        assert door.engine.calls == 1
        assert door.journal.accepted_ids == ["led-1", "led-2"]
        assert door.journal.story == [("completed", "", "engine", "completed", "answer")] * 2


@in_trio
async def test_stream_chunks_pass_as_they_come():
    """The head and each event of a stream reach the client before the engine sends the next."""
    go = trio.Event()

    async def script(call: Call) -> None:
        await call.request()
        await call.send(STREAM_HEAD)
        await go.wait()
        await call.send(token(b"one"))
        await call.send(token(b"two", b'"stop"') + DONE + LAST_CHUNK)
        await call.gone()

    async with open_door(script) as door:
        client = await door.client()
        await client.post(b"/v1/completions")
        head = await client.until(b"\r\n\r\n")
        assert b"X-Accel-Buffering: no\r\n" in head
        assert head.lower().count(b"transfer-encoding: chunked\r\n") == 1
        go.set()
        body = await client.until(LAST_CHUNK)
        assert b'"one"' in body
        assert body.endswith(b"data: [DONE]\n\n\r\n" + LAST_CHUNK)
        await door.idle()
        (outcome,) = door.journal.outcomes
        assert (outcome.outcome, outcome.marker, outcome.stream, outcome.status) == ("completed", "[DONE]", True, 200)


@in_trio
async def test_request_goes_on_with_our_id_only_where_the_client_sent_none():
    """The client's X-Request-Id is left alone, ours fills a gap, hop-by-hop fields are dropped."""
    async with open_door() as door:
        client = await door.client()
        await client.post(b"/v1/completions", fields=b"X-Request-Id: theirs\r\nTE: trailers\r\nX-Other: 1\r\n")
        await client.answer()
        await client.post(
            b"/v1/completions", fields=b"Connection: keep-alive, X-Named\r\nX-Named: 1\r\nKeep-Alive: 5\r\n"
        )
        await client.answer()
        first, second = door.engine.heads
        assert b"X-Request-Id: theirs\r\n" in first
        assert b"X-Request-Id: led-2\r\n" in second
        assert b"TE:" not in first
        assert b"X-Other: 1\r\n" in first
        assert b"X-Named: 1\r\n" in second
        assert b"Connection" not in second
        assert b"Keep-Alive" not in second


@in_trio
async def test_client_that_leaves_while_the_engine_accepts_nothing_ends_the_waiting(monkeypatch: pytest.MonkeyPatch):
    """A client that goes before there is a connection to the engine is accounted for, without a fault of ours."""
    connecting = trio.Event()

    async def never() -> None:
        connecting.set()
        await trio.sleep_forever()

    async with open_door() as door:
        monkeypatch.setattr(door.upstreams, "connect", never)
        client = await door.client()
        await client.post(b"/v1/completions")
        await connecting.wait()
        await client.close()
        while door.front.connections:
            await trio.lowlevel.checkpoint()
        assert door.journal.story == [("cancelled", "client_left", "client", "not_started", "none")]


@pytest.mark.parametrize("pending", ["whole", "stream"])
@in_trio
async def test_client_that_leaves_closes_the_engine_connection(pending: str):
    """A client that goes, in a stream or while a whole answer is pending, is noticed at once."""
    noticed = trio.Event()

    async def script(call: Call) -> None:
        await call.request()
        if pending == "stream":
            await call.send(STREAM_HEAD + token())
        await call.gone()
        noticed.set()

    async with open_door(script) as door:
        client = await door.client()
        await client.post(b"/v1/completions")
        if pending == "stream":
            await client.until(b"\n\n")
        else:
            await door.engine.seen()
        await client.close()
        with trio.fail_after(1):
            await noticed.wait()
        await door.idle()
        assert door.journal.story == [("cancelled", "client_left", "client", "running", "connection_closed")]


@in_trio
async def test_fin_of_the_client_means_it_left():
    """A half-closed client counts as gone, as nginx and bare vLLM take it."""

    async def script(call: Call) -> None:
        await call.request()
        await call.gone()

    async with open_door(script) as door:
        client = await door.client()
        await client.post(b"/v1/completions")
        await door.engine.seen()
        client.half_close()
        await client.to_end()
        await door.idle()
        assert door.journal.outcomes[0].why == "client_left"


@in_trio
async def test_refused_while_the_engine_starts():
    """Before the engine is ready: 503 with Retry-After and OpenAI's error body, nothing in the ledger but a count."""
    async with open_door(up=False) as door:
        client = await door.client()
        await client.post(b"/v1/chat/completions")
        head, body = await client.answer()
        assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"Retry-After: 7\r\n" in head
        assert b"Connection: close\r\n" in head
        error = json.loads(body)["error"]
        assert (error["code"], error["type"]) == ("engine_starting", "service_unavailable")
        assert await client.to_end() == b""
        assert door.journal.rejections == [("chat", "engine_starting")]
        assert door.engine.calls == 0


@in_trio
async def test_saturated_gate_says_429():
    """Beyond the limit in flight a request gets 429 `saturated` before any engine work."""

    async def script(call: Call) -> None:
        await call.request()
        await call.gone()

    async with open_door(script, limit=1) as door:
        first = await door.client()
        await first.post(b"/v1/completions")
        await door.engine.seen()
        second = await door.client()
        await second.post(b"/v1/completions")
        head, body = await second.answer()
        assert head.startswith(b"HTTP/1.1 429 ")
        assert json.loads(body)["error"]["code"] == "saturated"
        assert len(door.engine.heads) == 1
        await first.close()
        await door.idle()


async def _get(door: Door, path: bytes) -> tuple[bytes, bytes]:
    client = await door.client()
    await client.get(path, b"Connection: close\r\n")
    head, body = await client.answer()
    await client.close()
    return head.split(b"\r\n", 1)[0].split(b" ")[1], body


@in_trio
async def test_health_paths_follow_the_view():
    """Liveness is always 200, readiness and start-up follow the state, each with the reason in its body."""
    async with open_door(up=False) as door:
        assert [
            (await _get(door, path))[0] for path in (b"/livez", b"/readyz", b"/health", b"/ping", b"/startupz")
        ] == [
            b"200",
            b"503",
            b"503",
            b"503",
            b"503",
        ]
        _, body = await _get(door, b"/readyz")
        assert json.loads(body) == {
            "status": "unavailable",
            "phase": "running",
            "engine": "starting",
            "reason": STARTING.reason,
        }
        door.view[0] = READY
        assert [(await _get(door, path))[0] for path in (b"/livez", b"/readyz", b"/startupz")] == [b"200"] * 3


@in_trio
async def test_head_of_a_health_path_has_no_body():
    """HEAD gets the head of the answer and the connection goes on."""
    async with open_door() as door:
        client = await door.client()
        await client.send(b"HEAD /readyz HTTP/1.1\r\nHost: a\r\n\r\nGET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
        head = await client.until(b"\r\n\r\n")
        assert b"Content-Length: " in head
        second, body = await client.answer()
        assert second.startswith(b"HTTP/1.1 200")
        assert json.loads(body)["status"] == "ok"


@in_trio
async def test_metrics_are_the_engines_then_ours():
    """The engine's exposition comes first, unchanged, then ours."""

    async def script(call: Call) -> None:
        await call.request()
        await call.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=1.0.0\r\ncontent-length: 5\r\n\r\nx 1\ny"
        )
        await call.gone()

    async with open_door(script) as door:
        client = await door.client()
        await client.get(b"/metrics")
        head, body = await client.answer()
        assert b"Content-Type: text/plain; version=1.0.0\r\n" in head
        assert body == b"x 1\ny\nvllm_supervisor_up 1\n"


@in_trio
async def test_metrics_are_ours_alone_when_the_engine_cannot_be_read():
    """A broken or missing engine leaves our own metrics readable."""

    async def script(call: Call) -> None:
        await call.request()
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhalf")

    async with open_door(script) as door:
        assert (await _get(door, b"/metrics"))[1] == b"vllm_supervisor_up 1\n"
        door.upstreams.point_at(None, 0)
        assert (await _get(door, b"/metrics"))[1] == b"vllm_supervisor_up 1\n"


@in_trio
async def test_metrics_do_not_wait_for_an_engine_that_hangs():
    """An engine that takes the request and says nothing, or only its head, leaves ours alone, well before it wakes."""
    said: list[bytes] = [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhalf"]

    async def script(call: Call) -> None:
        await call.request()
        await call.send(said.pop())
        await call.gone()

    assert own_answers.METRICS_TIMEOUT < 1.0
    async with open_door(script) as door:
        for _ in range(2):
            assert (await _get(door, b"/metrics"))[1] == b"vllm_supervisor_up 1\n"
    assert not said


@in_trio
async def test_cheap_paths_pass_without_ledger_while_the_engine_is_up():
    """A model list passes even when admission is closed by a drain request, and is in no ledger; a stop refuses it."""

    async def script(call: Call) -> None:
        while True:
            await call.request()
            await call.send(ok(b'{"data":[]}'))

    async with open_door(script) as door:
        door.gate.close(ClosedReason.DRAIN_REQUESTED)
        client = await door.client()
        await client.get(b"/v1/models")
        head, body = await client.answer()
        assert body == b'{"data":[]}'
        assert b"X-Ledger-Id" not in head
        door.gate.close(ClosedReason.STOPPING)
        await client.get(b"/v1/models")
        _, body = await client.answer()
        assert json.loads(body)["error"]["code"] == "draining"
        assert not door.journal.accepted_ids


@in_trio
async def test_dangerous_paths_are_forbidden():
    """A dev-mode path is refused with 403, and the engine sees nothing of it."""
    async with open_door() as door:
        client = await door.client()
        await client.post(b"/%73leep/?level=1")
        head, _ = await client.answer()
        assert head.startswith(b"HTTP/1.1 403 ")
        assert door.engine.calls == 0


@pytest.mark.parametrize(
    ("sent", "code", "story"),
    [
        (b"", b"502", ("failed", "engine_failed", "engine", "running", "connection_closed")),
        (b"HTTP/1.1 200 OK\r\nX: ", b"502", ("failed", "engine_failed", "engine", "running", "connection_closed")),
        (b"garbage\r\n\r\n", b"502", ("failed", "engine_failed", "engine", "running", "connection_closed")),
    ],
)
@in_trio
async def test_engine_that_breaks_off_before_its_head_gives_502(sent: bytes, code: bytes, story: tuple[str, ...]):
    """An engine that closes or talks nonsense before its head is whole: 502 `engine_failed`."""

    async def script(call: Call) -> None:
        await call.request()
        await call.send(sent)

    async with open_door(script) as door:
        client = await door.client()
        await client.post(b"/v1/completions")
        head, body = await client.answer()
        assert head.startswith(b"HTTP/1.1 " + code)
        assert json.loads(body)["error"]["code"] == "engine_failed"
        await door.idle()
        assert door.journal.story == [story]


@in_trio
async def test_stream_that_the_engine_breaks_off_ends_with_one_error_event():
    """The client reads an error event, no `[DONE]`, and a connection that ends without the last chunk."""

    async def script(call: Call) -> None:
        await call.request()
        await call.send(STREAM_HEAD + token())

    async with open_door(script) as door:
        client = await door.client()
        await client.post(b"/v1/completions")
        rest = await client.to_end()
        assert rest.count(b'"code": "engine_failed"') == 1
        assert b"[DONE]" not in rest
        assert not rest.endswith(LAST_CHUNK)
        await door.idle()
        assert door.journal.story == [("failed", "engine_failed", "engine", "running", "connection_closed")]


@pytest.mark.parametrize(
    ("cut", "code", "status"),
    [(Cut.DRAIN_DEADLINE, "drain_deadline", b"503"), (Cut.ENGINE_FAILED, "engine_failed", b"502")],
)
@in_trio
async def test_cut_streams_and_whole_answers_end_with_an_explicit_error(cut: Cut, code: str, status: bytes):
    """Cutting ends a stream with an error event, a pending whole answer with a status, and closes the engine's side."""
    close, closed = trio.open_memory_channel[bytes](2)

    async def script(call: Call) -> None:
        head, _ = await call.request()
        if head.startswith(b"POST /v1/chat"):
            await call.send(STREAM_HEAD + token())
        await call.gone()
        await close.send(head)

    async with open_door(script) as door:
        stream, whole = await door.client(), await door.client()
        await stream.post(b"/v1/chat/completions")
        await stream.until(b"\n\n")
        await whole.post(b"/v1/completions")
        await door.engine.seen(2)
        assert len(door.gate.cut_all(cut)) == 2
        assert b'"code": "%b"' % code.encode() in await stream.to_end()
        head, body = await whole.answer()
        assert head.startswith(b"HTTP/1.1 " + status)
        assert json.loads(body)["error"]["code"] == code
        await door.idle()
        assert {await closed.receive(), await closed.receive()} == set(door.engine.heads)
        assert {line[1] for line in door.journal.story} == {code}


@in_trio
async def test_answers_end_the_connection_once_we_are_closing():
    """After `close_idle` an answer carries Connection: close, and a late request on an idle connection a refusal."""
    async with open_door() as door:
        idle, client = await door.client(), await door.client()
        await idle.get(b"/livez")
        await idle.answer()
        door.front.close_idle()
        await client.post(b"/v1/completions")
        head, _ = await client.answer()
        assert b"Connection: close\r\n" in head
        assert await client.to_end() == b""
        door.gate.close(ClosedReason.STOPPING)
        await idle.post(b"/v1/completions")
        _, body = await idle.answer()
        assert json.loads(body)["error"]["code"] == "draining"
        assert await idle.to_end() == b""


@in_trio
async def test_front_door_taken_down_accounts_for_what_is_open():
    """Cancelling the front door with a request in flight still writes its outcome and gives the place back."""

    async def script(call: Call) -> None:
        await call.request()
        await call.gone()

    async with open_door(script) as door:
        client = await door.client()
        await client.post(b"/v1/completions")
        await door.engine.seen()
        door.server.cancel()
        await door.idle()
        assert door.journal.story == [("cancelled", "stopped", "supervisor", "running", "connection_closed")]


@in_trio
async def test_without_its_acceptance_on_record_a_request_is_refused():
    """Where the ledger is required and fails, the admitted request gets 503 with Retry-After, and the engine sees nothing."""
    async with open_door() as door:
        door.journal.fails = True
        client = await door.client()
        await client.post(b"/v1/chat/completions")
        head, body = await client.answer()
        assert head.startswith(b"HTTP/1.1 503")
        assert b"Retry-After: " in head
        assert json.loads(body)["error"]["code"] == "ledger_unavailable"
        await door.idle()
        assert door.journal.story == [("failed", "ledger_unavailable", "supervisor", "not_started", "none")]
        assert not door.engine.heads


@in_trio
async def test_a_fault_of_ours_ends_its_own_exchange_alone(monkeypatch: pytest.MonkeyPatch):
    """Of two requests whose acceptances were written together one meets a fault; the other is answered, and so is the next."""
    start, faults = Relay.start, iter([True])

    def fail_once(relay: Relay, engine: EngineLink) -> bool:
        if next(faults, False):
            engine.close()
            raise ZeroDivisionError
        return start(relay, engine)

    async with open_door() as door:
        clients = [await door.client(), await door.client()]
        for client in clients:  # so that there are idle connections to the engine, and nothing has to wait
            await client.post(b"/v1/completions")
        for client in clients:
            await client.answer()
        monkeypatch.setattr(Relay, "start", fail_once)
        for client in clients:
            await client.post(b"/v1/completions")
        assert await clients[0].to_end() == b""
        assert (await clients[1].answer())[0].startswith(b"HTTP/1.1 200")
        await clients[1].post(b"/v1/completions")
        assert (await clients[1].answer())[0].startswith(b"HTTP/1.1 200")
        await door.idle()
        told = [entry["exc_info"] for entry in door.log if entry["log_level"] == "error"]
        assert [type(fault) for fault in told] == [ZeroDivisionError]
        door.log.clear()
