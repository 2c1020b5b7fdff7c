"""A stream that comes in a torrent is read less often and loses nothing; any other is read at once."""

import re
import socket
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from fakes.door import Client, in_trio, open_door
from fakes.raw_engine import LAST_CHUNK, STREAM_HEAD, Call, event, token
from vllm_supervisor.adapters.http1 import AnswerHeads, RequestHeads
from vllm_supervisor.core.admission import OpenRequest
from vllm_supervisor.core.forwarding import UNKNOWN
from vllm_supervisor.core.front_door_settings import FrontDoorSettings
from vllm_supervisor.core.words import RequestClass
from vllm_supervisor.runtime.link import Link
from vllm_supervisor.runtime.pump import DOZE_S, Pump
from vllm_supervisor.runtime.relay import Relay

MANY = 50_000  # events: so many are never needed
FEW = 100


class Rig:
    """One link in a pump of its own; `peer` is the other end."""

    def __init__(self) -> None:
        self.pump = Pump(now=trio.current_time, on_fault=lambda fault: pytest.fail(str(fault)))
        sock, self.peer = socket.socketpair()
        sock.setblocking(False)
        self.link = Link(self.pump, sock, patient=True)
        self.told: list[tuple[float, object]] = []
        self.link.on_bytes = self.note
        self.link.on_gone = self.note

    def note(self, what: object) -> None:
        """Keep what the link told, and when."""
        self.told.append((trio.current_time(), what))

    def close(self) -> None:
        """Close all of it."""
        self.link.close()
        self.peer.close()
        self.pump.close()


@pytest.fixture
def in_rig() -> Callable[..., None]:
    """Run an async test with a rig whose pump runs, on a clock that stands still while anybody has something to do."""

    def run(test: Callable[[Rig], object]) -> None:
        async def main() -> None:
            rig = Rig()
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(rig.pump.run)
                    await test(rig)
                    nursery.cancel_scope.cancel()
            finally:
                rig.close()

        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.02))

    return run


def test_bytes_gather_while_a_link_dozes(in_rig):
    """What comes while a link dozes is read at its end, in one piece."""

    async def test(rig: Rig) -> None:
        began = trio.current_time()
        rig.link.doze()
        rig.peer.send(b"one ")
        await trio.sleep(DOZE_S / 3)
        rig.peer.send(b"two")
        await trio.sleep(DOZE_S)
        assert [what for _, what in rig.told] == [b"one two"]
        assert rig.told[0][0] == pytest.approx(began + DOZE_S)

    in_rig(test)


def test_all_that_doze_are_woken_together(in_rig):
    """One wake-up serves every link that dozes, also one that came later."""

    async def test(rig: Rig) -> None:
        woken: list[float] = []
        rig.pump.doze(lambda: woken.append(trio.current_time()))
        await trio.sleep(DOZE_S / 2)
        rig.pump.doze(lambda: woken.append(trio.current_time()))
        await trio.sleep(DOZE_S)
        assert len(woken) == 2
        assert len(set(woken)) == 1

    in_rig(test)


def test_a_doze_ends_no_pause(in_rig):
    """Who paused a link before its doze was over still has it paused afterwards."""

    async def test(rig: Rig) -> None:
        rig.link.doze()
        rig.link.pause()
        rig.peer.send(b"one")
        await trio.sleep(DOZE_S * 3)
        assert not rig.told
        rig.link.resume()
        await trio.sleep(DOZE_S)
        assert [what for _, what in rig.told] == [b"one"]

    in_rig(test)


@pytest.mark.parametrize(("who", "told"), [("peer", [b"last", True]), ("link", [])])
def test_an_end_while_a_link_dozes(in_rig, who: str, told: list[object]):
    """A peer that sends and closes loses nothing; of a link that we close nothing is told, its descriptor may be another's."""

    async def test(rig: Rig) -> None:
        rig.link.doze()
        rig.peer.send(b"last")
        getattr(rig, who).close()
        await trio.sleep(DOZE_S * 2)  # on a clock of the test's own
        assert [what for _, what in rig.told] == told

    in_rig(test)


def line(number: int) -> bytes:
    """Build one event's payload."""
    return b'{"n":%d,"choices":[{"index":0,"text":"a","finish_reason":null}]}' % number


def numbers(stream: bytes) -> list[int]:
    """List the numbers of the events in a stream, as they came."""
    return [int(number) for number in re.findall(rb'"n":(\d+)', stream)]


class StubLink:
    """A link without a socket: takes everything, and counts how often it was told to doze."""

    outbox = b""
    peer = UNKNOWN
    deaf = ended = closed = reused = False

    def __init__(self) -> None:
        self.dozes = 0

    def write(self, data: bytes) -> int:
        """Take all of it."""
        return len(data)

    def doze(self) -> None:
        """Count."""
        self.dozes += 1

    def pause(self) -> None:
        """Go on."""

    resume = close = pause


def test_a_torrent_that_goes_on_is_read_twice_a_doze():
    """Sixteen close events begin it; then what has gathered and one more, close behind it, show that it goes on."""
    pump = SimpleNamespace(now=100.0)
    settings = FrontDoorSettings()
    desk = SimpleNamespace(settings=settings, pump=pump, heads=AnswerHeads(), closing=lambda: False)
    request = OpenRequest("r-1", RequestClass.COMPLETIONS, pump.now)
    raw = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n"
    head = RequestHeads(settings.max_body).read(raw)
    engine = StubLink()
    relay = Relay(desk, StubLink(), head, request, over=lambda: None, resend=lambda: None, ledgered=True)
    relay.begin(b"{}")
    relay.start(engine)
    engine.on_bytes(STREAM_HEAD)

    def events_until_it_dozes() -> int:
        before = engine.dozes
        for number in range(100):
            if engine.dozes > before:
                return number
            engine.on_bytes(event(line(number)))
            pump.now += 0.0005
        raise AssertionError("it never dozes")

    read = []
    for _ in range(4):
        read.append(events_until_it_dozes())
        pump.now += DOZE_S
    assert read == [17, 2, 2, 2]
    pump.now += 0.002  # slower, as tokens come
    for number in range(100):
        engine.on_bytes(event(line(number)))
        pump.now += 0.002
    assert engine.dozes == 4


async def stream_through(produce: Callable[[Call], Awaitable[int]]) -> None:
    """Pass the events that `produce` sends; it returns how many there were. Each must arrive, in order."""
    sent = 0

    async def script(call: Call) -> None:
        nonlocal sent
        await call.request()
        await call.send(STREAM_HEAD)
        sent = await produce(call)
        await call.send(token(finish=b'"stop"') + event(b"[DONE]") + LAST_CHUNK)
        await call.gone()

    async with open_door(script) as door:
        client: Client = await door.client()
        await client.post(b"/v1/completions", b'{"stream":true}')
        assert numbers(await client.until(b"0\r\n\r\n")) == list(range(sent))
        await door.idle()
        assert [outcome.outcome for outcome in door.journal.outcomes] == ["completed"]


@pytest.fixture
def dozes(monkeypatch) -> list[Link]:
    """Every link that was told to doze."""
    told: list[Link] = []
    doze = Link.doze

    def noted(link: Link) -> None:
        told.append(link)
        doze(link)

    monkeypatch.setattr(Link, "doze", noted)
    return told


@in_trio
async def test_a_torrent_dozes_and_arrives_whole(dozes):
    """Event upon event with hardly a pause: after a while they are gathered, and each arrives, in order."""

    async def produce(call: Call) -> int:
        def torrent() -> int:
            for number in range(MANY):
                if len(dozes) >= 3:
                    return number
                call.send_now(event(line(number)))
                time.sleep(0.0001)
            return MANY

        return await trio.to_thread.run_sync(torrent)

    await stream_through(produce)
    assert len(dozes) >= 3


@in_trio
async def test_tokens_of_an_engine_never_wait(dozes):
    """Events 2 ms apart, 500 tokens a second for one stream, are passed on at once, every one."""

    async def produce(call: Call) -> int:
        for number in range(FEW):
            await call.send(event(line(number)))
            await trio.sleep(0.002)
        return FEW

    await stream_through(produce)
    assert not dozes
