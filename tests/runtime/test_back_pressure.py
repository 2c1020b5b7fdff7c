"""Slow readers on either side cost a bounded buffer and lose nothing."""

import hashlib

import trio

from fakes.door import in_trio, open_door
from fakes.raw_engine import Call, chunk, ok

MANY = 48 * 1024 * 1024
# What the kernel may hold between three parties on loopback, with room to spare; far below MANY.
HELD = 24 * 1024 * 1024
BLOCK = bytes(range(256)) * 4096


@in_trio
async def test_upload_waits_for_the_engine():
    """An engine that does not read stops the client; once it reads, every byte arrives."""
    go = trio.Event()
    digest = hashlib.sha256()

    async def script(call: Call) -> None:
        await call.head()
        await go.wait()
        for _ in range(MANY // len(BLOCK)):
            digest.update(await call.read(len(BLOCK)))
        await call.send(ok(b"{}"))

    async with open_door(script) as door:
        client = await door.client()
        sent = 0
        finished = trio.Event()

        async def upload() -> None:
            nonlocal sent
            await client.send(b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % MANY)
            for _ in range(MANY // len(BLOCK)):
                await client.send(BLOCK)
                sent += len(BLOCK)
            finished.set()

        door.nursery.start_soon(upload)
        await door.engine.seen()
        with trio.move_on_after(0.5):
            await finished.wait()
        assert sent < HELD
        go.set()
        assert (await client.answer())[1] == b"{}"
        assert digest.digest() == hashlib.sha256(BLOCK * (MANY // len(BLOCK))).digest()


@in_trio
async def test_answer_waits_for_the_client():
    """A client that does not read stops the engine; once it reads, every byte arrives."""
    sent = 0
    finished = trio.Event()

    async def script(call: Call) -> None:
        nonlocal sent
        await call.request()
        await call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(MANY // len(BLOCK)):
            await call.send(chunk(BLOCK))
            sent += len(BLOCK)
        await call.send(b"0\r\n\r\n")
        finished.set()
        await call.gone()

    async with open_door(script) as door:
        client = await door.client()
        await client.post(b"/v1/audio/transcriptions")
        await client.until(b"\r\n\r\n")
        with trio.move_on_after(0.5):
            await finished.wait()
        assert sent < HELD
        digest = hashlib.sha256()
        while size := int(await client.until(b"\r\n"), 16):
            digest.update(await client.exactly(size))
            await client.exactly(2)
        assert digest.digest() == hashlib.sha256(BLOCK * (MANY // len(BLOCK))).digest()
        await door.idle()
        assert door.journal.outcomes[0].bytes == MANY
