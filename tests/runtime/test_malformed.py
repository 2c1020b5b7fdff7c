"""Requests that two servers could read differently: each is answered with an error and a close, and goes no further."""

import pytest
import trio

from fakes.door import in_trio, open_door
from fakes.malformed import CHUNKED, MALFORMED
from fakes.raw_engine import Call, ok


async def _answer(call: Call) -> None:
    await call.head()
    await call.send(ok(b"{}"))


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED.keys())
@in_trio
async def test_malformed_request_is_refused_and_the_engine_sees_nothing(raw: bytes):
    """The answer is a 4xx that closes; no connection to the engine is made, no place is held."""
    async with open_door(_answer) as door:
        client = await door.client()
        await client.send(raw)
        head, _ = await client.answer()
        assert head.split(b" ", 2)[1] in {b"400", b"405", b"413", b"417"}
        assert b"Connection: close\r\n" in head
        await client.close()
        await door.idle()
        assert door.engine.calls == 0


@in_trio
async def test_broken_chunk_later_in_a_body_ends_the_request():
    """A body that breaks after the engine saw its beginning: 400, and the engine's connection is closed."""
    closed = trio.Event()

    async def script(call: Call) -> None:
        await call.head()
        await call.gone()
        closed.set()

    async with open_door(script) as door:
        client = await door.client()
        await client.send(CHUNKED + b"14000\r\n" + b"x" * 0x14000 + b"\r\n")
        await door.engine.seen()
        await client.send(b"zz\r\n")
        head, _ = await client.answer()
        assert head.startswith(b"HTTP/1.1 400 ")
        await closed.wait()
        await client.close()
        await door.idle()
        assert door.journal.story == [("cancelled", "bad_request", "supervisor", "running", "connection_closed")]


@in_trio
async def test_smuggled_second_request_is_not_read():
    """After a refusal nothing else on that connection is served."""
    async with open_door(_answer) as door:
        client = await door.client()
        await client.send(MALFORMED["length and chunked"] + b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
        await client.answer()
        await client.stream.send_eof()
        assert await client.to_end() == b""
        assert door.engine.calls == 0
