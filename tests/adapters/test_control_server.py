"""The control socket's server against callers that misbehave: each costs its own connection and nothing else."""

import json
import select
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import trio_test

from vllm_supervisor.adapters import control_server
from vllm_supervisor.adapters.control_server import Answer, Call

HUGE = "x" * (4 << 20)  # more than a Unix socket's buffers hold


class Endless:
    """A followed answer without an end."""

    def __aiter__(self) -> "Endless":
        return self

    async def __anext__(self) -> str:
        await trio.lowlevel.checkpoint()
        return HUGE


async def handler(call: Call) -> Answer:
    """Answer at once, with as much as is asked for."""
    match call.path:
        case "/endless":
            return Answer(200, stream=Endless())
        case "/huge":
            return Answer(200, HUGE)
        case _:
            return Answer(200, call.body)


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[trio.Nursery]:
    """Serve on `path`; a fault of the server is a fault of the test."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener:
        listener.bind(str(path))
        listener.listen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(control_server.serve, listener, handler, lambda fault: pytest.fail(repr(fault)))
            yield nursery
            nursery.cancel_scope.cancel()


async def ask(path: Path, target: bytes, body: bytes = b"") -> trio.SocketStream:
    """Send one request."""
    stream = await trio.open_unix_socket(str(path))
    await stream.send_all(b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (target, len(body), body))
    return stream


async def whole(stream: trio.SocketStream) -> bytes:
    """Read an answer to its end."""
    async with stream:
        return b"".join([data async for data in stream])


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a short path for a socket."""
    return tmp_path_factory.mktemp("c") / "control.sock"


@pytest.mark.parametrize(
    ("target", "body"),
    [(b"/x", b"[" * 60_000), (b"/x", b"{"), (b"/x", b"\xff"), (b"/x", b"[]"), (b"//[", b"")],
    ids=["deep", "torn", "no text", "no object", "no path"],
)
@trio_test
async def test_what_cannot_be_understood_is_refused(path: Path, target: bytes, body: bytes) -> None:
    """A target or body that is none is answered with 400, and the next caller is served."""
    with trio.fail_after(10):
        async with serving(path):
            assert (await whole(await ask(path, target, body))).startswith(b"HTTP/1.1 400 ")
            answer = await whole(await ask(path, b"/x", b'{"a": 1}'))
            assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"a": 1}


@pytest.mark.parametrize("target", [b"/huge", b"/endless"])
@trio_test
async def test_a_caller_that_takes_nothing_is_left(path: Path, target: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that nobody takes ends with its connection after the time limit, and the next caller is served."""
    monkeypatch.setattr(control_server, "WRITE_TIMEOUT", 0.05)
    with trio.fail_after(10):
        async with serving(path):
            stalled = await ask(path, target)
            await _until_hung_up(stalled)
            assert (await whole(await ask(path, b"/x"))).startswith(b"HTTP/1.1 200 ")
            await stalled.aclose()


async def _until_hung_up(stream: trio.SocketStream) -> None:
    """Wait for the server's end without taking what it sent."""
    with select.epoll() as poll:
        poll.register(stream.socket.fileno(), select.EPOLLRDHUP)
        await trio.lowlevel.wait_readable(poll.fileno())
