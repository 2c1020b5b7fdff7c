"""HTTP/1.1 for the stand-in engine, on trio and httptools, in the manner of uvicorn as vLLM runs it.

Rules (measured on vLLM 0.32): header names are lower case, `date` and `server` first; idle connections close after 5 s;
a client's FIN means it left, and cancels its request at once, bytes read meanwhile are kept for the next request;
a server that stops closes idle connections and lets open answers end. Requests of one connection are answered in order.
"""

import json
import math
import os
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools
import trio

KEEP_ALIVE = float(os.environ.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5"))  # seconds
MAX_BODY = 1 << 30  # bytes
READ_AHEAD = 65_536  # bytes read while an answer is under way
Headers = Iterable[tuple[str, str]]


@dataclass(slots=True)
class Request:
    """One request: `path` is decoded and without its query, header names are lower case, `body` is whole."""

    method: str = ""
    path: str = ""
    query: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    keep_alive: bool = True
    version: str = "1.1"
    target: bytes = b""
    complete: bool = False


class _Parser:
    """httptools' callbacks: builds requests and queues those that are complete."""

    def __init__(self) -> None:
        self._raw = httptools.HttpRequestParser(self)
        self._request = Request()
        self.complete: list[Request] = []
        self.expecting = False  # a head asked for 100 Continue and its body has not begun

    def feed(self, data: bytes) -> None:
        self._raw.feed_data(data)

    def on_message_begin(self) -> None:
        self._request = Request()

    def on_url(self, url: bytes) -> None:
        self._request.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._request.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        request = self._request
        request.method = self._raw.get_method().decode()
        request.version = self._raw.get_http_version()
        request.keep_alive = self._raw.should_keep_alive()
        url = httptools.parse_url(request.target)
        request.path = unquote((url.path or b"/").decode("latin-1"))
        request.query = (url.query or b"").decode("latin-1")
        self.expecting = request.headers.get("expect", "").lower() == "100-continue"

    def on_body(self, data: bytes) -> None:
        self.expecting = False
        self._request.body += data
        if len(self._request.body) > MAX_BODY:
            raise httptools.HttpParserError("body too large")

    def on_message_complete(self) -> None:
        self.expecting = False
        self._request.complete = True
        self.complete.append(self._request)


class Exchange:
    """One request and the way to answer it: `answer` at once, or `begin`, `send`…, `finish`; `drop` cuts it."""

    def __init__(self, request: Request, stream: trio.SocketStream, *, closing: bool) -> None:
        """Keep the connection afterwards unless the client or a `closing` server ends it."""
        self.request = request
        self.status = 0
        self.dropped = False
        self._stream = stream
        self.keep = request.keep_alive and not closing

    def _head(self, status: int, headers: Headers) -> bytes:
        self.status = status
        try:
            phrase = HTTPStatus(status).phrase
        except ValueError:
            phrase = ""
        lines = [f"HTTP/1.1 {status} {phrase}", f"date: {formatdate(usegmt=True)}", "server: uvicorn"]
        lines += [f"{name}: {value}" for name, value in headers]
        if not self.keep:
            lines.append("connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    async def answer(
        self, status: int, body: bytes = b"", content_type: str = "", headers: Headers = (), *, vary: bool = True
    ) -> None:
        """Answer with a whole body."""
        found = [*headers, ("content-length", str(len(body)))]
        if content_type:
            found.append(("content-type", content_type))
        if vary:
            found.append(("vary", "Origin"))
        head = self._head(status, found)
        await self._stream.send_all(head if self.request.method == "HEAD" else head + body)

    async def json(self, status: int, value: Any, headers: Headers = (), *, vary: bool = True) -> None:
        """Answer with a JSON body, written as vLLM writes it."""
        body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
        await self.answer(status, body, "application/json", headers, vary=vary)

    async def answer_half(self, value: Any) -> None:
        """Send the head of a JSON answer and half of its body, then cut the connection."""
        body = json.dumps(value).encode()
        head = self._head(200, [("content-length", str(len(body))), ("content-type", "application/json")])
        await self._stream.send_all(head + body[: len(body) // 2])
        self.drop()

    async def begin(self) -> None:
        """Begin an event stream, in chunks (HTTP/1.0: until the connection closes)."""
        headers = [("content-type", "text/event-stream; charset=utf-8"), ("vary", "Origin")]
        if self.request.version == "1.1":
            headers.append(("transfer-encoding", "chunked"))
        else:
            self.keep = False
        await self._stream.send_all(self._head(200, headers))

    async def send(self, data: bytes) -> None:
        """Send a part of the stream."""
        if data:
            chunked = self.request.version == "1.1"
            await self._stream.send_all(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)

    async def finish(self) -> None:
        """End the stream cleanly."""
        if self.request.version == "1.1":
            await self._stream.send_all(b"0\r\n\r\n")

    def drop(self) -> None:
        """Cut the connection without an end of the answer."""
        self.dropped = True
        self.keep = False


Handler = Callable[[Exchange], Awaitable[None]]


class Server:
    """Accepts connections and answers their requests with `handler`; knows which are open and which are idle."""

    def __init__(self, handler: Handler, log: Callable[[str], None]) -> None:
        """`log` gets one access line for each answer."""
        self._handler = handler
        self._log = log
        self.closing = False
        self._open: dict[trio.CancelScope, bool] = {}  # scope of a connection -> an answer is under way
        self._closed = trio.Event()

    async def serve(self, listener: trio.SocketListener) -> None:
        """Accept until the listener is closed; connections live on in this call until they end."""
        async with trio.open_nursery() as nursery:
            try:
                while True:
                    nursery.start_soon(self._connection, await listener.accept())
            except trio.ClosedResourceError:
                return

    def close_idle(self) -> None:
        """Stop keeping connections: idle ones close now, others after their answer."""
        self.closing = True
        for scope, answering in self._open.items():
            if not answering:
                scope.cancel()

    @property
    def open_connections(self) -> int:
        """Connections that are open."""
        return len(self._open)

    async def drained(self) -> None:
        """Wait until no connection is open."""
        while self._open:
            self._closed = trio.Event()
            await self._closed.wait()

    async def _connection(self, stream: trio.SocketStream) -> None:
        with trio.CancelScope() as scope:
            self._open[scope] = False
            try:
                await self._requests(stream, scope)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            finally:
                del self._open[scope]
                self._closed.set()
                with trio.CancelScope(shield=True):
                    await trio.aclose_forcefully(stream)

    async def _requests(self, stream: trio.SocketStream, scope: trio.CancelScope) -> None:
        parser = _Parser()
        ahead = bytearray()
        keep = True
        while keep and not self.closing:
            with trio.move_on_after(KEEP_ALIVE) as idle:
                while not parser.complete:
                    data = bytes(ahead) or await stream.receive_some(READ_AHEAD)
                    ahead.clear()
                    if not data:
                        return
                    try:
                        parser.feed(data)
                    except httptools.HttpParserUpgrade:
                        return
                    except httptools.HttpParserError:
                        refusal = Exchange(Request(keep_alive=False), stream, closing=True)
                        text = "Invalid HTTP request received."
                        await refusal.answer(400, text.encode(), "text/plain; charset=utf-8", vary=False)
                        return
                    if parser.expecting:
                        parser.expecting = False
                        await stream.send_all(b"HTTP/1.1 100 Continue\r\n\r\n")
                    idle.deadline = math.inf  # only a connection without a request is idle
            if idle.cancelled_caught:
                return
            exchange = Exchange(parser.complete.pop(0), stream, closing=self.closing)
            self._open[scope] = True
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, stream, ahead, nursery.cancel_scope, exchange)
                await self._answer(exchange)
                nursery.cancel_scope.cancel()
            keep = exchange.keep
            if exchange.status:
                self._access(stream, exchange)
            self._open[scope] = False

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self._handler(exchange)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            exchange.drop()
        except Exception:  # noqa: BLE001 - as in starlette, one request's fault does not end the engine
            self._log(traceback.format_exc())
            if exchange.status:
                exchange.drop()
            else:
                await exchange.answer(500, b"Internal Server Error", "text/plain; charset=utf-8", vary=False)

    @staticmethod
    async def _watch(stream: trio.SocketStream, ahead: bytearray, scope: trio.CancelScope, exchange: Exchange) -> None:
        """Read ahead while an answer is under way; the client's end cancels it."""
        while len(ahead) < READ_AHEAD:
            try:
                data = await stream.receive_some(READ_AHEAD)
            except trio.BrokenResourceError:
                data = b""
            if not data:
                exchange.drop()
                scope.cancel()
                return
            ahead += data

    def _access(self, stream: trio.SocketStream, exchange: Exchange) -> None:
        try:
            peer = stream.socket.getpeername()
        except OSError:
            peer = ""
        client = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else ""
        request = exchange.request
        phrase = HTTPStatus(exchange.status).phrase if exchange.status in set(HTTPStatus) else ""
        target = request.target.decode("latin-1")
        self._log(
            f'INFO:     {client} - "{request.method} {target} HTTP/{request.version}" {exchange.status} {phrase}\n'
        )


def now() -> int:
    """Wall-clock seconds, for `created` fields."""
    return int(time.time())
