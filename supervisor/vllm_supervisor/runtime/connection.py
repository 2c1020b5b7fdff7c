"""One client's connection: heads in, each answered in order, until either side is done with it.

Rules:
* The usual way needs no task: the pump hands bytes over, a complete head is decided and sent on at once, and the end of
  the exchange leads to the next head, all by plain calls. The task (`run`) owns the lifetime, and does what must wait.
* A head is searched once, however it is cut into packets; few empty lines may stand before it.
* What is usual is served at once. A large head, or much that came with it, waits until those are served who ask for less.
* While a request is served, what the client sends beyond it waits (pipelining), bounded by one read.
* Health paths are answered whatever the limits are.
* After an answer that leaves bytes of the client unread, the connection lingers: we say that we are done, and read on
  for a while, so that a client that is still sending reads the answer instead of a reset (RFC 9112, 9.6).
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import trio

from vllm_supervisor.adapters import sockets
from vllm_supervisor.adapters.http1 import RequestHeads
from vllm_supervisor.core import replies
from vllm_supervisor.core.admission import SATURATED
from vllm_supervisor.core.ending import Ending
from vllm_supervisor.core.front_door_settings import FrontDoorSettings
from vllm_supervisor.core.http_semantics import MAX_FIELDS, BadRequest, RequestHead, broken_line
from vllm_supervisor.core.routes import Kind, Route, Router
from vllm_supervisor.runtime.desk import Desk
from vllm_supervisor.runtime.exchange import Exchange
from vllm_supervisor.runtime.link import Link
from vllm_supervisor.runtime.own_answers import OwnAnswers
from vllm_supervisor.runtime.pump import Parking
from vllm_supervisor.runtime.relay import Relay

FLUSH_TIMEOUT = 5.0
LINGER_QUIET = 2.0
LINGER_TOTAL = 30.0
_TURN = 16  # requests of one client that are answered before others have their turn
_HEAD_AT_ONCE = 4 * 1024  # bytes of a head; a larger one is put off
_BYTES_AT_ONCE = 16 * 1024  # the same with what came behind it
_MAX_TARGET = 8 * 1024  # bytes, as in nginx
_MAX_EMPTY = 10  # empty lines before a request, as in Apache httpd
_END_OF_HEAD = b"\r\n\r\n"
_TO_ENGINE = (Kind.GATED, Kind.CHEAP)
_BROKEN_OFF = frozenset({Ending.CLIENT_LEFT, Ending.CLIENT_STALLED, Ending.STOPPED})


@dataclass(slots=True)
class Hall:
    """What all connections share. `waiting` holds, oldest first, those that could be closed to make room."""

    desk: Desk
    own: OwnAnswers
    router: Router
    settings: FrontDoorSettings
    heads: RequestHeads
    probed: Callable[[RequestHead], None]  # told when a health path said 503
    waiting: OrderedDict["Connection", None] = field(default_factory=OrderedDict)
    connections: set["Connection"] = field(default_factory=set)


class Connection:
    """See the module's rules; `run` is its whole life."""

    __slots__ = (
        "_answered",
        "_begin",
        "_busy",
        "_checked",
        "_discarded",
        "_exchange",
        "_first_byte_at",
        "_hall",
        "_health_only",
        "_idle_since",
        "_inbox",
        "_link",
        "_looping",
        "_parking",
        "_scan_from",
        "_work",
    )

    def __init__(self, hall: Hall, link: Link, *, health_only: bool) -> None:
        """`health_only`: accepted beyond the limit of connections."""
        self._hall = hall
        self._link = link
        self._health_only = health_only
        self._parking = Parking(hall.desk.pump)
        self._work: Callable[[], Awaitable[None]] | None = None
        self._inbox: bytes | bytearray = b""  # the latter where it came in pieces
        self._begin = 0  # where the head in it begins
        self._scan_from = 0  # where the search for its end goes on
        self._checked = 0  # up to where its line ends are known to be whole
        self._first_byte_at: float | None = None
        self._idle_since = 0.0
        self._busy = False  # a request is being served, or the connection is about to end
        self._looping = False
        self._exchange: Exchange | None = None
        self._discarded = 0
        self._answered = False  # it has been served a request
        self._rest()

    async def run(self) -> None:
        """Do what must wait, until the connection ends."""
        try:
            while not self._link.closed:
                await self._parking.wait()
                work, self._work = self._work, None
                if work is not None and not self._link.closed:
                    await self._do(work)
        finally:
            self._hall.waiting.pop(self, None)
            if self._exchange is not None:
                self._exchange.stop()
            self._link.close()

    async def _do(self, work: Callable[[], Awaitable[None]]) -> None:
        pump = self._hall.desk.pump
        pump.at_work += 1
        try:
            await work()
        finally:
            pump.at_work -= 1

    def _later(self, work: Callable[[], Awaitable[None]]) -> None:
        """Let the task do `work`."""
        self._work = work
        self._parking.wake()

    def _close(self, *, reset: bool = False) -> None:
        self._hall.waiting.pop(self, None)
        self._hall.connections.discard(self)  # now, not when its task ends: a newcomer may count them before that
        self._busy = True
        self._link.close(reset=reset)
        self._parking.wake()

    # -- heads -------------------------------------------------------------------------------------------------

    def _rest(self) -> None:
        """Wait for the next head."""
        link = self._link
        link.on_bytes = self._on_bytes
        link.on_gone = self._on_gone
        self._busy = False
        self._idle_since = self._hall.desk.pump.now
        self._first_byte_at = self._idle_since if self._inbox else None
        self._begin = self._scan_from = self._checked = 0
        self._hall.waiting[self] = None

    def _on_gone(self, _clean: bool) -> None:
        self._close()

    def _on_bytes(self, data: bytes) -> None:
        if not self._inbox:
            self._inbox = data
        else:
            if isinstance(self._inbox, bytes):
                self._inbox = bytearray(self._inbox)
            self._inbox += data
        if self._busy:
            self._link.pause()
        else:
            self._go_on()

    def _go_on(self) -> None:
        """Serve the requests in the inbox, until one has to be waited for."""
        if self._looping:
            return
        self._looping = True
        served = 0
        try:
            while self._inbox and not self._busy and self._serve_next():
                served += 1
                if served == _TURN and self._inbox and not self._busy:
                    self._busy = True
                    self._link.pause()
                    self._link.defer(self._next_turn)
        finally:
            self._looping = False

    def _next_turn(self) -> None:
        self._busy = False
        self._go_on()
        if not self._busy:
            self._link.resume()

    def _serve_next(self) -> bool:
        """Serve the first request in the inbox; False if it is not complete."""
        inbox, begin = self._inbox, self._begin
        while inbox.startswith(b"\r\n", begin):
            begin += 2
            if begin > 2 * _MAX_EMPTY:
                self._refuse(BadRequest(400, "too many empty lines before a request"))
                return False
        limit = self._hall.settings.max_head
        end = inbox.find(_END_OF_HEAD, max(begin, self._scan_from))
        if 0 <= end <= begin + limit:
            end += len(_END_OF_HEAD)
            raw = bytes(inbox[begin:end])
            self._inbox = bytes(inbox[end:])
            self._hall.waiting.pop(self, None)
            self._busy = self._answered = True
            self._begin = self._scan_from = self._checked = 0
            if end - begin <= _HEAD_AT_ONCE and len(inbox) <= _BYTES_AT_ONCE:
                self._serve(raw)
            else:
                self._link.defer(partial(self._serve_later, raw))
            return True
        if self._first_byte_at is None:
            self._first_byte_at = self._hall.desk.pump.now
        if end >= 0 or len(inbox) > begin + limit:
            self._refuse(BadRequest(431, f"the head is larger than {limit} bytes"))
        elif broken_line(inbox, max(begin, self._checked)):
            self._refuse(BadRequest(400, "a line of the head does not end with CRLF"))
        self._begin = begin
        self._checked = len(inbox) - inbox.endswith(b"\r")
        self._scan_from = max(begin, len(inbox) - len(_END_OF_HEAD) + 1)
        return False

    def _serve_later(self, raw: bytes) -> None:
        if raw.count(b"\r\n") > MAX_FIELDS + 2:
            self._refuse(BadRequest(431, f"more than {MAX_FIELDS} header fields"))
            return
        self._serve(raw)
        self._go_on()

    def _serve(self, raw: bytes) -> None:
        hall = self._hall
        head = hall.heads.read(raw)
        if isinstance(head, BadRequest):
            self._refuse(head, fields=hall.own.cors_fields(raw))
            return
        if len(head.target) > _MAX_TARGET:
            self._refuse(BadRequest(414, f"the target is larger than {_MAX_TARGET} bytes"))
            return
        route = hall.router.route(head.method, head.target, upgrade=head.upgrade)
        if route.kind in _TO_ENGINE and not self._health_only:
            body, self._inbox = bytes(self._inbox), b""
            exchange = self._exchange = Exchange(
                hall.desk, self._link, head, route, over=self._exchange_over, later=self._later
            )
            exchange.begin(body)
        else:
            self._answer(head, route)

    # -- answers -----------------------------------------------------------------------------------------------

    def _exchange_over(self, relay: Relay | None) -> None:
        """Go on to the next request, or end the connection."""
        exchange, self._exchange = self._exchange, None
        if relay is None:
            self._leave(linger=exchange is not None and not exchange.body_complete)
        elif relay.keep:
            self._inbox = relay.upload.rest
            self._rest()
            self._link.resume()
            if self._inbox:
                self._go_on()
        elif relay.ending in _BROKEN_OFF:
            self._close(reset=relay.status is not None)
        else:
            self._leave(
                linger=not relay.upload.complete, reset=relay.must_reset and relay.ending is not Ending.ANSWERED
            )

    def _answer(self, head: RequestHead, route: Route) -> None:
        """Answer what needs no engine."""
        own = self._hall.own
        keep = head.keep_alive and head.length == 0 and not self._hall.desk.closing() and not self._health_only
        if route.kind is Kind.METRICS:
            self._later(partial(self._metrics, head, keep=keep))
        elif route.kind is Kind.DANGEROUS:
            self._reply(own.forbidden(head), head, keep=False)
        elif route.kind is Kind.SERVER:
            self._reply(own.methods(head, close=not keep), head, keep=keep)
        elif route.kind in _TO_ENGINE:
            self._reply(self._too_many(head, route), head, keep=False)
        else:
            reply = own.health(route.kind, head, close=not keep)
            if reply.startswith(b"HTTP/1.1 503"):
                self._hall.probed(head)
            self._reply(reply, head, keep=keep)

    async def _metrics(self, head: RequestHead, *, keep: bool) -> None:
        reply = await self._hall.own.metrics(head, self._link.peer, close=not keep)
        if not self._link.closed:
            self._reply(reply, head, keep=keep)
            self._go_on()

    def _reply(self, reply: bytes, head: RequestHead, *, keep: bool) -> None:
        self._link.write(reply)
        if self._link.ended:
            self._close()
        elif keep and not self._link.outbox:
            self._rest()
            self._link.resume()
        else:
            self._leave(linger=head.length != 0)

    def _too_many(self, head: RequestHead, route: Route) -> bytes:
        desk = self._hall.desk
        if route.kind is Kind.GATED:
            desk.journal.rejected(route.request_class, SATURATED)
        return replies.crowded(self._hall.own.cors_fields(head.fields), head_only=head.method == b"HEAD")

    def _refuse(self, bad: BadRequest, *, fields: bytes = b"") -> None:
        self._link.write(replies.refusal(bad.status, "bad_request", bad.message, fields=bad.fields + fields))
        self._leave(linger=True)

    # -- the end -----------------------------------------------------------------------------------------------

    def _leave(self, *, linger: bool, reset: bool = False) -> None:
        """Close, after what is written has gone out and, with `linger`, the client has stopped sending."""
        self._busy = True
        self._inbox = b""
        self._hall.waiting.pop(self, None)
        link = self._link
        if link.ended or not (linger or link.outbox):
            self._close(reset=reset)
            return
        link.on_bytes = self._discard
        link.on_gone = self._on_gone
        link.on_drained = self._parking.wake
        self._later(partial(self._part, linger=linger and not reset, reset=reset))

    async def _part(self, *, linger: bool, reset: bool) -> None:
        link = self._link
        with trio.move_on_after(FLUSH_TIMEOUT):
            while link.outbox and not link.closed:
                await self._parking.wait()
        flushed = not link.outbox
        if flushed and linger and not link.closed:
            await self._linger()
        link.close(reset=reset or not flushed)

    async def _linger(self) -> None:
        link, now = self._link, self._hall.desk.now
        sockets.finish_sending(link.sock)
        link.resume()
        self._hall.waiting[self] = None
        until = now() + LINGER_TOTAL
        while not link.closed and now() < until:
            before = self._discarded
            with trio.move_on_after(LINGER_QUIET):
                while not link.closed:
                    await self._parking.wait()
            if self._discarded == before:
                break

    def _discard(self, data: bytes) -> None:
        self._discarded += len(data)

    # -- told by the front door --------------------------------------------------------------------------------

    @property
    def idle_since(self) -> float:
        """Since when it has had no request."""
        return self._idle_since

    def expire(self) -> None:
        """Make room. Who has sent nothing since its last answer finds its connection closed, as at its idle limit."""
        if self._exchange is None and not self._link.outbox and (self._first_byte_at is not None or not self._answered):
            self._link.write(replies.crowded())
        self._close()

    def abort(self) -> None:
        """Close for an internal error."""
        self._close()

    def tick(self, now: float) -> None:
        """Look at the time limits."""
        if self._exchange is not None:
            self._exchange.tick(now)
        elif self._busy:
            return
        elif self._first_byte_at is None:
            if now - self._idle_since >= self._hall.settings.idle_timeout:
                self._close()
        elif now - self._first_byte_at >= self._hall.settings.head_timeout:
            self._refuse(BadRequest(408, "the request head did not arrive in time"))
