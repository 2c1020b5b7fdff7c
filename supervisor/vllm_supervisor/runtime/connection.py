"""One client's connection: heads in, each answered in order, until either side is done with it.

Rules:
* The pump collects the bytes of a head; the task wakes when it is complete, broken, too long, too late, or the
  client is gone. While a request is served, what comes beyond it waits (pipelining), bounded by one read.
* Health paths are answered whatever the limits are.
* After an answer that leaves bytes of the client unread, the connection lingers: we say that we are done, and read on
  for a while, so that a client that is still sending reads the answer instead of a reset (RFC 9112, 9.6).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from vllm_supervisor.adapters import sockets
from vllm_supervisor.adapters.http1 import parse_request
from vllm_supervisor.core import replies
from vllm_supervisor.core.admission import SATURATED, Rejection
from vllm_supervisor.core.ending import Ending
from vllm_supervisor.core.front_door_settings import FrontDoorSettings
from vllm_supervisor.core.http_semantics import BadRequest, RequestHead, broken_line, well_formed
from vllm_supervisor.core.routes import Kind, Route, Router
from vllm_supervisor.runtime.exchange import Desk, Exchange
from vllm_supervisor.runtime.link import Link
from vllm_supervisor.runtime.own_answers import OwnAnswers
from vllm_supervisor.runtime.pump import Parking

FLUSH_TIMEOUT = 5.0
LINGER_QUIET = 2.0
LINGER_TOTAL = 30.0
_END_OF_HEAD = b"\r\n\r\n"
_HEALTH = frozenset({Kind.LIVE, Kind.READY, Kind.STARTED})


@dataclass(slots=True)
class Hall:
    """What all connections share. `waiting` holds, oldest first, those that could be closed to make room."""

    desk: Desk
    own: OwnAnswers
    router: Router
    settings: FrontDoorSettings
    probed: Callable[[RequestHead], None]  # told when a health path said 503
    waiting: dict["Connection", None] = field(default_factory=dict)


class Connection:
    """See the module's rules; `run` is its whole life."""

    __slots__ = (
        "_discarded",
        "_end",
        "_exchange",
        "_expired",
        "_fault",
        "_first_byte_at",
        "_hall",
        "_health_only",
        "_idle_since",
        "_inbox",
        "_link",
        "_parking",
        "_scanned",
    )

    def __init__(self, hall: Hall, link: Link, *, health_only: bool) -> None:
        """`health_only`: accepted beyond the limit of connections."""
        self._hall = hall
        self._link = link
        self._health_only = health_only
        self._parking = Parking()
        self._inbox = b""
        self._scanned = 0
        self._end = 0  # where the first head in the inbox ends; 0 while it is not complete
        self._fault: BadRequest | None = None
        self._expired = False
        self._first_byte_at: float | None = None
        self._idle_since = hall.desk.now()
        self._exchange: Exchange | None = None
        self._discarded = 0
        self._listen()

    def _listen(self) -> None:
        self._link.on_bytes = self._on_bytes
        self._link.on_gone = self._on_gone
        self._link.on_drained = self._parking.wake

    # -- told by the pump --------------------------------------------------------------------------------------

    def _on_bytes(self, data: bytes) -> None:
        if self._first_byte_at is None:
            self._first_byte_at = self._hall.desk.pump.now
        self._inbox = self._inbox + data if self._inbox else data
        if self._end:
            self._link.pause()  # more than the request in hand: it waits
        else:
            self._scan()

    def _on_gone(self, _clean: bool) -> None:
        self._parking.wake()

    def _scan(self) -> None:
        """Look for the end of the first head in the inbox."""
        while self._inbox.startswith(b"\r\n"):
            self._inbox = self._inbox[2:]
        limit = self._hall.settings.max_head
        end = self._inbox.find(_END_OF_HEAD, max(0, self._scanned - 3))
        if 0 <= end <= limit:
            self._end = end + len(_END_OF_HEAD)
            self._parking.wake()
        elif end >= 0 or len(self._inbox) > limit:
            self._fault = BadRequest(431, f"the head is larger than {limit} bytes")
            self._parking.wake()
        elif broken_line(self._inbox):
            self._fault = BadRequest(400, "a line of the head does not end with CRLF")
            self._parking.wake()
        self._scanned = len(self._inbox)

    # -- the task ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve requests until the connection ends."""
        try:
            while await self._serve_one():
                self._listen()
                self._link.resume()
        finally:
            self._hall.waiting.pop(self, None)
            self._link.close()

    async def _serve_one(self) -> bool:
        """Serve the next request; False when the connection has ended."""
        raw = await self._next_head()
        if raw is None:
            return False
        settings = self._hall.settings
        if not well_formed(raw):
            return await self._refuse(BadRequest(400, "the request head is not valid HTTP/1.1"))
        head = parse_request(raw, max_body=settings.max_body)
        if isinstance(head, BadRequest):
            return await self._refuse(head)
        route = self._hall.router.route(head.method, head.target, upgrade=head.upgrade)
        if route.kind in {Kind.GATED, Kind.CHEAP} and not self._health_only:
            return await self._to_engine(head, route)
        return await self._answer(head, route)

    async def _next_head(self) -> bytes | None:
        """Wait for a whole head and take it from the inbox; None when there will be none (and all is said)."""
        waiting = self._hall.waiting
        self._idle_since = self._hall.desk.pump.now
        self._first_byte_at = self._idle_since if self._inbox else None
        self._scanned = 0
        if self._inbox:
            self._scan()
        waiting[self] = None
        while not (self._end or self._fault or self._expired or self._link.ended):
            await self._parking.wait()
        waiting.pop(self, None)  # gone already if it was chosen to make room
        if self._end:
            raw, self._inbox = self._inbox[: self._end], self._inbox[self._end :]
            self._end = 0
            return raw
        if self._fault is not None and not self._link.ended:
            await self._refuse(self._fault)
        return None

    async def _to_engine(self, head: RequestHead, route: Route) -> bool:
        if self._link.ended:
            return False
        body, self._inbox = self._inbox, b""
        exchange = Exchange(self._hall.desk, self._link, head, route)
        self._exchange = exchange
        relay = await exchange.serve(body)
        self._exchange = None
        if relay is None:
            await self._leave(linger=head.length != len(body))
            return False
        if relay.keep:
            self._inbox = relay.leftover + self._inbox
            return True
        if relay.ending in {Ending.CLIENT_LEFT, Ending.CLIENT_STALLED, Ending.STOPPED}:
            self._link.close(reset=relay.status is not None)
            return False
        await self._leave(linger=relay.body_pending, reset=relay.must_reset and relay.ending is not Ending.ANSWERED)
        return False

    async def _answer(self, head: RequestHead, route: Route) -> bool:
        """Answer what needs no engine."""
        own = self._hall.own
        keep = head.keep_alive and head.length == 0 and not self._hall.desk.closing() and not self._health_only
        if route.kind in _HEALTH:
            reply = own.health(route.kind, head, close=not keep)
            if reply.startswith(b"HTTP/1.1 503"):
                self._hall.probed(head)
        elif route.kind is Kind.METRICS:
            reply = await own.metrics(head, close=not keep)
        elif route.kind is Kind.DANGEROUS:
            keep = False
            reply = own.forbidden(head)
        else:
            keep = False
            reply = self._too_many(head, route)
        self._link.write(reply)
        if keep:
            return not self._link.outbox or await self._flushed()
        await self._leave(linger=head.length != 0)
        return False

    def _too_many(self, head: RequestHead, route: Route) -> bytes:
        desk = self._hall.desk
        if route.kind is Kind.GATED:
            desk.journal.rejected(route.request_class, SATURATED)
        rejection = Rejection(429, SATURATED, "too many connections are open; try again")
        fields = replies.retry_after(desk.retry_after(rejection))
        return replies.refusal(429, SATURATED, rejection.message, fields=fields, head_only=head.method == b"HEAD")

    async def _refuse(self, bad: BadRequest) -> bool:
        self._link.write(replies.refusal(bad.status, "bad_request", bad.message))
        await self._leave(linger=True)
        return False

    # -- the end -----------------------------------------------------------------------------------------------

    async def _flushed(self) -> bool:
        """Wait until the client has taken what is written; False if it does not."""
        self._listen()
        with trio.move_on_after(FLUSH_TIMEOUT):
            while self._link.outbox and not self._link.closed:
                await self._parking.wait()
        return not self._link.outbox and not self._link.deaf

    async def _leave(self, *, linger: bool, reset: bool = False) -> None:
        """Close, after what is written has gone out and, with `linger`, the client has stopped sending."""
        link = self._link
        link.on_bytes = self._discard
        link.on_gone = self._on_gone
        link.on_drained = self._parking.wake
        flushed = not link.outbox or await self._flushed()
        if flushed and linger and not link.ended and not reset:
            await self._linger()
        link.close(reset=reset or not flushed)

    async def _linger(self) -> None:
        link, now = self._link, self._hall.desk.now
        link.on_bytes = self._discard
        sockets.finish_sending(link.sock)
        link.resume()
        self._hall.waiting[self] = None
        self._expired = False
        until = now() + LINGER_TOTAL
        while not (link.ended or self._expired) and now() < until:
            before = self._discarded
            with trio.move_on_after(LINGER_QUIET):
                while not (link.ended or self._expired):
                    await self._parking.wait()
            if self._discarded == before:
                break

    def _discard(self, data: bytes) -> None:
        self._discarded += len(data)

    # -- told by the front door --------------------------------------------------------------------------------

    def expire(self) -> None:
        """Make room: close without a word, unless a request is being served."""
        self._expired = True
        self._parking.wake()

    def tick(self, now: float) -> None:
        """Look at the time limits."""
        if self._exchange is not None:
            if self._exchange.relay is not None:
                self._exchange.relay.tick(now)
        elif self._first_byte_at is None:
            if now - self._idle_since >= self._hall.settings.idle_timeout:
                self.expire()
        elif now - self._first_byte_at >= self._hall.settings.head_timeout and not self._end:
            self._fault = BadRequest(408, "the request head did not arrive in time")
            self._parking.wake()
