"""The control socket's server against callers that misbehave: each costs its own connection and nothing else."""

import contextlib
import errno
import json
import os
import resource
import select
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import trio_test

from vllm_supervisor.adapters import control_server
from vllm_supervisor.adapters.control_server import Answer, Call, Server, refusal

HUGE = "x" * (4 << 20)  # more than a Unix socket's buffers hold


class Served:
    """A server on a socket; `faults` are the internal errors it reported, `refused` what accept raised."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.faults: list[Exception] = []
        self.refused: list[OSError] = []
        self.asked: list[tuple[str, str]] = []
        self.streams = 0  # that are open

    async def handler(self, call: Call) -> Answer:
        """Answer at once, with as much as is asked for."""
        self.asked.append((call.method, call.path))
        match call.path:
            case "/endless":
                return Answer(200, stream=self._stream(HUGE))
            case "/follow":
                return Answer(200, stream=self._stream("x"))
            case "/wait":
                return Answer(200, later=self._later)
            case "/huge":
                return Answer(200, HUGE)
            case "/broken":
                raise KeyError(call.path)
            case "/no-json":
                return Answer(200, object())
            case "/breaks-later":
                return Answer(200, stream=self._breaking())
            case "/refused":
                return refusal(405, "no", ("Allow", "GET, HEAD"))
            case _:
                return Answer(200, call.body)

    async def _stream(self, value: str) -> AsyncGenerator[str]:
        self.streams += 1
        try:
            while True:
                yield value
                await trio.sleep(0 if value is HUGE else 3600)
        finally:
            self.streams -= 1

    @staticmethod
    async def _breaking() -> AsyncGenerator[str]:
        yield "first"
        raise KeyError("second")

    @staticmethod
    async def _later() -> Answer:
        await trio.sleep_forever()
        raise AssertionError

    async def whole(self, raw: bytes) -> bytes:
        """Send bytes and read the answer to its end."""
        async with await self.connect() as stream:
            await stream.send_all(raw)
            return await rest(stream)

    async def connect(self, raw: bytes = b"") -> trio.SocketStream:
        """Connect, and send bytes."""
        stream = await trio.open_unix_socket(str(self.path))
        if raw:
            await stream.send_all(raw)
        return stream

    async def expect_service(self) -> None:
        """Fail unless the next caller is answered."""
        answer = await self.whole(post(b"/x", b'{"a": 1}'))
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"a": 1}


@asynccontextmanager
async def serving(path: Path, *, faults: int = 0) -> AsyncIterator[Served]:
    """Serve on `path`; so many internal errors are expected."""
    served = Served(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener:
        listener.bind(str(path))
        listener.listen(512)
        server = Server(listener, served.handler, on_fault=served.faults.append, on_refused=served.refused.append)
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.run)
                yield served
                await served.expect_service()
                nursery.cancel_scope.cancel()
        assert len(served.faults) == faults, served.faults


def post(target: bytes, body: bytes = b"") -> bytes:
    """Write one request."""
    return b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (target, len(body), body)


async def rest(stream: trio.SocketStream) -> bytes:
    """Read to the end, however it comes."""
    data = bytearray()
    with contextlib.suppress(trio.BrokenResourceError):
        async for piece in stream:
            data += piece
    return bytes(data)


async def until(fact: Callable[[], bool]) -> None:
    """Wait for a fact; the limit is that of `serving`."""
    while not fact():  # noqa: ASYNC110 - many different facts, of which the server tells none
        await trio.sleep(0.01)


async def status(stream: trio.SocketStream) -> int:
    """Read the status line of an answer that goes on."""
    data = bytearray()
    while b"\r\n" not in data:
        piece = await stream.receive_some(1)
        assert piece, bytes(data)
        data += piece
    return int(data.split()[1])


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a short path for a socket."""
    return tmp_path_factory.mktemp("c") / "control.sock"


DEEP = b"[" * 60_000


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param(post(b"/x", DEEP), 400, id="deep"),
        pytest.param(post(b"/x", b'{"a":' * 10_000), 400, id="deep objects"),
        pytest.param(post(b"/x", b"{"), 400, id="truncated"),
        pytest.param(post(b"/x", b"\xff"), 400, id="no text"),
        pytest.param(post(b"/x", b"[]"), 400, id="no object"),
        pytest.param(post(b"/x", b"9" * 5000), 400, id="a number of 5000 digits"),
        pytest.param(post(b"//["), 400, id="no path"),
        pytest.param(post(b"/x", b" " * (64 * 1024 + 1)), 413, id="huge body"),
        pytest.param(b"GET /x HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 40_000 + b"\r\n\r\n", 431, id="huge head"),
        pytest.param(b"GET /" + b"y" * 40_000, 431, id="huge line"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, id="TLS"),
        pytest.param(b"hello\r\n\r\n", 400, id="no HTTP"),
        pytest.param(b"GET /x HTTP/1.1\r\n\r\n", 400, id="no host"),
        pytest.param(b"GET /x HTTP/x\r\nHost: a\r\n\r\n", 400, id="no version"),
        pytest.param(b"GET /x HTTP/1.1\nHost: a\n\n", 200, id="bare newlines"),
        pytest.param(b"GET /x HTTP/1.0\r\n\r\n", 200, id="HTTP/1.0"),
        pytest.param(b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, id="no chunk"),
        pytest.param(b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: x\r\n\r\n", 501, id="no coding"),
        pytest.param(b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n", 400, id="no length"),
        pytest.param(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 405, id="CONNECT"),
        pytest.param(b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", 200, id="OPTIONS"),
        pytest.param(b"GET http://h/x?n=%zz&=&&n HTTP/1.1\r\nHost: a\r\n\r\n", 200, id="absolute, bad query"),
        pytest.param(
            b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n", 200, id="upgrade"
        ),
        pytest.param(post(b"/x") + post(b"/x") * 20, 200, id="pipelined"),
        pytest.param(post(b"/x") + b"\0" * 1000, 200, id="more behind it"),
        pytest.param(b"\r\n\r\n" + post(b"/x"), 400, id="empty lines before it"),
        pytest.param(b"HEAD /x HTTP/1.1\r\nHost: a\r\n\r\n", 200, id="HEAD"),
        pytest.param(b"HEAD /refused HTTP/1.1\r\nHost: a\r\n\r\n", 405, id="refused HEAD"),
        pytest.param(b"HEAD /follow HTTP/1.1\r\nHost: a\r\n\r\n", 200, id="HEAD of a stream"),
        pytest.param(b"HEAD //[ HTTP/1.1\r\nHost: a\r\n\r\n", 400, id="bad HEAD"),
        pytest.param(b"HEAD /x HTTP/1.0\r\nContent-Length: 1\r\n\r\n{", 400, id="bad body of a HEAD"),
    ],
)
@trio_test
async def test_every_request_gets_one_answer(path: Path, raw: bytes, expected: int) -> None:
    """One answer with its status, a body unless it was HEAD, and then the connection ends; the next caller is served."""
    async with serving(path) as served:
        answer = await served.whole(raw)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert int(head.split()[1]) == expected, answer[:300]
        assert answer.count(b"HTTP/1.1 ") == 1
        if raw.startswith(b"HEAD"):
            assert body == b""
        else:
            assert len(body) == int(head.lower().split(b"content-length: ")[1].split()[0])
            json.loads(body)


@trio_test
async def test_a_caller_that_waits_for_a_continue_gets_it(path: Path) -> None:
    """The body of `Expect: 100-continue` is asked for."""
    async with serving(path) as served:
        head = b"POST /x HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
        async with await served.connect(head) as stream:
            assert await status(stream) == 100
            await stream.send_all(b"{}")
            assert b"HTTP/1.1 200 " in await rest(stream)


@trio_test
async def test_a_caller_that_closes_its_sending_side_gets_its_answer(path: Path) -> None:
    """A request piped into `nc -N` ends its half of the connection; a stream to it goes on, until it leaves."""
    async with serving(path) as served:
        async with await served.connect(post(b"/huge")) as stream:
            await stream.send_eof()
            assert len(await rest(stream)) > len(HUGE)
        async with await served.connect(b"GET /follow HTTP/1.1\r\nHost: a\r\n\r\n") as stream:
            await stream.send_eof()
            assert await status(stream) == 200
            with trio.move_on_after(2.5 * control_server.HANGUP_INTERVAL):
                await rest(stream)
            assert served.streams == 1
        await until(lambda: not served.streams)


@pytest.mark.parametrize(
    "raw",
    [b"", b"GET", b"GET /x HTTP/1.1\r\nHost: a\r\n", b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"],
)
@trio_test
async def test_a_request_that_does_not_arrive_is_timed_out(
    path: Path, raw: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head and body together have one time limit, and the caller is told."""
    monkeypatch.setattr(control_server, "READ_TIMEOUT", 0.05)
    async with serving(path) as served:
        assert (await served.whole(raw)).startswith(b"HTTP/1.1 408 ")
        monkeypatch.setattr(control_server, "READ_TIMEOUT", 5.0)


@pytest.mark.parametrize("target", [b"/huge", b"/endless"])
@trio_test
async def test_a_caller_that_takes_nothing_is_disconnected(
    path: Path, target: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that nobody takes ends with its connection after the time limit, and the next caller is served."""
    monkeypatch.setattr(control_server, "WRITE_TIMEOUT", 0.05)
    async with serving(path) as served:
        async with await served.connect(post(target)) as stalled:
            await _until_hung_up(stalled)
            await served.expect_service()
        await until(lambda: not served.streams)


@pytest.mark.parametrize(("target", "answered"), [(b"/broken", 500), (b"/no-json", None), (b"/breaks-later", 200)])
@trio_test
async def test_an_internal_error_ends_one_call(path: Path, target: bytes, answered: int | None) -> None:
    """It is reported once, the caller gets a 500 where nothing was sent yet, and the next caller is served."""
    async with serving(path, faults=1) as served:
        answer = await served.whole(post(target))
        assert answer.startswith(b"HTTP/1.1 %d " % answered if answered else b"")
        assert not answer.endswith(b"0\r\n\r\n")  # a stream that broke has no clean end


@trio_test
async def test_unread_followers_leave_room_for_short_calls(path: Path) -> None:
    """Followers beyond the limit are refused with the reason; when one leaves there is room again."""
    async with serving(path) as served, contextlib.AsyncExitStack() as open_ones:
        follow = b"GET /follow HTTP/1.1\r\nHost: a\r\n\r\n"
        first = await served.connect(follow)
        for _ in range(control_server.MAX_FOLLOWERS - 1):
            await open_ones.enter_async_context(await served.connect(follow))
        await until(lambda: served.streams == control_server.MAX_FOLLOWERS)
        for _ in range(2 * control_server.MAX_CALLS):
            refused = await served.whole(follow)
            assert refused.startswith(b"HTTP/1.1 429 ")
            assert b"callers are following, which is the limit" in refused
            await served.expect_service()
        await first.aclose()
        await until(lambda: served.streams < control_server.MAX_FOLLOWERS)
        assert await status(await open_ones.enter_async_context(await served.connect(follow))) == 200


@trio_test
async def test_waiting_calls_leave_room_for_short_calls(path: Path) -> None:
    """The same for calls that wait, which followers do not count against."""
    async with serving(path) as served, contextlib.AsyncExitStack() as open_ones:
        for _ in range(control_server.MAX_WAITING):
            await open_ones.enter_async_context(await served.connect(post(b"/wait")))
        await until(lambda: served.asked.count(("POST", "/wait")) == control_server.MAX_WAITING)
        assert (await served.whole(post(b"/wait"))).startswith(b"HTTP/1.1 429 ")
        assert await status(await open_ones.enter_async_context(await served.connect(post(b"/follow")))) == 200
        await served.expect_service()


@trio_test
async def test_half_open_calls_are_closed_to_make_room(path: Path) -> None:
    """Three hundred of them, and every call in between is answered; the oldest of them are gone, the newest are not."""
    async with serving(path) as served, contextlib.AsyncExitStack() as open_ones:
        streams = []
        for number in range(300):
            raw = (b"", b"GE", b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n{")[number % 3]
            streams.append(await open_ones.enter_async_context(await served.connect(raw)))
            if number % 30 == 0:
                await served.expect_service()
        assert await rest(streams[0]) == b""
        await streams[-1].send_all(b"}   ")
        assert (await rest(streams[-1])).startswith(b"HTTP/1.1 200 ")


@trio_test
async def test_callers_that_break_off_anywhere_cost_nothing(path: Path) -> None:
    """Whether before, in or after the request, or while its answer streams."""
    async with serving(path) as served:
        for raw in (post(b"/x", b"{}"), post(b"/huge"), post(b"/endless"), post(b"/wait")):
            for end in (0, 1, len(raw) // 2, len(raw)):
                stream = await served.connect(raw[:end])
                await trio.lowlevel.checkpoint()
                await stream.aclose()
        await until(lambda: not served.streams)


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    """Let this process open no further descriptor."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@trio_test
async def test_a_call_gets_in_when_no_descriptor_is_left(path: Path) -> None:
    """The reserve lets call after call in; it is reported once, and once more after it was over."""
    async with serving(path) as served:
        await served.expect_service()
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(6)]
        with no_descriptors_left():
            for sock in waiting:
                sock.settimeout(10)
                sock.connect(str(path))
                sock.sendall(post(b"/x", b"{}"))
                assert (await trio.to_thread.run_sync(sock.recv, 4096)).startswith(b"HTTP/1.1 200 ")
                sock.close()
        assert {fault.errno for fault in served.refused} == {errno.EMFILE}
        assert len(served.refused) <= len(waiting)
        await served.expect_service()


async def _until_hung_up(stream: trio.SocketStream) -> None:
    """Wait for the server's end without taking what it sent."""
    with select.epoll() as poll:
        poll.register(stream.socket.fileno(), select.EPOLLRDHUP)
        await trio.lowlevel.wait_readable(poll.fileno())
