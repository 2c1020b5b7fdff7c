"""An engine that does on its socket exactly what a test tells it to, byte by byte.

A test gives one script, an async function; it runs once for each connection the front door opens, with the `Call` that
stands for it. What it does not answer stays unanswered; a script that returns closes its connection.
"""

import contextlib
import os
import select
import socket
import struct
from collections.abc import Awaitable, Callable

import trio

OK_JSON = (
    b"HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 1970 00:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: %d\r\n"
    b"content-type: application/json\r\n\r\n%b"
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"


def ok(body: bytes) -> bytes:
    """Build a whole JSON answer as uvicorn sends it."""
    return OK_JSON % (len(body), body)


def chunk(data: bytes) -> bytes:
    """Wrap `data` as one chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(payload: bytes) -> bytes:
    """Wrap `payload` as one event of a stream, in one chunk."""
    return chunk(b"data: " + payload + b"\n\n")


def token(text: bytes = b"a", finish: bytes = b"null") -> bytes:
    """Build the event of one completions token."""
    return event(b'{"choices":[{"index":0,"text":"%b","finish_reason":%b}]}' % (text, finish))


class Call:
    """One connection as the engine sees it."""

    def __init__(self, engine: "RawEngine", stream: trio.SocketStream) -> None:
        """Begin with nothing read."""
        self._engine = engine
        self._stream = stream
        self._unread = b""

    async def head(self) -> bytes:
        """Read the next request head, with its empty line; raises EOFError when the front door is gone."""
        while b"\r\n\r\n" not in self._unread:
            await self._more()
        head, _, self._unread = self._unread.partition(b"\r\n\r\n")
        self._engine.saw(head + b"\r\n\r\n")
        return head + b"\r\n\r\n"

    async def request(self) -> tuple[bytes, bytes]:
        """Read the next whole request that has a length, as head and body."""
        head = await self.head()
        length = 0
        for line in head.split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        return head, await self.read(length)

    async def read(self, size: int) -> bytes:
        """Read exactly `size` bytes."""
        while len(self._unread) < size:
            await self._more()
        data, self._unread = self._unread[:size], self._unread[size:]
        return data

    async def read_some(self, most: int) -> bytes:
        """Read at most `most` bytes that have arrived, and leave the rest with the kernel."""
        return await self._stream.socket.recv(most)

    async def read_until(self, end: bytes) -> bytes:
        """Read up to and with `end`."""
        while end not in self._unread:
            await self._more()
        data, _, self._unread = self._unread.partition(end)
        return data + end

    async def _more(self) -> None:
        data = await self._stream.receive_some(65536)
        if not data:
            raise EOFError
        self._unread += data

    async def send(self, data: bytes) -> None:
        """Send `data`."""
        await self._stream.send_all(data)

    def send_now(self, data: bytes) -> None:
        """Send `data` from a thread of the test's own; waits for room."""
        descriptor = self._stream.socket.fileno()
        while data:
            select.select([], [descriptor], [])
            data = data[os.write(descriptor, data) :]

    async def arrived(self) -> None:
        """Wait until there is something to read, and leave it unread."""
        await trio.lowlevel.wait_readable(self._stream.socket)

    async def gone(self) -> None:
        """Wait until the front door has closed this connection."""
        with contextlib.suppress(trio.BrokenResourceError, EOFError):
            while True:
                await self._more()

    async def close(self) -> None:
        """End the connection in order."""
        await self._stream.aclose()

    def reset(self) -> None:
        """Break the connection off (on a Unix socket: close with what is unread)."""
        sock = self._stream.socket
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()


Script = Callable[[Call], Awaitable[None]]


class RawEngine:
    """The listening side. `heads` holds every request head that arrived, `calls` counts the connections."""

    def __init__(self, path: str, script: Script) -> None:
        """Serve `script` on the Unix socket `path`."""
        self.path = path
        self.script = script
        self.heads: list[bytes] = []
        self.calls = 0
        self._changed = trio.Event()

    def saw(self, head: bytes) -> None:
        """Note a request head."""
        self.heads.append(head)
        self._changed.set()
        self._changed = trio.Event()

    async def seen(self, count: int = 1) -> None:
        """Wait until `count` request heads have arrived."""
        while len(self.heads) < count:
            await self._changed.wait()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Accept until cancelled."""
        with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            await listener.bind(self.path)
            listener.listen(2048)
            async with trio.open_nursery() as nursery:
                task_status.started()
                while True:
                    sock, _ = await listener.accept()
                    self.calls += 1
                    nursery.start_soon(self._run, Call(self, trio.SocketStream(sock)))

    async def _run(self, call: Call) -> None:
        try:
            with contextlib.suppress(EOFError, trio.BrokenResourceError, trio.ClosedResourceError):
                await self.script(call)
        finally:
            with trio.CancelScope(shield=True):
                await call.close()


async def answer_ok(call: Call) -> None:
    """Answer every request of a connection with a small completion."""
    while True:
        await call.request()
        await call.send(ok(b'{"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}'))
