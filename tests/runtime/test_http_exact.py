"""HTTP/1.1 to the letter: expectations, old clients, HEAD, pipelining, framing of every kind, early answers, tunnels."""

import json

import pytest
import trio
import trio.testing

from fakes.door import Client, in_trio, open_door
from fakes.raw_engine import LAST_CHUNK, STREAM_HEAD, Call, chunk, event, ok, token
from vllm_supervisor.core.front_door_settings import FrontDoorSettings
from vllm_supervisor.core.words import Cut


@in_trio
async def test_expect_is_answered_by_us_after_admission():
    """100 Continue comes from the front door, the engine never sees the expectation, and the body follows."""

    async def script(call: Call) -> None:
        head, body = await call.request()
        assert b"expect" not in head.lower()
        await call.send(ok(body))

    async with open_door(script) as door:
        client = await door.client()
        await client.send(
            b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
        )
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"hello")
        assert (await client.answer())[1] == b"hello"


@pytest.mark.parametrize("up", [False, True])
@in_trio
async def test_expect_is_refused_before_the_body_is_sent(up: bool):
    """A request that is not admitted, or too large, gets its final answer instead of 100 Continue."""
    async with open_door(up=up, settings=FrontDoorSettings(max_body=10)) as door:
        client = await door.client()
        length = 11 if up else 5
        await client.send(
            b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % length
        )
        head, _ = await client.answer()
        assert head.startswith(b"HTTP/1.1 413 " if up else b"HTTP/1.1 503 ")


@in_trio
async def test_old_client_gets_a_plain_body_that_ends_with_the_connection():
    """HTTP/1.0: no chunks, `Connection: close`, and the end of the connection ends the answer."""

    async def script(call: Call) -> None:
        await call.request()
        await call.send(STREAM_HEAD + token() + token(b"b", b'"stop"') + event(b"[DONE]") + LAST_CHUNK)
        await call.gone()

    async with open_door(script) as door:
        client = await door.client()
        await client.send(b"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\n{}")
        head = await client.until(b"\r\n\r\n")
        assert b"chunked" not in head.lower()
        assert b"Connection: close\r\n" in head
        body = await client.to_end()
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")
        await door.idle()
        assert door.journal.outcomes[0].outcome == "completed"


@in_trio
async def test_old_client_learns_of_a_broken_answer_by_a_reset():
    """Where only the connection's end ends an answer, a broken one ends with a reset after the error event."""

    async def script(call: Call) -> None:
        await call.request()
        await call.send(STREAM_HEAD + token())

    async with open_door(script) as door:
        client = await door.client()
        await client.send(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
        with pytest.raises(trio.BrokenResourceError):
            await client.to_end()
        assert b'"code": "engine_failed"' in client.unread


@in_trio
async def test_head_has_no_body_whatever_its_fields_say():
    """HEAD passes the engine's length without a body, and the connection serves the next request."""

    async def script(call: Call) -> None:
        await call.request()
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n")
        await call.gone()

    async with open_door(script) as door:
        client = await door.client()
        await client.send(b"HEAD /v1/models HTTP/1.1\r\nHost: a\r\n\r\nGET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"Content-Length: 500\r\n" in await client.until(b"\r\n\r\n")
        assert json.loads((await client.answer())[1])["status"] == "ok"


@in_trio
async def test_pipelined_requests_are_served_in_order():
    """Many requests in one write, of every framing, are answered in order, each once."""

    async def script(call: Call) -> None:
        while True:
            head = await call.head()
            if b"chunked" in head:
                body = (await call.read_until(b"0\r\n\r\n")).split(b"\r\n")[1]
            elif b"Content-Length" in head:
                body = await call.read(2)
            else:
                body = head.split(b" ")[1]
            await call.send(ok(body))

    async with open_door(script) as door:
        client = await door.client()
        await client.send(
            b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nAA"
            b"POST /b HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nBB\r\n0\r\n\r\n"
            b"GET /c HTTP/1.1\r\nHost: a\r\n\r\n"
            b"\r\nGET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
            b"POST /d HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nD"
        )
        assert [(await client.answer())[1] for _ in range(3)] == [b"AA", b"BB", b"/c"]
        assert json.loads((await client.answer())[1])["status"] == "ok"
        await client.send(b"D")
        assert (await client.answer())[1] == b"D" + b"D"


@in_trio
async def test_pipelining_without_end_waits_in_the_kernel():
    """While one request is served, what is pipelined behind it is bounded; the client is made to wait."""
    go = trio.Event()

    async def script(call: Call) -> None:
        await call.request()
        await go.wait()
        await call.send(ok(b"{}"))
        await call.gone()

    async with open_door(script) as door:
        client = await door.client()
        await client.post(b"/v1/completions")
        await door.engine.seen()
        sent = 0
        with trio.move_on_after(0.5):
            while True:
                await client.send(b"G" * 65536)
                sent += 65536
        assert sent < 32 * 1024 * 1024
        go.set()
        assert (await client.answer())[1] == b"{}"
        assert (await client.answer())[0].startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    ("raw", "status", "body"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"204", b""),
        (b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n", b"304", b""),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n", b"103", b""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n", b"204", b""),
    ],
)
@in_trio
async def test_answers_without_body_and_interim_ones(raw: bytes, status: bytes, body: bytes):
    """204, 304 and 1xx have no body; interim answers pass, a 100 of the engine does not; the connection is kept."""

    async def script(call: Call) -> None:
        await call.request()
        await call.send(raw)
        await call.gone()

    async with open_door(script) as door:
        client = await door.client()
        await client.get(b"/v1/models")
        head = await client.until(b"\r\n\r\n")
        assert head.split(b" ")[1] == status
        assert b"ontent-" not in head
        if status == b"103":
            assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")
        await client.get(b"/livez")
        assert (await client.answer())[0].startswith(b"HTTP/1.1 200")


@in_trio
async def test_answer_that_ends_with_the_connection_is_given_an_end():
    """A body without length becomes chunked, so its end can be told from a break."""

    async def script(call: Call) -> None:
        await call.request()
        await call.send(b"HTTP/1.1 200 OK\r\n\r\nhel")
        await call.send(b"lo")

    async with open_door(script) as door:
        client = await door.client()
        await client.post(b"/v1/embeddings")
        rest = await client.until(LAST_CHUNK)
        assert b"Transfer-Encoding: chunked\r\n" in rest
        await client.get(b"/livez")
        assert (await client.answer())[0].startswith(b"HTTP/1.1 200")
        assert door.journal.outcomes[0].outcome == "completed"


@in_trio
async def test_trailers_pass():
    """The trailer section of an answer reaches the client."""

    async def script(call: Call) -> None:
        await call.request()
        await call.send(STREAM_HEAD + chunk(b"x") + b"0\r\nX-Sum: 1\r\n\r\n")
        await call.gone()

    async with open_door(script) as door:
        client = await door.client()
        await client.post(b"/v1/embeddings")
        assert (await client.until(b"X-Sum: 1\r\n\r\n")).endswith(b"1\r\nx\r\n0\r\nX-Sum: 1\r\n\r\n")


@pytest.mark.parametrize("surplus", [b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", b"junk", b"\x00"])
@in_trio
async def test_bytes_beyond_an_answer_never_reach_a_client(surplus: bytes):
    """A second answer or junk behind the first is dropped with its connection; the next request gets its own."""

    async def script(call: Call) -> None:
        head, _ = await call.request()
        await call.send(ok(head.split(b" ")[1]) + (surplus if b"/a" in head else b""))
        await call.gone()

    async with open_door(script) as door:
        client = await door.client()
        for path in (b"/a", b"/b"):
            await client.post(path)
            assert (await client.answer())[1] == path
        assert door.engine.calls == 2


_EVIL = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"


@pytest.mark.parametrize("pause", [False, True], ids=["one read", "two reads"])
@pytest.mark.parametrize(
    ("method", "first", "rest"),
    [
        (b"POST", b"HTTP/1.1 200 OK\r\nX-New: 1\r\nContent-Length: 2\r\n\r\nab", b"ab"),
        (b"POST", STREAM_HEAD + event(b"{}") + LAST_CHUNK, event(b"{}") + LAST_CHUNK),
        (b"POST", STREAM_HEAD + chunk(b"ab") + b"0\r\nA: b\r\n\r\n", chunk(b"ab") + b"0\r\nA: b\r\n\r\n"),
        (b"POST", b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"POST", b"HTTP/1.1 204 No Content\r\nContent-Length: 45\r\n\r\n", b""),
        (b"GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 45\r\n\r\n", b""),
        (b"HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 45\r\n\r\n", b""),
    ],
    ids=["length", "stream", "trailer", "204", "204 with length", "304", "HEAD"],
)
@in_trio
async def test_the_rest_of_a_read_with_an_answer_is_dropped_and_logged(
    method: bytes, first: bytes, rest: bytes, pause: bool
):
    """The client reads what was declared and then its next answer; the connection is not reused, one line tells it."""

    async def script(call: Call) -> None:
        if door.engine.calls == 3:
            await call.request()
            await call.send(ok(b"mine"))
            await call.gone()
        await call.request()
        if pause:
            await call.send(first[:20])
            await trio.testing.wait_all_tasks_blocked(0.01)
        await call.send(first[20 * pause :] + _EVIL)
        await call.gone()

    async with open_door(script) as door:
        client = await door.client()
        for _ in range(2):
            await client.send(method + b" /x HTTP/1.1\r\nHost: a\r\n\r\n")
            await client.until(b"\r\n\r\n")
            assert await client.exactly(len(rest)) == rest
        await client.post(b"/x")
        assert (await client.answer())[1] == b"mine"
        assert door.engine.calls == 3
        lines = [entry for entry in door.log if entry["log_level"] == "warning"]
        assert [sorted(entry) for entry in lines] == [["event", "log_level", "times"]]
        assert lines[0]["event"].startswith("the engine sent bytes behind the end of an answer")


@pytest.mark.parametrize("status", [b"000", b"099", b"199", b"600", b"0200", b"2000", b"101"])
@in_trio
async def test_a_status_that_http_does_not_know_is_the_engines_failure(status: bytes):
    """The client reads 502, and the request has failed."""

    async def script(call: Call) -> None:
        await call.request()
        await call.send(b"HTTP/1.1 %b X\r\nContent-Length: 2\r\n\r\nno" % status)
        await call.gone()

    async with open_door(script) as door:
        client = await door.client()
        await client.post(b"/v1/completions")
        head, body = await client.answer()
        assert head.startswith(b"HTTP/1.1 502 ")
        assert b"engine_failed" in body
        await door.idle()
        assert door.journal.story[0][:3] == ("failed", "engine_failed", "engine")


def whole(number: int, kind: str, body: bytes) -> bytes:
    """Build an answer whose head was seen before, or never, or one that comes in chunks."""
    if kind == "known":
        return ok(body)
    if kind == "new":
        return b"HTTP/1.1 200 OK\r\nX-Number: %d\r\nContent-Length: %d\r\n\r\n%b" % (number, len(body), body)
    return STREAM_HEAD + chunk(body) + LAST_CHUNK


async def taken(client: Client, kind: str) -> bytes:
    """Receive the body of such an answer."""
    if kind != "chunked":
        return (await client.answer())[1]
    await client.until(b"\r\n\r\n")
    body = await client.exactly(int(await client.until(b"\r\n"), 16))
    assert await client.until(LAST_CHUNK) == b"\r\n" + LAST_CHUNK
    return body


@pytest.mark.parametrize("kind", ["known", "new", "chunked"])
@in_trio
async def test_bytes_beyond_an_answer_that_a_client_is_slow_to_take_drop_the_connection(kind: str):
    """They come while the whole answer still waits for room: neither this answer nor the next request is given them."""
    many, blocked = 200, trio.Event()
    paths = [b"/%03d" % number for number in range(many)]

    async def script(call: Call) -> None:
        while True:
            with trio.move_on_after(10 if blocked.is_set() else 0.5):
                head, _ = await call.request()
                path = head.split(b" ")[1]
                await call.send(whole(int(path[1:]), kind, path * 10_000))
                continue
            await call.send(ok(b"evil"))  # no further request comes: the client takes no more
            blocked.set()
            await call.gone()
            return

    async with open_door(script) as door:
        client = await door.client()
        client.sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 128 * 1024)
        for path in paths:
            await client.post(path)
        await blocked.wait()
        for path in paths:
            assert await taken(client, kind) == path * 10_000
        assert door.engine.calls == 2


@in_trio
async def test_unsolicited_bytes_on_an_idle_connection_drop_it():
    """What the engine says unasked is not taken for the next answer."""
    speak, spoken = trio.Event(), trio.Event()

    async def script(call: Call) -> None:
        head, _ = await call.request()
        await call.send(ok(head.split(b" ")[1]))
        if b"/a" in head:
            await speak.wait()
            await call.send(ok(b"evil"))
            await call.gone()
            spoken.set()
        else:
            await call.gone()

    async with open_door(script) as door:
        client = await door.client()
        await client.post(b"/a")
        await client.answer()
        speak.set()
        await spoken.wait()
        await client.post(b"/b")
        assert (await client.answer())[1] == b"/b"


@in_trio
async def test_idle_engine_connection_that_the_engine_closed_is_not_used():
    """A connection the engine has closed meanwhile is dropped; the next request opens another."""

    async def script(call: Call) -> None:
        await call.request()
        await call.send(ok(b"{}"))

    async with open_door(script) as door:
        client = await door.client()
        for _ in range(3):
            await client.post(b"/v1/embeddings")
            assert (await client.answer())[0].startswith(b"HTTP/1.1 200")
        assert door.engine.calls == 3


@in_trio
async def test_nothing_is_sent_twice():
    """An engine that closes after it read a request gets it once: 502, never a retry."""

    async def script(call: Call) -> None:
        await call.request()
        if door.engine.calls == 1 and len(door.engine.heads) == 1:
            await call.send(ok(b"{}"))
            await call.request()

    async with open_door(script) as door:
        client = await door.client()
        await client.post(b"/v1/embeddings")
        await client.answer()
        await client.post(b"/v1/embeddings")
        assert (await client.answer())[0].startswith(b"HTTP/1.1 502")
        assert len(door.engine.heads) == 2


@in_trio
async def test_early_answer_is_read_by_a_client_that_still_uploads():
    """An engine that answers before it has read the body: the client gets the answer, and may finish sending."""

    async def script(call: Call) -> None:
        await call.head()
        await call.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno")

    async with open_door(script) as door:
        client = await door.client()
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 50000000\r\n\r\n")
        for _ in range(50):
            await client.send(b"x" * 1000000)
        head, body = await client.answer()
        assert head.startswith(b"HTTP/1.1 413 Too Large\r\n")
        assert b"Connection: close\r\n" in head
        assert body == b"no"
        assert await client.to_end() == b""
        await door.idle()
        assert door.journal.story == [("completed", "client_error", "engine", "completed", "answer")]


@in_trio
async def test_websocket_is_a_tunnel_that_counts_as_one_request():
    """After 101 bytes pass both ways unread; the engine's end completes the request."""

    async def script(call: Call) -> None:
        head = await call.head()
        assert b"Connection: upgrade\r\nUpgrade: websocket\r\n" in head
        await call.send(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nhi")
        assert await call.read(8) == b"\x00early" + b"\r\n"
        await call.send(b"\x81\x00GET / HTTP/1.1\r\n\r\n")
        assert await call.read(3) == b"bye"

    async with open_door(script) as door:
        client = await door.client()
        await client.send(
            b"GET /v1/realtime HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n\x00early"
        )
        head = await client.until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
        assert b"Connection: upgrade\r\nUpgrade: websocket\r\n" in head
        assert b"X-Ledger-Id: led-1\r\n" in head
        assert await client.exactly(2) == b"hi"
        assert door.gate.in_flight == 1
        await client.send(b"\r\n")
        assert await client.exactly(20) == b"\x81\x00GET / HTTP/1.1\r\n\r\n"
        await client.send(b"bye")
        assert await client.to_end() == b""
        await door.idle()
        (outcome,) = door.journal.outcomes
        assert (outcome.outcome, outcome.request_class, outcome.status) == ("completed", "realtime", 101)


@pytest.mark.parametrize("how", ["leave", "cut"])
@in_trio
async def test_tunnel_ends_with_its_client_or_with_the_drain(how: str):
    """A client that goes, or a cut, closes the engine's side at once."""
    closed = trio.Event()

    async def script(call: Call) -> None:
        await call.head()
        await call.send(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        await call.gone()
        closed.set()

    async with open_door(script) as door:
        client = await door.client()
        await client.send(b"GET /v1/realtime HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        await client.until(b"\r\n\r\n")
        if how == "leave":
            await client.close()
        else:
            door.gate.cut_all(Cut.DRAIN_DEADLINE)
            assert await client.to_end() == b""
        await closed.wait()
        await door.idle()
        assert door.journal.outcomes[0].why == ("client_left" if how == "leave" else "drain_deadline")


@in_trio
async def test_refused_upgrade_is_an_ordinary_answer():
    """An engine that answers an upgrade with a status passes like any other; its connection is not used again."""

    async def script(call: Call) -> None:
        await call.head()
        await call.send(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno")
        await call.gone()

    async with open_door(script) as door:
        client = await door.client()
        await client.send(b"GET /v1/realtime HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert (await client.answer())[1] == b"no"
        await client.get(b"/livez")
        assert (await client.answer())[0].startswith(b"HTTP/1.1 200")
        await client.get(b"/x")  # the engine's connection may be another protocol's by now
        assert (await client.answer())[1] == b"no"
        assert door.engine.calls == 2


@in_trio
async def test_unasked_upgrade_is_the_engines_fault():
    """A 101 nobody asked for is a 502."""

    async def script(call: Call) -> None:
        await call.request()
        await call.send(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        await call.gone()

    async with open_door(script) as door:
        client = await door.client()
        await client.post(b"/v1/completions")
        assert (await client.answer())[0].startswith(b"HTTP/1.1 502")


@in_trio
async def test_error_event_after_half_an_event_begins_a_new_one():
    """A stream cut in the middle of an event gets the error as an event of its own; Anthropic's is named."""

    async def script(call: Call) -> None:
        await call.request()
        await call.send(STREAM_HEAD + chunk(b'data: {"half'))

    async with open_door(script) as door:
        client = await door.client()
        await client.post(b"/v1/messages")
        rest = await client.to_end()
        assert b'data: {"half\r\n' in rest
        assert b"\n\nevent: error\ndata: {" in rest


@in_trio
async def test_empty_lines_before_a_request_are_forgiven():
    """A stray CRLF between two requests is no request."""
    async with open_door() as door:
        client = await door.client()
        await client.send(b"\r\nGET /livez HTTP/1.1\r\nHost: a\r\n\r\n\r\n\r\nGET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
        assert [(await client.answer())[0][:12] for _ in range(2)] == [b"HTTP/1.1 200"] * 2
