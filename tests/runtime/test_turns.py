"""Nobody waits long: what a turn of the pump may take, who goes first, and that no client is forgotten."""

import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import trio
import trio.testing

from fakes.door import in_trio, open_door
from fakes.raw_engine import Call, ok
from vllm_supervisor.runtime import connection
from vllm_supervisor.runtime.connection import Connection
from vllm_supervisor.runtime.link import Link
from vllm_supervisor.runtime.pump import BATCH_S, READABLE, Pump

COST = 0.001  # seconds a handler takes, on a clock that only they move


class Rig:
    """A pump on a clock of its own, with sockets that are always ready."""

    def __init__(self) -> None:
        self.time = 0.0
        self.pump = Pump(
            now=lambda: self.time,
            on_fault=lambda fault: pytest.fail(str(fault)),
            begin_turn=lambda: self.turns.append(0),
        )
        self.served: list[int] = []  # of all turns
        self.turns: list[int] = []  # how many were served in each
        self.passes = 0  # of trio, in which the rest of the program has its turn
        self.pairs: list[tuple[socket.socket, socket.socket]] = []

    def add(self, cost: float = COST) -> int:
        """Add one that is ready, and costs so much each time; return its number."""
        number, pair = len(self.pairs), socket.socketpair()
        self.pairs.append(pair)
        pair[1].send(b"x")

        def handle(_events: int) -> None:
            self.time += cost
            self.served.append(number)
            self.turns[-1] += 1

        self.pump.add(pair[0].fileno(), READABLE, handle)
        return number

    async def run(self, turns: int) -> None:
        """Let the pump have so many turns, or one more."""
        until = len(self.turns) + turns
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.pump.run)
            while len(self.turns) < until:
                await trio.lowlevel.checkpoint()
                self.passes += 1
            nursery.cancel_scope.cancel()

    def close(self) -> None:
        """Close all of it."""
        self.pump.close()
        for pair in self.pairs:
            for sock in pair:
                sock.close()


@contextmanager
def rig() -> Iterator[Rig]:
    """Give a rig that is closed afterwards."""
    one = Rig()
    try:
        yield one
    finally:
        one.close()


@in_trio
async def test_a_turn_ends_in_time_and_nobody_is_left_out():
    """With 200 sockets always ready, each turn ends at its bound, and all of them are served before long."""
    with rig() as one:
        for _ in range(200):
            one.add()
        await one.run(100)
        assert max(one.turns) <= BATCH_S / COST + 2
        assert one.passes >= len(one.turns) - 1
        counts = Counter(one.served)
        assert len(counts) == 200
        first = {number: one.served.index(number) for number in counts}
        assert max(first.values()) < 600


@in_trio
async def test_a_newcomer_goes_first():
    """Who asks for the first time is served within two turns, while all others have had theirs and want more."""
    with rig() as one:
        for _ in range(200):
            one.add()
        await one.run(60)
        newcomer = one.add()
        await one.run(2)
        assert newcomer in one.served


@in_trio
async def test_what_is_queued_has_half_of_each_turn():
    """A stream of newcomers does not keep out what waits already."""
    with rig() as one:
        for _ in range(100):
            one.add()
        await one.run(1)
        waiting = set(range(100)) - set(one.served)
        for _ in range(60):
            for _ in range(10):
                one.add()
            await one.run(1)
        assert waiting <= set(one.served)


@in_trio
async def test_one_that_takes_too_long_ends_its_turn():
    """After a call that goes beyond the bound no other follows in the same turn, but one of the queue."""
    with rig() as one:
        for _ in range(10):
            one.add(cost=1.0)
        await one.run(10)
        assert max(one.turns) <= 2
        assert set(one.served) == set(range(10))


@in_trio
async def test_work_that_was_put_off_is_done_in_order_and_by_turns():
    """Deferred work runs behind the sockets that are ready, a turn's worth at a time, and wakes a pump that sleeps."""
    with rig() as one:
        done: list[int] = []

        def work(number: int) -> Callable[[], None]:
            def do() -> None:
                one.time += COST * 4
                done.append(number)

            return do

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.pump.run)
            await trio.testing.wait_all_tasks_blocked()
            for number in range(10):
                one.pump.defer(work(number))
            passes = 0
            while len(done) < 10:
                await trio.lowlevel.checkpoint()
                passes += 1
            nursery.cancel_scope.cancel()
        assert done == list(range(10))
        assert passes >= 3


@in_trio
async def test_a_descriptor_that_was_queued_and_forgotten_is_not_served():
    """Closed before its turn comes, and its number given to another socket: nobody is called for it."""
    with rig() as one:
        for _ in range(100):
            one.add()
        await one.run(1)
        (queued,) = list(set(range(100)) - set(one.served))[:1]
        one.pump.forget(one.pairs[queued][0].fileno())
        await one.run(60)
        assert queued not in one.served


class _Counted(bytearray):
    """An inbox that counts the bytes it searches and copies."""

    total = 0

    def find(self, sub: bytes, begin: int = 0) -> int:  # type: ignore[override]
        _Counted.total += len(self) - begin
        return super().find(sub, begin)

    def count(self, sub: bytes, begin: int = 0) -> int:  # type: ignore[override]
        _Counted.total += len(self) - begin
        return super().count(sub, begin)

    def __getitem__(self, where: slice) -> bytearray:  # type: ignore[override]
        piece = super().__getitem__(where)
        _Counted.total += len(piece)
        return piece


class _NoLink:
    """A client's link without a socket; `sent` is what went out."""

    closed = ended = False
    outbox = b""

    def __init__(self) -> None:
        self.sent = b""
        self.work: list[Callable[[], None]] = []

    def defer(self, work: Callable[[], None]) -> None:
        """Keep it."""
        self.work.append(work)

    def write(self, data: bytes) -> None:
        self.sent += data

    def pause(self) -> None:
        """Go on."""

    resume = close = pause


@pytest.mark.parametrize("empty", [0, 10])
@in_trio
async def test_a_head_in_single_bytes_is_searched_once(monkeypatch: pytest.MonkeyPatch, empty: int):
    """A head of 60 kB, a byte at a time, costs a few searched bytes for each, whatever has come already."""
    monkeypatch.setattr(connection, "bytearray", _Counted, raising=False)
    head = b"\r\n" * empty + b"GET /livez HTTP/1.1\r\nHost: a\r\n" + (b"X: " + b"x" * 995 + b"\r\n") * 60 + b"\r\n"
    async with open_door() as door:
        link = _NoLink()
        Connection(door.front._hall, link, health_only=False)
        _Counted.total = 0
        for at in range(len(head)):
            assert not link.sent
            link.on_bytes(head[at : at + 1])
        link.work.pop()()  # a head as large as this waits
        assert link.sent.startswith(b"HTTP/1.1 200 ")
    assert _Counted.total <= 9 * len(head)


@pytest.mark.parametrize("cut", ["\r", "\n", "\rx", "\r\n\r", "\r\r\n", "x\n"])
@in_trio
async def test_a_broken_line_end_is_found_wherever_it_is_cut(cut: str):
    """A bare CR or LF in a head is refused as soon as it is complete, a byte at a time as at once."""
    good = b"GET /livez HTTP/1.1\r\nHost: a"
    bad = cut.encode()
    broken = cut in {"\n", "\rx", "\r\r\n", "x\n"}
    async with open_door() as door:
        for step in (1, 100):
            link = _NoLink()
            Connection(door.front._hall, link, health_only=False)
            data = good + bad
            for at in range(0, len(data), step):
                link.on_bytes(data[at : at + step])
            assert link.sent.startswith(b"HTTP/1.1 400 ") is broken, link.sent


@pytest.mark.parametrize(("lines", "status"), [(10, b"200"), (11, b"400")])
@pytest.mark.parametrize("step", [1, 3, 1000])
@in_trio
async def test_empty_lines_before_a_request_are_counted(lines: int, status: bytes, step: int):
    """Ten are forgiven, eleven are refused, before each request and however they are cut."""
    async with open_door() as door:
        client = await door.client()
        await client.get(b"/livez")
        await client.answer()
        data = b"\r\n" * lines + b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
        for at in range(0, len(data), step):
            await client.send(data[at : at + step])
            await trio.lowlevel.checkpoint()
        assert (await client.answer())[0].split(b" ")[1] == status


@in_trio
async def test_pipelined_requests_are_served_some_at_a_time():
    """Of a hundred requests that come at once sixteen are answered, and the next sixteen when the pump has time again."""
    async with open_door() as door:
        link = _NoLink()
        Connection(door.front._hall, link, health_only=False)
        link.on_bytes(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n" * 100)
        answered = [link.sent.count(b"HTTP/1.1 200 ")]
        while link.work:
            link.work.pop()()
            answered.append(link.sent.count(b"HTTP/1.1 200 "))
        assert answered == [16, 32, 48, 64, 80, 96, 100]


@pytest.mark.parametrize("size", [100, 100_000])
@in_trio
async def test_chunks_that_are_read_later_arrive_whole_and_in_order(size: int):
    """A chunked body in pieces of every size, with a request behind it: the engine gets just its bytes, then the next."""
    text = b"".join(b"%06d " % number for number in range(size // 7))
    bodies: list[bytes] = []

    async def script(call: Call) -> None:
        for _ in range(2):
            await call.head()
            body = b""
            while True:
                length = int(await call.read_until(b"\r\n"), 16)
                data = await call.read(length + 2)
                if not length:
                    break
                body += data[:-2]
            bodies.append(body)
            await call.send(ok(b"{}"))
        await call.gone()

    raw = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(
        b"5\r\n%b\r\n" % text[at : at + 5] for at in range(0, len(text) // 5 * 5, 5)
    )
    raw += b"0\r\n\r\n"
    async with open_door(script) as door:
        client = await door.client()
        await client.send(raw + raw[:1000])
        assert (await client.answer())[1] == b"{}"
        await client.send(raw[1000:])
        assert (await client.answer())[1] == b"{}"
    assert bodies == [text[: len(text) // 5 * 5]] * 2


@in_trio
async def test_a_fault_in_deferred_work_ends_its_connection_alone():
    """It is logged as a fault of ours, the connection is closed, and the pump goes on."""
    faults: list[Exception] = []
    pump = Pump(now=trio.current_time, on_fault=faults.append)
    ours, peer = socket.socketpair()
    ours.setblocking(False)
    link = Link(pump, ours, patient=False)
    done = trio.Event()

    def fail() -> None:
        raise ValueError("a fault")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pump.run)
        link.defer(fail)
        link.defer(fail)  # closed by then
        pump.defer(done.set)
        await done.wait()
        nursery.cancel_scope.cancel()
    assert [str(fault) for fault in faults] == ["a fault"]
    assert link.closed
    peer.close()
    pump.close()
