"""A small HTTP server whose every answer is scripted: what a test of a client needs, and nothing of vLLM."""

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import trio

from vllm_supervisor.core.address import TcpAddress


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Script:
    """`answer(seen)` gives (status, body), raw bytes to send as they are, or an awaitable of either."""

    answer: Callable[[Seen], object]
    seen: list[Seen] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)  # paths whose client left before its answer
    arrived: trio.Event = field(default_factory=trio.Event)
    left: trio.Event = field(default_factory=trio.Event)

    def count(self, method: str) -> int:
        """How many requests of this method arrived."""
        return sum(1 for one in self.seen if one.method == method)


async def _serve(script: Script, stream: trio.abc.Stream) -> None:
    if isinstance(stream, trio.SSLStream):
        try:
            await stream.do_handshake()
        except trio.BrokenResourceError:
            # trio keeps the alert that says why; servers on a socket send it.
            await stream.transport_stream.send_all(stream._outgoing.read())
            await stream.transport_stream.aclose()
            return
    async with stream:
        data = b""
        while b"\r\n\r\n" not in data:
            more = await stream.receive_some()
            if not more:
                return
            data += more
            if data[0] == 0x16:  # a TLS handshake, to which servers of plain HTTP say this
                await stream.send_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
                return
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        method, path, _version = first.split(" ")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        while len(body) < int(headers.get("content-length", "0")):
            body += await stream.receive_some()
        seen = Seen(method, path, headers, body)
        script.seen.append(seen)
        script.arrived.set()
        answer = script.answer(seen)
        if isinstance(answer, Awaitable):
            async with trio.open_nursery() as nursery:

                async def watch() -> None:
                    """Notice a client that leaves while its answer is prepared."""
                    if not await stream.receive_some():
                        script.gone.append(path)
                        script.left.set()
                        nursery.cancel_scope.cancel()

                nursery.start_soon(watch)
                answer = await answer
                nursery.cancel_scope.cancel()
            if path in script.gone:
                return
        if isinstance(answer, bytes):
            await stream.send_all(answer)
            return
        status, text = answer  # type: ignore[misc]
        payload = text.encode()
        await stream.send_all(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(payload)) + payload)


@asynccontextmanager
async def serving(
    answer: Callable[[Seen], object], tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[Script, TcpAddress]]:
    """Serve `answer` on a free loopback port for as long as the block lasts, over TLS if there is a context."""
    script = Script(answer)
    async with trio.open_nursery() as nursery:
        plain = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = plain[0].socket.getsockname()[1]
        listeners = plain if tls is None else [trio.SSLListener(one, tls, https_compatible=True) for one in plain]
        await nursery.start(partial(trio.serve_listeners, partial(_serve, script), listeners))
        yield script, TcpAddress("127.0.0.1", port)
        nursery.cancel_scope.cancel()


def mounted(
    path: str, *, work: object = (200, '{"choices": []}'), health: object = (200, "")
) -> Callable[[Seen], object]:
    """Answer like vLLM with one inference path mounted: `work` is its answer to a POST."""

    def answer(seen: Seen) -> object:
        if seen.path == "/health":
            return health
        if seen.path == "/v1/models":
            return 200, '{"data": [{"id": "tiny"}]}'
        if seen.path == path:
            return (405, "") if seen.method == "GET" else work
        return 404, ""

    return answer
