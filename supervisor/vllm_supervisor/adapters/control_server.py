"""The private control socket: HTTP/JSON over a Unix socket, one request a connection.

Rules:
* Whoever can open the socket may act (its file mode decides that); who it was is read from the kernel, not believed.
* A caller can cost its own connection and nothing else: an internal error in one is logged and closes that one.
* A call is short until its handler says otherwise: it has `READ_TIMEOUT` to arrive and `WRITE_TIMEOUT` to take its
  answer, and at `MAX_CALLS` of them the oldest is closed to make room. Followers and waiting calls have limits of their
  own. So neither half-open calls nor unread streams keep `status` and `stop` out.
* Descriptors are held in reserve: when the process has none left, a call still gets in and can be told.
"""

import contextlib
import errno
import json
import os
import select
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import h11
import trio

from vllm_supervisor.core.guard import contained
from vllm_supervisor.core.proc import command_words

MAX_HEAD = 16 * 1024
MAX_BODY = 64 * 1024
MAX_EXTRA = 64 * 1024  # bytes behind the request, which are discarded
MAX_CALLS = 64  # short ones at once; a further one closes the oldest
MAX_FOLLOWERS = 32
MAX_WAITING = 32  # calls that wait, such as `drain --wait`
READ_TIMEOUT = 5.0  # seconds for a whole request to arrive
WRITE_TIMEOUT = 10.0  # seconds for a caller to take its answer, or one piece of a stream
HANGUP_INTERVAL = 0.5  # seconds between checks that a caller which closed its sending side is still there
ACCEPT_PAUSE = 0.2  # seconds until the next try where nothing could be accepted
RESERVE = 4  # descriptors: one for a connection, the rest for what its handler opens

_WAIT, _FOLLOW = "wait", "follow"
_PASSING = {errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.EINTR}  # of a caller that gave up in the queue
_USED_UP = {errno.EMFILE, errno.ENFILE}


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, by the kernel's word (SO_PEERCRED)."""

    pid: int
    uid: int
    command: str  # "" if it has gone already

    def __str__(self) -> str:
        return f"pid {self.pid} (uid {self.uid}" + (f", {self.command})" if self.command else ")")


@dataclass(frozen=True, slots=True)
class Call:
    """One request to the control socket; HEAD arrives as GET, its answer goes without a body."""

    method: str
    path: str
    query: dict[str, str]
    body: dict[str, Any]
    peer: Peer


@dataclass(frozen=True, slots=True)
class Answer:
    """What the caller gets: an HTTP status and a JSON value.

    Instead of a value: `stream`, one JSON value a line for as long as there are any, or `later`, which waits for something
    and then gives the answer. Both are limited in number, and begun only if there is room.
    """

    status: int
    value: Any = None
    stream: AsyncGenerator[Any] | None = None
    later: Callable[[], Awaitable["Answer"]] | None = None
    headers: tuple[tuple[str, str], ...] = ()


def refusal(status: int, message: str, *headers: tuple[str, str]) -> Answer:
    """Refuse with one line that is shown as it is."""
    return Answer(status, {"error": {"message": message}}, headers=headers)


Handler = Callable[[Call], Awaitable[Answer]]


class BadCallError(Exception):
    """The request cannot be understood; the message says why."""

    def __init__(self, message: str, status: int = 400) -> None:
        """`status` is the answer's."""
        super().__init__(message)
        self.status = status


class Server:
    """Accepts callers and keeps the limits; `run` is its whole life."""

    def __init__(
        self,
        listener: socket.socket,
        handler: Handler,
        *,
        on_fault: Callable[[Exception], None],
        on_refused: Callable[[OSError], None],
    ) -> None:
        """Serve `listener` (bound, listening, non-blocking).

        `on_fault` gets internal errors; `on_refused` what accept(2) raised, once until callers get in again.
        """
        self._listener = trio.socket.from_stdlib_socket(listener)
        self._handler = handler
        self._on_fault = on_fault
        self._on_refused = on_refused
        self._refused = False
        self._short: dict[trio.CancelScope, None] = {}  # oldest first
        self._long = {_WAIT: 0, _FOLLOW: 0}
        self._reserve: list[int] = []

    async def run(self) -> None:
        """Answer until cancelled, or until the listener is closed: who is being answered is answered to the end."""
        self._fill_reserve()
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    try:
                        connection, _ = await self._listener.accept()
                    except trio.ClosedResourceError:
                        return
                    except OSError as fault:
                        await self._not_accepted(fault)
                        continue
                    if len(self._short) >= MAX_CALLS:
                        self._close_oldest()
                    scope = trio.CancelScope()
                    self._short[scope] = None
                    nursery.start_soon(self._serve, connection, scope)
        finally:
            self._empty_reserve()

    async def _serve(self, connection: trio.socket.SocketType, scope: trio.CancelScope) -> None:
        try:
            with connection, scope, contained(self._on_fault):
                await self._exchange(connection, scope)
        finally:
            self._short.pop(scope, None)
            self._fill_reserve()

    def _close_oldest(self) -> bool:
        oldest = next(iter(self._short), None)
        if oldest is None:
            return False
        del self._short[oldest]
        oldest.cancel()
        return True

    # -- descriptors -------------------------------------------------------------------------------------------------

    async def _not_accepted(self, fault: OSError) -> None:
        """Make room where descriptors are used up; else wait, for the next caller may have more luck."""
        if fault.errno in _PASSING:
            return
        if not self._refused:
            self._refused = True
            self._on_refused(fault)
        if fault.errno in _USED_UP and (self._empty_reserve() or self._close_oldest()):
            await trio.lowlevel.checkpoint()
        else:
            await trio.sleep(ACCEPT_PAUSE)

    def _fill_reserve(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._reserve) < RESERVE:
                self._reserve.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            self._refused = False

    def _empty_reserve(self) -> bool:
        given, self._reserve = self._reserve, []
        for fd in given:
            os.close(fd)
        return bool(given)

    # -- one call ----------------------------------------------------------------------------------------------------

    async def _exchange(self, connection: trio.socket.SocketType, scope: trio.CancelScope) -> None:
        exchange = _Exchange(connection)
        with contextlib.suppress(OSError):  # the caller has gone, or takes nothing
            call: Call | None = None
            refused: Answer | None = None
            try:
                with trio.fail_after(READ_TIMEOUT):
                    call = await exchange.read()
            except trio.TooSlowError:
                refused = refusal(408, f"the request did not arrive within {READ_TIMEOUT:g} s")
            except BadCallError as fault:
                refused = refusal(fault.status, str(fault))
            except h11.RemoteProtocolError as fault:
                refused = refusal(fault.error_status_hint, f"this is no HTTP request: {fault}")
            if refused is not None:
                await exchange.send(refused)
            elif call is not None:
                await exchange.while_there(partial(self._answer, exchange, call, scope))

    async def _answer(self, exchange: "_Exchange", call: Call, scope: trio.CancelScope) -> None:
        answer = await self._asked(partial(self._handler, call))
        if answer.later is not None:
            if self._long[_WAIT] < MAX_WAITING:
                with self._counted(_WAIT, scope):
                    await exchange.send(await self._asked(answer.later))
                return
            answer = refusal(429, f"{MAX_WAITING} calls are waiting, which is the limit; end one of them")
        if answer.stream is not None and not exchange.head_only:
            if self._long[_FOLLOW] < MAX_FOLLOWERS:
                with self._counted(_FOLLOW, scope):
                    await exchange.send_stream(answer, answer.stream)
                return
            answer = refusal(429, f"{MAX_FOLLOWERS} callers are following, which is the limit; end one of them")
        await exchange.send(answer)

    @contextlib.contextmanager
    def _counted(self, kind: str, scope: trio.CancelScope) -> Iterator[None]:
        """Count a call among the long ones, which are not closed to make room."""
        self._short.pop(scope, None)
        self._long[kind] += 1
        try:
            yield
        finally:
            self._long[kind] -= 1

    async def _asked(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        failed = refusal(500, "internal error: the supervisor could not answer; its log says why")
        with contained(self._on_fault):
            return await ask()
        return failed


class _Exchange:
    """One request and its answer on one connection. Every method may raise OSError: the caller has gone, or takes nothing."""

    def __init__(self, connection: trio.socket.SocketType) -> None:
        self._connection = connection
        self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self.head_only = False

    async def read(self) -> Call | None:
        """Read the request; None if the caller went before it was whole. Raises BadCallError and RemoteProtocolError."""
        protocol = self._protocol
        request: h11.Request | None = None
        body = bytearray()
        while True:
            event = protocol.next_event()
            if event is h11.NEED_DATA:
                if protocol.they_are_waiting_for_100_continue:
                    await self._write(h11.InformationalResponse(status_code=100, headers=[]))
                protocol.receive_data(await self._connection.recv(16 * 1024))
            elif isinstance(event, h11.Request):
                request = event
                self.head_only = event.method == b"HEAD"
                if event.method == b"CONNECT":  # a 200 to it would begin a tunnel
                    raise BadCallError("there is nothing to connect to", 405)
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > MAX_BODY:
                    raise BadCallError(f"the body is over {MAX_BODY} bytes", 413)
            elif isinstance(event, h11.EndOfMessage) and request is not None:
                return _call(request, bytes(body), _peer(self._connection))
            else:
                return None

    async def while_there(self, work: Callable[[], Awaitable[None]]) -> None:
        """Work, but not longer than the caller stays: a killed `drain --wait` leaves nothing behind."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._await_hangup, nursery.cancel_scope)
            with contextlib.suppress(OSError):  # here: out of the nursery it would come wrapped in a group
                await work()
            nursery.cancel_scope.cancel()

    async def _await_hangup(self, scope: trio.CancelScope) -> None:
        extra = 0
        with contextlib.suppress(OSError):
            while extra <= MAX_EXTRA and (data := await self._connection.recv(4096)):
                extra += len(data)
            while extra <= MAX_EXTRA and not _hung_up(self._connection):  # noqa: ASYNC110 - its end is readable already
                await trio.sleep(HANGUP_INTERVAL)
        scope.cancel()

    async def send(self, answer: Answer) -> None:
        """Send a whole answer."""
        body = json.dumps(answer.value).encode() + b"\n"
        head = self._head(answer, ("Content-Type", "application/json"), ("Content-Length", str(len(body))))
        await self._write(head, *([] if self.head_only else [h11.Data(data=body)]), h11.EndOfMessage())

    async def send_stream(self, answer: Answer, stream: AsyncGenerator[Any]) -> None:
        """Send one value a line until the stream ends."""
        async with contextlib.aclosing(stream):
            await self._write(self._head(answer, ("Content-Type", "application/x-ndjson")))
            async for value in stream:
                await self._write(h11.Data(data=json.dumps(value).encode() + b"\n"))
            await self._write(h11.EndOfMessage())

    @staticmethod
    def _head(answer: Answer, *headers: tuple[str, str]) -> h11.Response:
        return h11.Response(
            status_code=answer.status, headers=[*headers, *answer.headers, ("Connection", "close")], reason=b""
        )

    async def _write(self, *events: h11.Event) -> None:
        view = memoryview(b"".join(self._protocol.send(event) or b"" for event in events))
        with trio.move_on_after(WRITE_TIMEOUT):
            while view:
                view = view[await self._connection.send(view) :]
        if view:
            raise TimeoutError("the caller does not take its answer")


def _call(request: h11.Request, body: bytes, peer: Peer) -> Call:
    try:
        target = urlsplit(request.target.decode("ascii", "replace"))
    except ValueError as fault:
        raise BadCallError(f"the target is no path: {fault}") from None
    try:
        value = json.loads(body) if body else {}
    except (ValueError, RecursionError) as fault:
        raise BadCallError(f"the body is not JSON: {fault}") from None
    if not isinstance(value, dict):
        raise BadCallError("the body must be a JSON object")
    method = "GET" if request.method == b"HEAD" else request.method.decode("ascii")
    return Call(method, target.path, dict(parse_qsl(target.query, keep_blank_values=True)), value, peer)


def _hung_up(connection: trio.socket.SocketType) -> bool:
    """Tell a caller that is gone from one that has only closed its sending side (a pipe into `nc`): unix(7), poll(2)."""
    poll = select.poll()
    poll.register(connection.fileno(), 0)
    return bool(poll.poll(0))


def _peer(connection: trio.socket.SocketType) -> Peer:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _gid = struct.unpack("3i", raw)
    command = ""
    with contextlib.suppress(OSError):
        comm = Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
        command = command_words(comm, Path(f"/proc/{pid}/cmdline").read_bytes())
    return Peer(pid, uid, command)
