"""Between admission and the engine stands the ledger: no byte goes before the acceptance is in the file."""

import socket
import struct
from collections.abc import Callable

import pytest
import trio
import trio.testing

from fakes.door import Client, Door, in_trio, open_door
from fakes.raw_engine import Call, answer_ok, ok
from vllm_supervisor.core.address import UnixAddress
from vllm_supervisor.core.admission import OpenRequest
from vllm_supervisor.core.front_door_settings import FrontDoorSettings
from vllm_supervisor.core.words import ClosedReason, Cut
from vllm_supervisor.runtime.link import Link

ACCEPTED = b"HTTP/1.1 200"


async def warm(door: Door) -> Client:
    """Have one request answered, so that an idle connection to the engine waits."""
    client = await door.client()
    await client.post(b"/v1/embeddings")
    assert (await client.answer())[0].startswith(ACCEPTED)
    return client


async def seen(door: Door, count: int) -> None:
    """Wait until so many acceptances wait for the disk."""
    while door.gate.in_flight < count:
        await trio.lowlevel.checkpoint()


@in_trio
async def test_nothing_goes_to_the_engine_before_the_acceptance():
    """Although a connection to the engine is idle, and the request is whole."""
    async with open_door() as door:
        client = await warm(door)
        door.journal.hold = trio.Event()
        await client.post(b"/v1/completions")
        await seen(door, 1)
        with trio.move_on_after(0.1):
            await door.engine.seen(2)
        assert len(door.engine.heads) == 1
        door.journal.hold.set()
        assert (await client.answer())[0].startswith(ACCEPTED)


@in_trio
async def test_requests_that_come_together_share_a_write():
    """The acceptances of all that is served at once are one write."""
    async with open_door() as door:
        clients = [await door.client() for _ in range(20)]
        for client in clients:
            await client.get(b"/livez")
            await client.answer()
        for client in clients:
            client.sock._sock.send(
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"
            )  # no checkpoint
        for client in clients:
            assert (await client.answer())[0].startswith(ACCEPTED)
        assert len(door.journal.accepted_ids) == 20
        assert door.journal.writes == 1


@pytest.mark.parametrize("how", ["leaves", "cut", "deadline"])
@in_trio
async def test_an_end_while_the_disk_is_waited_for(how: str):
    """It is accounted for once, without waiting for the disk, and nothing of it goes to the engine."""
    settings = FrontDoorSettings(request_deadline=0.1) if how == "deadline" else FrontDoorSettings()
    async with open_door(settings=settings) as door:
        client = await warm(door)
        door.journal.hold = trio.Event()
        await client.post(b"/v1/completions")
        while not door.journal.hold.statistics().tasks_waiting:
            await trio.lowlevel.checkpoint()
        if how == "leaves":
            await client.close()
        elif how == "cut":
            door.gate.cut_all(Cut.DRAIN_DEADLINE)
        await door.idle()
        door.journal.hold.set()
        await trio.testing.wait_all_tasks_blocked()
        assert len(door.journal.story) == 2
        assert door.journal.story[1][0] == "cancelled"
        assert door.journal.story[1][3] == "not_started"
        assert len(door.engine.heads) == 1


@in_trio
async def test_an_end_before_the_disk_is_waited_for_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    """A request that is cut before anything of it could be recorded gives its place back, and stands in no ledger."""
    async with open_door() as door:
        client = await warm(door)

        def refuse_and_cut(_request: OpenRequest, told: Callable[[bool], None]) -> None:
            told(False)
            door.gate.cut_all(Cut.DRAIN_DEADLINE)

        monkeypatch.setattr(door.journal, "accept", refuse_and_cut)
        await client.post(b"/v1/completions")
        assert (await client.answer())[0].startswith(b"HTTP/1.1 503")
        await door.idle()
        assert len(door.journal.story) == 1
        assert len(door.engine.heads) == 1


@in_trio
async def test_a_client_that_resets_behind_expect_leaves_nothing_behind():
    """It is noticed when 100 Continue is sent: the request is not admitted, and stands in no ledger."""
    async with open_door() as door:
        await warm(door)
        client = await door.client()
        await client.get(b"/livez")
        await client.answer()
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sock._sock.send(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 10\r\n\r\n"
        )
        client.sock.close()
        while door.front.connections > 1:
            await trio.lowlevel.checkpoint()
        assert len(door.journal.entered) == 1
        await warm(door)
        assert len(door.engine.heads) == 2


@in_trio
async def test_a_stop_between_admission_and_record_gives_the_place_back():
    """A held request is admitted and cannot be recorded at once, and in that moment the front door is taken down."""
    async with open_door(settings=FrontDoorSettings(hold=5.0), up=False) as door:
        door.journal.hold = trio.Event()
        client = await door.client()
        await client.post(b"/v1/completions")
        while not door.front.connections:
            await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked()
        door.gate.on_admit(door.server.cancel)
        door.upstreams.point_at(UnixAddress(door.engine.path), 5.0)
        door.gate.reopen(ClosedReason.STARTING)
        assert await client.to_end() == b""
        assert door.gate.in_flight == 0
        assert not door.journal.outcomes


@in_trio
async def test_a_held_client_that_leaves_as_admission_opens_is_not_admitted():
    """Both happen before its task has its turn: it gets no place, and the engine nothing."""
    async with open_door(settings=FrontDoorSettings(hold=5.0), up=False) as door:
        client = await door.client()
        await client.post(b"/v1/completions")
        while not door.front.connections:
            await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked()
        (connection,) = door.front._hall.connections
        door.upstreams.point_at(UnixAddress(door.engine.path), 5.0)
        door.gate.reopen(ClosedReason.STARTING)
        connection._link._end(clean=True)  # as the pump does at a FIN
        assert await client.to_end() != b""  # its refusal, in case it still reads
        assert door.gate.counts.accepted == 0
        assert not door.engine.heads


@in_trio
async def test_a_fault_of_the_books_keeps_no_place(monkeypatch: pytest.MonkeyPatch):
    """The exchange is over, a drain does not wait for it, and its client may go on."""
    async with open_door() as door:
        with monkeypatch.context() as patch:
            patch.setattr(door.journal, "ended", lambda *_what: {}["no such id"])
            client = await door.client()
            await client.post(b"/v1/completions")
            assert (await client.answer())[0].startswith(ACCEPTED)
            await door.idle()
        await client.post(b"/v1/completions")
        assert (await client.answer())[0].startswith(ACCEPTED)
        assert [type(entry["exc_info"]) for entry in door.log if entry["log_level"] == "error"] == [KeyError]
        door.log.clear()


@pytest.mark.parametrize("known", [False, True])
@in_trio
async def test_a_client_that_breaks_in_the_write_of_its_answer_says_nothing_of_the_engine(
    known: bool, monkeypatch: pytest.MonkeyPatch
):
    """A background response runs on, whatever became of the connection to its client."""

    async def script(call: Call) -> None:
        while True:
            await call.request()
            await call.send(ok(b'{"id":"resp_1","status":"in_progress","background":true}'))

    async with open_door(script) as door:
        if known:
            client = await door.client()
            await client.post(b"/v1/responses")
            await client.answer()
        write = Link.write

        def broken(link: Link, data: bytes) -> int:
            if data.startswith(ACCEPTED) and b"X-Ledger-Id" in data:
                link.sock.shutdown(socket.SHUT_RDWR)  # the next send fails
            return write(link, data)

        monkeypatch.setattr(Link, "write", broken)
        client = await door.client()
        await client.post(b"/v1/responses")
        assert await client.to_end() == b""
        await door.idle()
        assert door.journal.story[-1] == ("cancelled", "client_left", "client", "running", "connection_closed")


@in_trio
async def test_acceptances_that_fail_come_again_one_by_one():
    """A turn whose write fails refuses each of its requests, and the connections live on."""
    async with open_door(answer_ok) as door:
        client = await warm(door)
        door.journal.fails = True
        await client.post(b"/v1/completions")
        assert (await client.answer())[0].startswith(b"HTTP/1.1 503")
        door.journal.fails = False
        assert (await warm(door)) is not client
