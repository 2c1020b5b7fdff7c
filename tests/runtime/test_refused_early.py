"""Who is refused before admission is refused once, and nothing that was put off brings the request back."""

import pytest
import trio

from fakes.door import Client, Door, in_trio, open_door
from fakes.raw_engine import Call
from vllm_supervisor.core.address import UnixAddress
from vllm_supervisor.core.cors import Cors
from vllm_supervisor.core.front_door_settings import FrontDoorSettings
from vllm_supervisor.core.words import ClosedReason

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
SMALL = b"2\r\n{}\r\n0\r\n\r\n"
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n{}"


def open_again(door: Door) -> None:
    """Bring the engine up."""
    door.upstreams.point_at(UnixAddress(door.engine.path), 5.0)
    door.gate.reopen(ClosedReason.STARTING)


async def statuses(client: Client) -> list[bytes]:
    """Receive everything, and give the statuses of the answers in it."""
    with trio.fail_after(10):
        return [line.split()[1] for line in (await client.to_end()).split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


@in_trio
async def test_a_small_chunked_body_waits_for_admission_as_any_other():
    """With `hold`, a body that came whole with its head is held, not refused."""
    async with open_door(settings=FrontDoorSettings(hold=10.0), up=False) as door:
        client = await door.client()
        await client.send(CHUNKED + SMALL)
        await trio.testing.wait_all_tasks_blocked()
        open_again(door)
        assert (await client.answer())[0].startswith(b"HTTP/1.1 200 ")
        assert not door.journal.rejections


@in_trio
async def test_a_body_that_breaks_while_it_is_held_is_refused_for_good():
    """400 at once, and the rest of it is no request that could be admitted later."""
    async with open_door(settings=FrontDoorSettings(hold=10.0), up=False) as door:
        client = await door.client()
        await client.send(CHUNKED + b"zz\r\n")
        head, _ = await client.answer()
        assert head.startswith(b"HTTP/1.1 400 ")
        open_again(door)
        await client.send(SMALL)
        assert await statuses(client) == []
        assert len(door.journal.rejections) == 1
        assert not door.engine.heads


@in_trio
async def test_admission_that_closes_while_a_body_comes_holds_its_request():
    """`hold` counts for a request whose body was on its way as it does for a new one."""
    async with open_door(settings=FrontDoorSettings(hold=10.0)) as door:
        client = await door.client()
        await client.send(HALF)
        await trio.testing.wait_all_tasks_blocked()
        door.gate.close(ClosedReason.RESTARTING)
        await client.send(b"{}")
        await trio.testing.wait_all_tasks_blocked()
        assert not door.journal.rejections
        door.gate.reopen(ClosedReason.RESTARTING)
        assert (await client.answer())[0].startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("opens_again", [False, True])
@in_trio
async def test_work_that_was_put_off_does_not_outlive_a_refusal(opens_again: bool):
    """A large piece of chunks is read after admission has closed: one refusal, one entry, and nothing for the engine."""
    async with open_door() as door:
        client = await door.client()
        await client.send(CHUNKED)
        await trio.testing.wait_all_tasks_blocked()
        (exchange,) = door.front._desk.arriving
        exchange._buffer._feed(b"1000\r\n" + b"x" * 4096 + b"\r\n0\r\n\r\n")  # put off, as by a turn that is full
        door.gate.close(ClosedReason.RESTARTING)
        exchange._recheck()
        if opens_again:
            door.gate.reopen(ClosedReason.RESTARTING)
        assert await statuses(client) == [b"503"]
        assert len(door.journal.rejections) == 1
        assert not door.engine.heads


@in_trio
async def test_an_evicted_upload_is_counted():
    """Who made room for others reads 503, and stands among the refusals."""
    async with open_door(settings=FrontDoorSettings(max_connections=1)) as door:
        slow = await door.client()
        await slow.send(HALF)
        await trio.testing.wait_all_tasks_blocked()
        newcomer = await door.client()
        assert (await slow.answer())[0].startswith(b"HTTP/1.1 503 ")
        assert door.journal.rejections == [("completions", "saturated")]
        await newcomer.post(b"/v1/completions")
        assert (await newcomer.answer())[0].startswith(b"HTTP/1.1 200 ")


@in_trio
async def test_a_burst_at_the_limit_serves_as_many_as_it_evicts():
    """Idle connections make room one by one: each newcomer of a burst takes the place of one, and is served."""
    async with open_door(settings=FrontDoorSettings(max_connections=4)) as door:
        idle = [await door.client() for _ in range(4)]
        for client in idle:
            await client.get(b"/livez")
            await client.answer()
        burst = [await door.client() for _ in range(4)]
        for client in burst:
            await client.post(b"/v1/completions")
        assert [(await client.answer())[0].split()[1] for client in burst] == [b"200"] * 4


@pytest.mark.parametrize("line", [b"GET", b"TRACE"])
@pytest.mark.parametrize("origin", [b"x\nSet-Cookie: s=1", b"x\n\n<script>", b"x\ry", b"\xff", b"a b", b""])
@in_trio
async def test_a_broken_origin_is_never_repeated(line: bytes, origin: bytes):
    """A refusal of a broken head repeats no byte of it in its own."""
    async with open_door(settings=FrontDoorSettings(cors=Cors(("*",), credentials=True))) as door:
        client = await door.client()
        await client.send(line + b" / HTTP/1.1\r\nHost: a\r\nOrigin: " + origin + b"\r\n\r\n")
        head, _ = await client.answer()
        assert b"Access-Control-Allow-Origin" not in head
        assert b"Set-Cookie" not in head


@in_trio
async def test_a_request_that_may_have_been_read_is_not_sent_again():
    """An internal error on the engine's connection says nothing of what the engine has read: 502, not a second try."""

    async def script(call: Call) -> None:
        await call.request()
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await call.request()
        await call.gone()

    async with open_door(script, faults=True) as door:
        client = await door.client()
        await client.post(b"/v1/completions")
        await client.answer()
        await client.post(b"/v1/completions")
        await door.engine.seen(2)
        (connection,) = door.front._hall.connections
        connection._exchange._relay._engine.fail(RuntimeError("ours"))
        assert (await client.answer())[0].startswith(b"HTTP/1.1 502 ")
        assert door.engine.calls == 1
