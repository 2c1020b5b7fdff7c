"""A front door on a loopback port with a scripted engine behind it, and a raw client before it."""

import contextlib
import functools
import itertools
import socket
import ssl
import tempfile
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import trio

from fakes.raw_engine import RawEngine, Script, answer_ok
from vllm_supervisor.adapters.upstream import Upstreams
from vllm_supervisor.core.address import UnixAddress
from vllm_supervisor.core.admission import Gate, OpenRequest, Rejection
from vllm_supervisor.core.front_door_settings import FrontDoorSettings
from vllm_supervisor.core.journal import RequestOutcome
from vllm_supervisor.core.view import View
from vllm_supervisor.core.words import ClosedReason, EngineState, Evidence, ExecutionState, Phase, RequestClass
from vllm_supervisor.runtime.front_door import FrontDoor

PATIENCE = 20.0  # seconds after which a test that waits for something fails


def in_trio(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test in trio; it fails when it has not ended in time."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        async def bounded() -> None:
            with trio.fail_after(PATIENCE):
                await test(*args, **kwargs)

        trio.run(bounded)

    return run


@dataclass
class FakeJournal:
    """Both ledgers as lists; `accepted` can be made to wait."""

    accepted_ids: list[str] = field(default_factory=list)
    outcomes: list[RequestOutcome] = field(default_factory=list)
    executions: list[tuple[str, ExecutionState, Evidence]] = field(default_factory=list)
    rejections: list[tuple[RequestClass, str]] = field(default_factory=list)
    hold: trio.Event | None = None
    fails: bool = False  # as with ledger.required and a full disk
    in_turn: bool = False
    writes: int = 0  # of acceptances, which share one within a turn
    entered: set[str] = field(default_factory=set)  # ids that have begun to be accepted, as in the real one
    waiting: list[tuple[OpenRequest, Callable[[bool], None]]] = field(default_factory=list)

    def begin_turn(self) -> None:
        """Let acceptances wait."""
        self.in_turn = True

    def end_turn(self) -> None:
        """Note those that have waited."""
        self.in_turn = False
        waiting, self.waiting = self.waiting, []
        if waiting:
            self.writes += 1
        for request, told in waiting:
            self._write(request, told)

    def accept(self, request: OpenRequest, told: Callable[[bool], None]) -> None:
        """Note the id, at the end of a turn, unless acceptances are held or fail."""
        if self.in_turn:
            self.waiting.append((request, told))
        else:
            self.writes += 1
            self._write(request, told)

    def _write(self, request: OpenRequest, told: Callable[[bool], None]) -> None:
        now = self.hold is None and not self.fails
        if now:
            self.entered.add(request.id)
            self.accepted_ids.append(request.id)
        told(now)

    async def accepted(self, request: OpenRequest) -> bool:
        """Note the id, unless the ledger is to fail."""
        self.entered.add(request.id)
        if self.hold is not None:
            await self.hold.wait()
        if self.fails:
            return False
        self.accepted_ids.append(request.id)
        return True

    def ended(self, outcome: RequestOutcome, state: ExecutionState, evidence: Evidence) -> None:
        """Note the outcome and the statement."""
        self.outcomes.append(outcome)
        self.executions.append((outcome.id, state, evidence))

    def rejected(self, request_class: RequestClass, reason: str) -> None:
        """Note the refusal."""
        self.rejections.append((request_class, reason))

    @property
    def story(self) -> list[tuple[str, str, str, str, str]]:
        """Say for each outcome: outcome, why, ended by, execution state, its evidence."""
        states = {request_id: (state, evidence) for request_id, state, evidence in self.executions}
        return [(o.outcome, o.why, o.ended_by, *states[o.id]) for o in self.outcomes]


class Client:
    """A raw client; `receive…` return bytes as they came."""

    def __init__(self, stream: trio.abc.Stream, sock: trio.socket.SocketType | None = None) -> None:
        """Talk over `stream`, whose socket is `sock` where it is not its own."""
        self.stream = stream
        self.sock = sock or stream.socket
        self.unread = b""

    async def send(self, data: bytes) -> None:
        """Send `data`."""
        await self.stream.send_all(data)

    async def post(self, path: bytes, body: bytes = b"{}", fields: bytes = b"") -> None:
        """Send a whole POST."""
        await self.send(
            b"POST %b HTTP/1.1\r\nHost: a\r\n%bContent-Length: %d\r\n\r\n%b" % (path, fields, len(body), body)
        )

    async def get(self, path: bytes, fields: bytes = b"") -> None:
        """Send a whole GET."""
        await self.send(b"GET %b HTTP/1.1\r\nHost: a\r\n%b\r\n" % (path, fields))

    async def until(self, end: bytes) -> bytes:
        """Receive up to and with `end`; raises EOFError."""
        while end not in self.unread:
            data = await self.stream.receive_some(65536)
            if not data:
                raise EOFError(self.unread)
            self.unread += data
        data, _, self.unread = self.unread.partition(end)
        return data + end

    async def exactly(self, size: int) -> bytes:
        """Receive exactly `size` bytes."""
        while len(self.unread) < size:
            data = await self.stream.receive_some(65536)
            if not data:
                raise EOFError(self.unread)
            self.unread += data
        data, self.unread = self.unread[:size], self.unread[size:]
        return data

    async def to_end(self) -> bytes:
        """Receive all there is until the connection ends."""
        while True:
            data = await self.stream.receive_some(65536)
            if not data:
                rest, self.unread = self.unread, b""
                return rest
            self.unread += data

    async def answer(self) -> tuple[bytes, bytes]:
        """Receive one answer with a length, as head and body."""
        head = await self.until(b"\r\n\r\n")
        for line in head.split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                return head, await self.exactly(int(value))
        return head, b""

    async def close(self) -> None:
        """Leave."""
        await self.stream.aclose()

    def half_close(self) -> None:
        """Send FIN and stay."""
        self.sock.shutdown(socket.SHUT_WR)


@dataclass
class Door:
    """The front door under test and what it was given."""

    front: FrontDoor
    gate: Gate
    journal: FakeJournal
    upstreams: Upstreams
    engine: RawEngine
    address: tuple[str, int]
    log: list[structlog.types.EventDict]
    view: list[View]
    nursery: trio.Nursery
    server: trio.CancelScope
    clients: list[Client] = field(default_factory=list)

    async def client(self) -> Client:
        """Connect a new client, which is closed with the door at the latest."""
        return self.keep(Client(await trio.open_tcp_stream(*self.address)))

    def keep(self, client: Client) -> Client:
        """Close `client` with the door at the latest."""
        self.clients.append(client)
        return client

    @property
    def admitted(self) -> set[str]:
        """The ids of all requests that were let through to the engine."""
        ledgered = {f"led-{number + 1}" for number in range(self.gate.counts.accepted)}
        return ledgered | {f"pass-{number + 1}" for number in range(self.gate._passed)}

    async def idle(self) -> None:
        """Wait until every exchange has ended."""
        while self.gate.in_flight:
            released = trio.Event()
            self.gate.on_release(lambda _request, released=released: released.set())
            await released.wait()


READY = View(Phase.RUNNING, EngineState.READY, "", ready=True, started=True)
STARTING = View(Phase.RUNNING, EngineState.STARTING, "the engine is still starting", ready=False, started=False)


@contextlib.asynccontextmanager
async def open_door(
    script: Script = answer_ok,
    *,
    settings: FrontDoorSettings | None = None,
    limit: int = 100,
    keep_alive: float = 5.0,
    up: bool = True,
    tls: Callable[[], ssl.SSLContext] | None = None,
    more_listeners: Sequence[socket.socket] = (),
    engine_at: str | None = None,
    faults: bool = False,
) -> AsyncIterator[Door]:
    """Open a front door before an engine that follows `script`; admission is open and the engine up if `up`.

    `engine_at` is the socket of another engine, which runs by itself; `faults` are expected in the log.
    """
    numbers = itertools.count(1)
    gate = Gate(limit=limit, new_id=lambda: f"led-{next(numbers)}")
    journal = FakeJournal()
    upstreams = Upstreams()
    log: list[structlog.types.EventDict] = []
    view = [READY if up else STARTING]
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    listener.setblocking(False)
    with tempfile.TemporaryDirectory(prefix="door-") as directory, listener:
        engine = RawEngine(str(Path(directory) / "engine.sock"), script)
        with structlog.testing.capture_logs() as log:
            front = FrontDoor(
                gate=gate,
                journal=journal,
                settings=settings or FrontDoorSettings(),
                engine=upstreams,
                view=lambda: view[0],
                exposition=lambda: b"vllm_supervisor_up 1\n",
                retry_after=lambda _rejection: 7,
                log=structlog.get_logger(),
                tls=tls,
            )
            async with trio.open_nursery() as nursery:
                await nursery.start(engine.serve)
                if up:
                    upstreams.point_at(UnixAddress(engine_at or engine.path), keep_alive)
                    gate.reopen(ClosedReason.STARTING)
                server = trio.CancelScope()

                async def serve(task_status: trio.TaskStatus[None]) -> None:
                    with server:
                        await front.serve([listener, *more_listeners], task_status=task_status)

                await nursery.start(serve)
                address = listener.getsockname()
                door = Door(front, gate, journal, upstreams, engine, address, log, view, nursery, server)
                try:
                    yield door
                finally:
                    for entry in log:
                        if "exc_info" in entry:
                            traceback.print_exception(entry["exc_info"])
                    nursery.cancel_scope.cancel()
                    for client in door.clients:
                        client.sock.close()
        errors = [entry for entry in log if entry["log_level"] == "error"]
        assert bool(errors) is faults, errors
        assert not gate.in_flight
        assert {o.id for o in journal.outcomes} <= journal.entered
        assert len(journal.outcomes) == len({o.id for o in journal.outcomes}) == len(journal.executions)


def refused(code: str, status: int = 503) -> Rejection:
    """Build a refusal for comparisons."""
    return Rejection(status, code, "")
