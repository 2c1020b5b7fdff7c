"""A request that met a connection just as the engine closed it is sent again, unless the engine could do it twice."""

import itertools
import socket

import pytest
import trio

from fakes.door import in_trio, open_door
from fakes.raw_engine import Call, Script, ok
from vllm_supervisor.adapters.upstream import Upstreams
from vllm_supervisor.core.address import TcpAddress
from vllm_supervisor.runtime.engine_links import EngineLinks
from vllm_supervisor.runtime.pump import Pump

POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 7\r\n\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
BODY = b'{"n":1}'


def closes(at: dict[int, int], *, how: str) -> Script:
    """Script an engine that ends connections without an answer: `at` maps their number to that of a request, from 1.

    They end before that request is read, within it, or after all of it; every other request is answered.
    """
    numbers = itertools.count(1)

    async def script(call: Call) -> None:
        number = next(numbers)
        for served in itertools.count(1):
            if at.get(number) == served:
                await call.arrived()
                if how == "read":
                    await call.request()
                elif how == "half read":
                    await call.read_some(20)
                return
            await call.request()
            await call.send(ok(b'{"choices":[{"finish_reason":"stop"}]}'))

    return script


@pytest.mark.parametrize(
    ("request_bytes", "how", "status", "connections", "execution"),
    [
        (POST + BODY, "unread", b"200", 2, "completed"),
        (POST + BODY, "half read", b"200", 2, "completed"),
        (POST + BODY, "read", b"502", 1, "running"),
        (GET, "unread", b"200", 2, None),
        (GET, "read", b"200", 2, None),
    ],
    ids=["POST unread", "POST half read", "POST read", "GET unread", "GET read"],
)
@in_trio
async def test_what_is_sent_again(request_bytes: bytes, how: str, status: bytes, connections: int, execution: str):
    """What the engine has not read to its end is sent again, and what it has read only if it merely asks."""
    async with open_door(closes({1: 2}, how=how)) as door:
        client = await door.client()
        await client.send(GET)
        await client.answer()
        await client.send(request_bytes)
        head, _ = await client.answer()
        assert head.split()[1] == status
        assert door.engine.calls == connections
        await door.idle()
        assert [states[3] for states in door.journal.story] == [execution] * (execution is not None)


@pytest.mark.parametrize(("at", "connections"), [({1: 2, 2: 1}, 2), ({1: 1}, 1)], ids=["again", "new"])
@in_trio
async def test_a_new_connection_gets_one_try(at: dict[int, int], connections: int):
    """An engine that ends a new connection has failed, and the request it has not read was not begun."""
    async with open_door(closes(at, how="unread")) as door:
        client = await door.client()
        if connections == 2:
            await client.send(GET)
            await client.answer()
        await client.send(POST + BODY)
        head, _ = await client.answer()
        assert head.split()[1] == b"502"
        assert door.engine.calls == connections


@in_trio
async def test_a_body_on_its_way_is_not_sent_again():
    """A request whose body is still coming cannot be sent from its beginning."""
    async with open_door(closes({1: 2}, how="unread")) as door:
        client = await door.client()
        await client.send(GET)
        await client.answer()
        await client.send(b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: 500000\r\n\r\n" + b"x" * 100_000)
        head, _ = await client.answer()
        assert head.split()[1] == b"502"
        assert door.engine.calls == 1


@pytest.mark.parametrize("read", [False, True])
def test_tcp_tells_what_its_peer_has_not_read(read: bool):
    """A TCP peer that had closed before the bytes came has not read them, though its end looks like a clean one."""
    pump = Pump(now=lambda: 0.0, on_fault=lambda fault: pytest.fail(str(fault)))

    async def connect(port: int) -> None:
        upstreams = Upstreams()
        upstreams.point_at(TcpAddress("127.0.0.1", port), 5.0)
        ends: list[bool] = []
        link = await EngineLinks(pump, upstreams, lambda: 0.0, lambda: None).connect()
        link.on_gone = ends.append
        theirs, _ = listener.accept()
        if read:
            link.write(b"request")
            theirs.recv(100)
            theirs.close()
        else:
            theirs.close()
            await trio.lowlevel.wait_readable(link.sock)
            link.write(b"request")
        await trio.lowlevel.wait_readable(link.sock)
        link._receive()
        assert ends == [True]
        assert link.refused is not read
        link.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        trio.run(connect, listener.getsockname()[1])
    pump.close()
