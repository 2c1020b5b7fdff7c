"""The private control socket: HTTP/JSON over a Unix socket, one request a connection.

Rules:
* Whoever can open the socket may act (its file mode decides that); who it was is read from the kernel, not believed.
* A slow or broken caller costs one bounded connection and never more: head and body are limited, the whole exchange
  has a time limit unless the handler itself waits (`drain --wait`).
"""

import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import h11
import trio

from vllm_supervisor.core.proc import command_words

MAX_BODY = 64 * 1024
MAX_CONNECTIONS = 64
READ_TIMEOUT = 10.0  # seconds for a whole request to arrive
WRITE_TIMEOUT = 10.0  # seconds for a caller to take its answer


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
    """One request to the control socket."""

    method: str
    path: str
    query: dict[str, str]
    body: dict[str, Any]
    peer: Peer


@dataclass(frozen=True, slots=True)
class Answer:
    """What the caller gets: an HTTP status and a JSON value, or one JSON value a line for as long as there are any."""

    status: int
    value: Any = None
    stream: AsyncIterator[Any] | None = None


def refusal(status: int, message: str) -> Answer:
    """Refuse with one line that is shown as it is."""
    return Answer(status, {"error": {"message": message}})


Handler = Callable[[Call], Awaitable[Answer]]


class BadCallError(Exception):
    """The request cannot be understood; the message says why."""


async def serve(listener: socket.socket, handler: Handler, on_fault: Callable[[BaseException], None]) -> None:
    """Answer on `listener` (bound, listening, non-blocking) until cancelled, or until it is closed: what is open ends well."""
    sock = trio.socket.from_stdlib_socket(listener)
    places = trio.Semaphore(MAX_CONNECTIONS)
    async with trio.open_nursery() as nursery:
        while True:
            await places.acquire()
            try:
                connection, _ = await sock.accept()
            except trio.ClosedResourceError:
                return
            except OSError as fault:  # out of file descriptors, say: the next caller may have more luck
                places.release()
                on_fault(fault)
                await trio.sleep(0.2)
                continue
            nursery.start_soon(_connection, connection, handler, on_fault, places)


async def _connection(
    connection: trio.socket.SocketType,
    handler: Handler,
    on_fault: Callable[[BaseException], None],
    places: trio.Semaphore,
) -> None:
    try:
        with connection, contextlib.suppress(OSError, h11.RemoteProtocolError):
            await _exchange(connection, handler, on_fault)
    finally:
        places.release()


async def _exchange(
    connection: trio.socket.SocketType, handler: Handler, on_fault: Callable[[BaseException], None]
) -> None:
    protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=16 * 1024)
    with trio.move_on_after(READ_TIMEOUT) as reading:
        try:
            call = await _read(connection, protocol)
        except BadCallError as fault:
            await _send(connection, protocol.send, _whole(refusal(400, str(fault))))
            return
    if reading.cancelled_caught or call is None:
        return
    await _while_there(connection, lambda: _answer(connection, protocol, handler, call, on_fault))


async def _answer(
    connection: trio.socket.SocketType,
    protocol: h11.Connection,
    handler: Handler,
    call: Call,
    on_fault: Callable[[BaseException], None],
) -> None:
    try:
        answer = await handler(call)
    except Exception as fault:  # noqa: BLE001 - a fault in one answer must not end the control socket
        on_fault(fault)
        answer = refusal(500, "the supervisor failed to answer; its log says why")
    if answer.stream is None:
        await _send(connection, protocol.send, _whole(answer))
        return
    await _send(connection, protocol.send, [_head(answer.status, ("Content-Type", "application/x-ndjson"))])
    async for value in answer.stream:
        await _send(connection, protocol.send, [h11.Data(data=json.dumps(value).encode() + b"\n")])
    await _send(connection, protocol.send, [h11.EndOfMessage()])


async def _while_there(connection: trio.socket.SocketType, work: Callable[[], Awaitable[None]]) -> None:
    """Work, but not longer than the caller stays: a killed `drain --wait` leaves nothing behind."""

    async def watch(scope: trio.CancelScope) -> None:
        with contextlib.suppress(OSError):
            while await connection.recv(4096):
                pass
        scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, nursery.cancel_scope)
        with contextlib.suppress(OSError):  # here: out of the nursery it would come wrapped in a group
            await work()
        nursery.cancel_scope.cancel()


async def _read(connection: trio.socket.SocketType, protocol: h11.Connection) -> Call | None:
    request: h11.Request | None = None
    body = b""
    while True:
        event = protocol.next_event()
        if event is h11.NEED_DATA:
            protocol.receive_data(await connection.recv(16 * 1024))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > MAX_BODY:
                raise BadCallError(f"the body is over {MAX_BODY} bytes")
        elif isinstance(event, h11.EndOfMessage):
            break
        else:
            return None
    if request is None:  # cannot be: h11 gives EndOfMessage only after a Request
        return None
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
    return Call(request.method.decode("ascii"), target.path, dict(parse_qsl(target.query)), value, _peer(connection))


def _peer(connection: trio.socket.SocketType) -> Peer:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _gid = struct.unpack("3i", raw)
    command = ""
    with contextlib.suppress(OSError):
        comm = Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
        command = command_words(comm, Path(f"/proc/{pid}/cmdline").read_bytes())
    return Peer(pid, uid, command)


def _head(status: int, *headers: tuple[str, str]) -> h11.Response:
    return h11.Response(status_code=status, headers=[*headers, ("Connection", "close")], reason=b"")


def _whole(answer: Answer) -> list[h11.Event]:
    body = json.dumps(answer.value).encode() + b"\n"
    head = _head(answer.status, ("Content-Type", "application/json"), ("Content-Length", str(len(body))))
    return [head, h11.Data(data=body), h11.EndOfMessage()]


async def _send(
    connection: trio.socket.SocketType, encode: Callable[[Any], bytes | None], events: Sequence[h11.Event]
) -> None:
    """Send an answer or a part of it. Raises OSError: the caller has gone, or takes nothing."""
    view = memoryview(b"".join(encode(event) or b"" for event in events))
    with trio.move_on_after(WRITE_TIMEOUT):
        while view:
            view = view[await connection.send(view) :]
    if view:
        raise TimeoutError("the caller does not take its answer")
