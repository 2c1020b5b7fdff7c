"""The whole front door under damaged clients and damaged engines: no fault of ours, no place held, service goes on."""

import random

import trio

from fakes.door import Door, in_trio, open_door
from fakes.raw_engine import LAST_CHUNK, STREAM_HEAD, Call, event, ok, token

GOOD = [
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /v1/realtime HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
]
ANSWERS = [
    ok(b'{"choices":[]}'),
    STREAM_HEAD + token() + token(b"b", b'"stop"') + event(b"[DONE]") + LAST_CHUNK,
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\n\r\nto the end",
]


def _damaged(rng: random.Random, raw: bytes) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.randrange(3)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randrange(1, len(data) + 1)] if rng.random() < 0.3 else data)


@in_trio
async def test_damaged_clients_and_engines():
    """Four hundred clients send damaged requests and leave at random; the engine damages its answers and does too."""
    rng = random.Random(5)

    async def script(call: Call) -> None:
        while True:
            await call.head()
            answer = _damaged(rng, rng.choice(ANSWERS))
            for start in range(0, len(answer), 40):
                await call.send(answer[start : start + 40])
            if rng.random() < 0.3:
                return

    async def client(door: Door, limit: trio.CapacityLimiter) -> None:
        async with limit:
            one = await door.client()
            try:
                for _ in range(rng.randrange(1, 4)):
                    await one.send(_damaged(rng, rng.choice(GOOD)))
                with trio.move_on_after(rng.random() * 0.05):
                    await one.to_end()
            except trio.BrokenResourceError:
                pass
            await one.close()

    async with open_door(script) as door:
        limit = trio.CapacityLimiter(20)
        async with trio.open_nursery() as nursery:
            for _ in range(400):
                nursery.start_soon(client, door, limit)
        await door.idle()
        last = await door.client()
        await last.get(b"/livez")
        assert (await last.answer())[0].startswith(b"HTTP/1.1 200 ")


@in_trio
async def test_two_hundred_clients_that_vanish_at_random_moments():
    """However they go, every place is given back and every engine connection in use is closed."""
    rng = random.Random(6)
    open_calls = 0

    async def script(call: Call) -> None:
        nonlocal open_calls
        open_calls += 1
        try:
            await call.request()
            await call.send(STREAM_HEAD)
            while True:
                await call.send(token())
                await trio.sleep(0.001)
        finally:
            open_calls -= 1

    async def client(door: Door) -> None:
        one = await door.client()
        await one.post(b"/v1/completions")
        with trio.move_on_after(rng.random() * 0.3):
            await one.to_end()
        await one.close()

    async with open_door(script, limit=1000) as door:
        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(client, door)
        await door.idle()
        assert {outcome.why for outcome in door.journal.outcomes} <= {"client_left"}
        while open_calls:
            await trio.lowlevel.checkpoint()
