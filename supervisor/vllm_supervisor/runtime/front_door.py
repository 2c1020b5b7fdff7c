"""The public listener: accepts, keeps the limits, and owns the lifetimes of all connections.

Rules:
* Connections live in one nursery; leaving it ends them all, and each exchange still writes its account.
* At the limit of connections the one that has waited longest for a head is closed to make room, so an attack of slow
  heads evicts itself, and so does one of slow bodies. If every connection is busy, a small reserve is accepted for health paths alone.
* Time limits are looked at by one sweep, not by a timer a request.
* Nothing here goes on for long without a checkpoint: neither accepting nor the sweep.
"""

import contextlib
import errno
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable

import trio
from structlog.typing import FilteringBoundLogger

from vllm_supervisor.adapters import sockets
from vllm_supervisor.adapters.http1 import RequestHeads
from vllm_supervisor.adapters.upstream import Upstreams
from vllm_supervisor.core import replies
from vllm_supervisor.core.admission import Gate, Rejection
from vllm_supervisor.core.forwarding import UNKNOWN
from vllm_supervisor.core.front_door_settings import FrontDoorSettings
from vllm_supervisor.core.http_semantics import RequestHead
from vllm_supervisor.core.journal import Journal
from vllm_supervisor.core.routes import Router
from vllm_supervisor.core.view import View
from vllm_supervisor.runtime.connection import Connection, Hall
from vllm_supervisor.runtime.desk import Desk
from vllm_supervisor.runtime.engine_links import EngineLinks
from vllm_supervisor.runtime.link import Link
from vllm_supervisor.runtime.own_answers import OwnAnswers
from vllm_supervisor.runtime.pump import Pump

LIMIT_LOGGED_EVERY = 60.0  # seconds between two warnings of the same limit
_TURNED_AWAY_KEPT = 64  # connections beyond that reserve, until their clients have read why
_TURNED_AWAY_S = 2.0
_HEALTH_RESERVE = 64  # connections beyond the limit, for health paths
_ACCEPT_S = 0.005  # in one go
_SWEEP_BATCH = 64
_OUT_OF_DESCRIPTORS_PAUSE = 0.1
_SWEEP_MIN, _SWEEP_MAX = 0.02, 1.0
_UNSOLICITED_LOG_INTERVAL = 60.0


class FrontDoor:
    """See the module's rules."""

    def __init__(
        self,
        *,
        gate: Gate,
        journal: Journal,
        settings: FrontDoorSettings,
        engine: Upstreams,
        view: Callable[[], View],
        exposition: Callable[[], bytes],
        retry_after: Callable[[Rejection], int],
        log: FilteringBoundLogger,
        now: Callable[[], float] = time.monotonic,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """`view` and `exposition` are read at each request, `tls` at each connection; `now` is monotonic seconds."""
        self._settings = settings
        self._log = log
        self._tls = tls
        self._closing = False
        self._probe_hint_given = False
        self._limits_logged: dict[str, float] = {}
        self._turned_away: deque[tuple[float, socket.socket]] = deque()  # closed at once, they would be reset
        self._unsolicited_times = 0
        self._unsolicited_logged_at: float | None = None
        self._pump = Pump(now=now, on_fault=self._fault, begin_turn=journal.begin_turn, end_turn=journal.end_turn)
        self._now = now
        self._links = EngineLinks(self._pump, engine, now, self._unsolicited)
        self._changed = trio.lowlevel.ParkingLot()
        gate.on_open(self._admission_changed)
        gate.on_close(self._admission_changed)
        self._desk = desk = Desk(
            gate=gate,
            journal=journal,
            settings=settings,
            upstreams=engine,
            links=self._links,
            pump=self._pump,
            retry_after=retry_after,
            now=now,
            closing=lambda: self._closing,
            limit_reached=self._limit_reached,
            changed=self._changed,
        )
        router = Router(
            root_paths=settings.root_paths,
            allow_paths=settings.allow_paths,
            health_means_alive=settings.health == "alive",
        )
        own = OwnAnswers(settings, view=view, exposition=exposition, upstreams=engine)
        self._hall = Hall(desk, own, router, settings, RequestHeads(settings.max_body), probed=self._probed)

    async def serve(
        self, listeners: list[socket.socket], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve on sockets that are bound, listening and non-blocking, until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._pump.run)
                nursery.start_soon(self._sweep)
                for listener in listeners:
                    nursery.start_soon(self._accept, listener, nursery)
                task_status.started()
        finally:
            self._links.drop_all()
            self._pump.close()
            for _, sock in self._turned_away:
                sock.close()

    def close_idle(self) -> None:
        """From now on every answer ends its connection; requests that come late still get their refusal."""
        self._closing = True

    def _admission_changed(self) -> None:
        self._changed.unpark_all()
        for exchange in list(self._desk.arriving):
            exchange.recheck()

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._hall.connections)

    # -- accepting ---------------------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        refused = False
        while True:
            await trio.lowlevel.wait_readable(listener)
            until = self._now() + _ACCEPT_S
            while self._now() < until:
                try:
                    accepted = sockets.accept(listener)
                except OSError as error:
                    if not refused:  # once, until connections get in again: tries come ten times a second
                        refused = True
                        name = errno.errorcode.get(error.errno or 0, "?")
                        self._log.warning("cannot accept connections", error=name)
                    self._make_room()
                    await trio.sleep(_OUT_OF_DESCRIPTORS_PAUSE)
                    break
                if accepted is None:
                    break
                refused = False
                try:
                    self._admit(*accepted, nursery)
                except Exception as fault:  # noqa: BLE001 - an internal error closes this connection, not the listener
                    self._fault(fault)
                    accepted[0].close()

    def _admit(self, sock: socket.socket, host: str | None, nursery: trio.Nursery) -> None:
        full = len(self._hall.connections) >= self._settings.max_connections
        room = not full or self._make_room()
        beyond = len(self._hall.connections) - self._settings.max_connections
        health_only = beyond >= 0  # what made room may itself have been beyond the limit
        if full:
            self._limit_reached("front_door.max_connections", self._settings.max_connections)
        if not room and beyond >= _HEALTH_RESERVE:
            self._turn_away(sock)
            return
        if self._tls is not None:
            try:
                sock = self._tls().wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            except OSError:  # the client is gone already
                sock.close()
                return
        peer = UNKNOWN if host is None else self._settings.forwarding.peer(host)
        link = Link(self._pump, sock, patient=False, peer=peer)
        connection = Connection(self._hall, link, health_only=health_only)
        self._hall.connections.add(connection)
        nursery.start_soon(self._run, connection)

    def _turn_away(self, sock: socket.socket) -> None:
        """Refuse a client without serving it; by TLS, where a refusal would cost a handshake, reset its connection."""
        if self._tls is not None:
            sockets.reset(sock)
            return
        with contextlib.suppress(OSError):  # it takes what its buffer takes, which is more than this
            sock.send(replies.crowded())
        sockets.finish_sending(sock)
        self._turned_away.append((self._now(), sock))
        if len(self._turned_away) > _TURNED_AWAY_KEPT:
            self._turned_away.popleft()[1].close()

    def _make_room(self) -> bool:
        """Close the connection that has waited longest for a head or a body; False if every one is busy."""
        oldest = next(iter(self._hall.waiting), None)
        slowest = next(iter(self._desk.arriving), None)
        if slowest is not None and (oldest is None or slowest.arriving_since < oldest.idle_since):
            slowest.evict()
        elif oldest is not None:
            oldest.expire()
        else:
            return False
        return True

    async def _run(self, connection: Connection) -> None:
        try:
            await connection.run()
        except Exception as fault:  # noqa: BLE001 - one connection's fault must not end all others
            self._fault(fault)
        finally:
            self._hall.connections.discard(connection)

    # -- the rest ----------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        settings = self._settings
        limits = [
            settings.head_timeout,
            settings.body_timeout,
            settings.body_deadline or _SWEEP_MAX * 4,
            settings.idle_timeout,
            settings.client_stall_timeout,
            settings.request_deadline or _SWEEP_MAX * 4,
        ]
        pause = max(_SWEEP_MIN, min(_SWEEP_MAX, min(limits) / 4))
        while True:
            await trio.sleep(pause)
            now = self._now()
            self._pump.now = now
            for number, connection in enumerate(list(self._hall.connections), 1):
                try:
                    connection.tick(now)
                except Exception as fault:  # noqa: BLE001 - as in `_run`
                    self._fault(fault)
                    connection.abort()
                if number % _SWEEP_BATCH == 0:
                    await trio.lowlevel.checkpoint()
            self._links.drop_old()
            while self._turned_away and now - self._turned_away[0][0] >= _TURNED_AWAY_S:
                self._turned_away.popleft()[1].close()

    def _fault(self, fault: Exception) -> None:
        self._log.error("a fault of ours ended an exchange", exc_info=fault)

    def _limit_reached(self, key: str, limit: int) -> None:
        now = self._now()
        if now - self._limits_logged.get(key, -LIMIT_LOGGED_EVERY) >= LIMIT_LOGGED_EVERY:
            self._limits_logged[key] = now
            self._log.warning(f"refused a client: {key} = {limit} is reached; raise it if the engine can take more")

    def _unsolicited(self) -> None:
        """Log, once in a while, that the engine sent bytes which belong to no answer."""
        self._unsolicited_times += 1
        now, before = self._now(), self._unsolicited_logged_at
        if before is None or now - before >= _UNSOLICITED_LOG_INTERVAL:
            self._unsolicited_logged_at = now
            self._log.warning(
                "the engine sent bytes behind the end of an answer: they were dropped and its connection closed; "
                "if it goes on, look for a broken middleware in the engine",
                times=self._unsolicited_times,
            )

    def _probed(self, head: RequestHead) -> None:
        """Tell once what a liveness probe on /health does to a server that is merely starting."""
        if not self._probe_hint_given and head.target == b"/health" and b": kube-probe/" in head.fields:
            self._probe_hint_given = True
            self._log.warning(
                "a kubelet probes /health, which says 503 while the engine is not ready: use /livez for liveness, "
                'or set front_door.health = "alive"'
            )
