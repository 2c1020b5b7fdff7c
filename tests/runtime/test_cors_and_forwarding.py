"""What browsers may read of our own answers, and what the engine is told of who asks."""

from fakes.door import in_trio, open_door
from fakes.raw_engine import answer_ok
from vllm_supervisor.core.cors import Cors
from vllm_supervisor.core.forwarding import Forwarding
from vllm_supervisor.core.front_door_settings import FrontDoorSettings

PAGE = b"https://chat.example.org"
ORIGIN = b"Origin: " + PAGE + b"\r\n"
ALLOWED = b"Access-Control-Allow-Origin: " + PAGE + b"\r\n"
SETTINGS = FrontDoorSettings(cors=Cors((PAGE.decode(),)), max_body=100)


@in_trio
async def test_our_own_answers_can_be_read_by_an_allowed_page():
    """Health, refusals before and after the head is understood, and failures all carry the fields."""
    async with open_door(settings=SETTINGS, up=False) as door:
        cases = [
            (b"GET /livez HTTP/1.1\r\nHost: a\r\n", b"200"),
            (b"GET /health HTTP/1.1\r\nHost: a\r\n", b"503"),
            (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n", b"503"),
            (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 101\r\n", b"413"),
            (b"POST /sleep HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n", b"403"),
            (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 0\r\n", b"400"),
        ]
        for request, status in cases:
            for origin, expected in ((ORIGIN, True), (b"", False)):
                client = await door.client()
                await client.send(request + origin + b"\r\n")
                head, _ = await client.answer()
                assert head.split()[1] == status, request
                assert (ALLOWED in head) == expected, request


@in_trio
async def test_saturated_and_failed_requests_can_be_read_too():
    """A 429 and a 502 carry the fields."""

    async def fail(call) -> None:
        await call.request()

    async with open_door(fail, settings=SETTINGS, limit=0) as door:
        client = await door.client()
        await client.post(b"/v1/completions", fields=ORIGIN)
        head, _ = await client.answer()
        assert head.split()[1] == b"429"
        assert ALLOWED in head
        door.gate.limit = 1
        client = await door.client()
        await client.post(b"/v1/completions", fields=ORIGIN)
        head, _ = await client.answer()
        assert head.split()[1] == b"502"
        assert ALLOWED in head


@in_trio
async def test_a_preflight_is_answered_while_the_engine_cannot():
    """A page can then read the 503 of the request itself; an engine that is up answers preflights itself."""
    ask = b"OPTIONS /v1/completions HTTP/1.1\r\nHost: a\r\n%bAccess-Control-Request-Method: POST\r\n\r\n" % ORIGIN
    async with open_door(settings=SETTINGS, up=False) as door:
        client = await door.client()
        await client.send(ask)
        head, body = await client.answer()
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert ALLOWED in head
        assert body == b"OK"
    async with open_door(answer_ok, settings=SETTINGS) as door:
        client = await door.client()
        await client.send(ask)
        await client.answer()
        assert len(door.engine.heads) == 1


@in_trio
async def test_without_vllms_options_nothing_is_added():
    """No origin is allowed by default, as with vLLM, so nothing is said."""
    async with open_door(up=False) as door:
        client = await door.client()
        await client.post(b"/v1/completions", fields=ORIGIN)
        head, _ = await client.answer()
        assert b"Access-Control" not in head
        assert b"Vary" not in head


@in_trio
async def test_the_engine_learns_who_asks():
    """A client's own word is replaced by its address, a trusted proxy's is passed on; each request anew."""
    said = b"X-Forwarded-For: 6.6.6.6\r\nX-FORWARDED-FOR: 198.51.100.9\r\nX-Forwarded-Proto: https\r\n"
    for trusted, expected in (
        ("10.0.0.1", b"X-Forwarded-For: 127.0.0.1\r\nX-Forwarded-Proto: http\r\n"),
        ("127.0.0.1", b"X-Forwarded-For: 198.51.100.9\r\nX-Forwarded-Proto: https\r\n"),
    ):
        async with open_door(settings=FrontDoorSettings(forwarding=Forwarding(trusted))) as door:
            client = await door.client()
            for fields in (said, b"", said):
                await client.post(b"/v1/completions", fields=fields)
                await client.answer()
            first, second, third = door.engine.heads
            assert first.replace(b"led-1", b"led-3") == third
            assert first.count(b"orwarded") == 2
            assert expected in first
            assert b"X-Forwarded-For: 127.0.0.1\r\nX-Forwarded-Proto: http\r\n" in second


@in_trio
async def test_metrics_are_fetched_with_the_clients_fields():
    """The engine sees the token and what is preferred, and nothing that would give less than a whole, plain page."""

    async def page(call) -> None:
        await call.head()
        body = b"# TYPE vllm:x gauge\nvllm:x 1\n# EOF\n"
        media = b"application/openmetrics-text; version=1.0.0; charset=utf-8"
        await call.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (media, len(body), body)
        )

    async with open_door(page) as door:
        client = await door.client()
        await client.get(
            b"/metrics?x=1",
            b"X-Token: t\r\nAccept: application/openmetrics-text\r\nAccept-Encoding: gzip\r\nRange: bytes=0-9\r\n"
            b"If-None-Match: *\r\nConnection: keep-alive\r\n",
        )
        head, body = await client.answer()
        assert b"Content-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n" in head
        assert body == b"# TYPE vllm:x gauge\nvllm:x 1\nvllm_supervisor_up 1\n# EOF\n"
        (asked,) = door.engine.heads
        assert asked.startswith(
            b"GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\nX-Token: t\r\nAccept: application/openmetrics-text\r\n"
        )
        assert b"X-Forwarded-For: 127.0.0.1\r\n" in asked
        for unwanted in (b"ncoding", b"ange", b"If-", b"keep-alive"):
            assert unwanted not in asked
