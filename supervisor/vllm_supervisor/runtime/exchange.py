"""One request that goes to the engine: admission, acceptance on record, relay, and exactly one account of its end.

Rules:
* A request that would be refused is refused as soon as its head is complete. Else its body comes first (`BodyBuffer`):
  a client that sends slowly, or not at all, has a connection, but no place, and no drain waits for it.
* `gate.admit` is called when the body is there, or enough of it that it flows; nothing is waited for between that
  decision and its registration.
* The acceptance is on record before one byte goes to the engine.
* A request is sent again, once and on a new connection, only if the engine cannot do it twice: not one byte of it went
  out, or a connection that had been idle ended before its answer began, and the engine has not read the request to its
  end or it only asks (`REPEATABLE`).
* All goes as far as it can without waiting, usually the whole way; only what must wait needs the connection's task.
* However it ends, the place is given back and one outcome with one execution statement goes to the journal, at once and
  by plain code; the journal writes it with the turn.
"""

from collections.abc import Awaitable, Callable

import trio

from vllm_supervisor.core import replies
from vllm_supervisor.core.admission import SATURATED, OpenRequest, Rejection
from vllm_supervisor.core.asked import choices_asked
from vllm_supervisor.core.completion import Judgement
from vllm_supervisor.core.ending import CUTS, MEANINGS, Ending
from vllm_supervisor.core.http_semantics import RequestHead
from vllm_supervisor.core.journal import RequestOutcome
from vllm_supervisor.core.routes import Kind, Route
from vllm_supervisor.core.words import Cut, Evidence, ExecutionState, Outcome
from vllm_supervisor.runtime.body_buffer import BodyBuffer
from vllm_supervisor.runtime.desk import Desk
from vllm_supervisor.runtime.engine_links import EngineLink
from vllm_supervisor.runtime.link import Link
from vllm_supervisor.runtime.relay import Relay

# Refusals that a request may wait out, if the configuration lets it.
_HOLDABLE = frozenset({"engine_starting", "engine_restarting"})


class Exchange:
    """One request of one client.

    `over` is called once, when it is refused (with None) or has ended (with its relay); `later` lets the connection's
    task do what must wait.
    """

    # What begins so stands here, once, not in every exchange.
    _body = b""
    _buffer: BodyBuffer | None = None  # where the body did not come with the head
    _held = False  # waits for admission to open
    _waited = False  # has done so, as long as it may
    _refused = False  # has ended before it was admitted
    _recheck_due = False
    _broken: Ending | None = None  # what was found wrong with the body meanwhile
    _request: OpenRequest | None = None
    _relay: Relay | None = None
    _scope: trio.CancelScope | None = None

    def __init__(
        self,
        desk: Desk,
        client: Link,
        head: RequestHead,
        route: Route,
        *,
        over: Callable[[Relay | None], None],
        later: Callable[[Callable[[], Awaitable[None]]], None],
    ) -> None:
        """Prepare; nothing is decided yet."""
        self._desk = desk
        self._client = client
        self._head = head
        self._request_class = route.request_class
        self._admin = route.admin
        self._ledgered = route.kind is Kind.GATED
        self._over = over
        self._later = later
        self._entered = not self._ledgered  # the journal knows of the request

    def begin(self, body: bytes) -> None:
        """Begin, with what has come of the body."""
        if 0 <= self._head.length <= len(body):  # all of it, as usual
            self._body = body
        else:
            self._buffer = BodyBuffer(self._desk, self._client, self._head.length, self._body_came, self._turn_away)
        self._follow(self._ask(), body)

    @property
    def arriving_since(self) -> float:
        """Since when the body is waited for."""
        return self._desk.now() if self._buffer is None else self._buffer.progress.began

    @property
    def body_complete(self) -> bool:
        """Whether the client has sent all of its body, as far as an exchange without a relay knows."""
        return self._buffer is None or self._buffer.upload.complete

    def stop(self) -> None:
        """End it, because the front door itself is taken down."""
        self._desk.arriving.pop(self, None)
        if self._relay is not None:
            self._relay.end(Ending.STOPPED)
            if not self._entered:
                self._forget()

    def tick(self, now: float) -> None:
        """Look at the time limits."""
        if self._relay is not None:
            self._relay.tick(now)
        elif (
            self._buffer is not None
            and self in self._desk.arriving
            and self._buffer.progress.too_slow(self._desk.settings, now)
        ):
            self._turn_away(Ending.BODY_TOO_SLOW)

    # -- admission ---------------------------------------------------------------------------------------------

    def _ask(self) -> OpenRequest | Rejection | None:
        """Admit the request if its body is there; else say whether it would be refused just now (None: it would not)."""
        desk, gate = self._desk, self._desk.gate
        waits = self._buffer is not None and not self._buffer.ready
        if self._ledgered:
            if waits:
                return gate.check(admin=self._admin)
            return gate.admit(self._request_class, desk.pump.now, admin=self._admin)
        if desk.upstreams.address is None:
            return self._not_up()
        return gate.check_passing() if waits else gate.pass_through(desk.pump.now)

    def _may_hold(self, rejection: Rejection) -> bool:
        return bool(self._desk.settings.hold) and not self._waited and rejection.code in _HOLDABLE

    def _follow(self, answer: OpenRequest | Rejection | None, body: bytes = b"") -> None:
        """Do what was decided; `body` is what has come of the body, and nobody has taken yet."""
        if answer is None:
            self._await_body(body)
        elif not isinstance(answer, Rejection):
            self._enter(answer)
        elif self._may_hold(answer):
            self._desk.arriving.pop(self, None)
            self._held = True  # before the body is read on, which may break or be whole at once
            self._later(self._wait_for_admission)
            if self._buffer is not None and not self._buffer.ready:
                self._buffer.begin(body)
        else:
            self._refuse(answer)

    def _await_body(self, body: bytes) -> None:
        """Let the body come, of which `body` has come just now, and ask for it if the client holds it back."""
        buffer = self._buffer
        if buffer is None:
            return
        self._desk.arriving[self] = None
        self._client.on_gone = self._left
        if self._head.expects_continue and not body and not buffer.progress.received:
            self._client.write(replies.CONTINUE)
        buffer.begin(body)

    def _body_came(self) -> None:
        """Go on, now that the body is there, unless admission is still waited for."""
        if not (self._held or self._refused):
            self._desk.arriving.pop(self, None)
            self._follow(self._ask())

    def recheck(self) -> None:
        """Refuse before long, if admission has closed while the body comes."""
        if not self._recheck_due:
            self._recheck_due = True
            self._client.defer(self._recheck)

    def _recheck(self) -> None:
        self._recheck_due = False
        if self in self._desk.arriving:
            answer = self._ask()
            if isinstance(answer, Rejection) and not self._may_hold(answer):
                self._refuse(answer)

    def evict(self) -> None:
        """Make room: refuse the client, whose body is still to come, and take it for gone."""
        desk, head = self._desk, self._head
        if self._ledgered:
            desk.journal.rejected(self._request_class, SATURATED)
        fields = b"" if desk.settings.cors is None else desk.settings.cors.fields(head.fields)
        self._client.write(replies.crowded(fields, head_only=head.method == b"HEAD"))
        self._client.give_up()

    def _left(self, _clean: bool) -> None:
        """Take note that the client went before its body was there: nothing of the request is in the ledger."""
        self._give_up()

    def _give_up(self) -> None:
        """End before admission: whatever is still put off finds that there is nothing left to do."""
        self._refused = True
        self._desk.arriving.pop(self, None)
        if self._buffer is not None:
            self._buffer.stop()
        self._over(None)

    def _not_up(self) -> Rejection:
        rejection = self._desk.gate.check()
        if rejection is None or rejection.status != 503:
            rejection = Rejection(503, "engine_restarting", "the engine is not up")
        return rejection

    async def _wait_for_admission(self) -> None:
        answer = await self._hold()
        self._held, self._waited = False, True
        if self._broken is not None:
            self._turn_away(self._broken)
            return
        if self._buffer is not None:
            self._buffer.restart()
        self._follow(answer)

    async def _hold(self) -> OpenRequest | Rejection | None:
        """Let the request wait for admission to open. It has no place meanwhile, and leaves with its client."""
        desk = self._desk
        answer = self._ask()
        with trio.move_on_after(desk.settings.hold) as scope:
            self._scope = scope
            self._client.on_gone = lambda _clean: scope.cancel()
            while isinstance(answer, Rejection) and answer.code in _HOLDABLE:
                if self._broken is None:
                    await desk.changed.park()
                if self._client.ended or self._broken is not None:  # also in the same moment as admission opened
                    break
                answer = self._ask()
        self._scope = None
        return answer

    def _refuse(self, rejection: Rejection) -> None:
        desk = self._desk
        fields = replies.retry_after(desk.retry_after(rejection))
        if rejection.code == SATURATED:
            desk.limit_reached("front_door.max_in_flight", desk.gate.limit)
        head, cors = self._head, desk.settings.cors
        preflight = None
        if cors is not None:
            preflight = cors.preflight(head.method, head.fields)
            fields += cors.fields(head.fields)
        head_only = head.method == b"HEAD"
        self._reject(
            rejection.code,
            replies.refusal(rejection.status, rejection.code, rejection.message, fields=fields, head_only=head_only)
            if preflight is None
            else replies.preflight(*preflight),
        )

    def _turn_away(self, ending: Ending) -> None:
        """Refuse for what is wrong with the body, before the request was admitted."""
        if self._refused:
            return
        if self._held:
            self._broken = ending
            if self._scope is not None:
                self._scope.cancel()
            return
        meaning, cors = MEANINGS[ending], self._desk.settings.cors
        fields = b"" if cors is None else cors.fields(self._head.fields)
        self._reject(
            meaning.why,
            replies.failure(
                meaning.status, meaning.why, meaning.message, fields=fields, head_only=self._head.method == b"HEAD"
            ),
        )

    def _reject(self, code: str, reply: bytes) -> None:
        if self._ledgered:
            self._desk.journal.rejected(self._request_class, code)
        self._client.write(reply)
        self._give_up()

    # -- the admitted request ----------------------------------------------------------------------------------

    def _enter(self, request: OpenRequest) -> None:
        """Take the request in, and send it once its acceptance is on record."""
        desk = self._desk
        self._request = request
        request.upgrade = self._head.upgrade
        request.cut = self._cut
        relay = self._relay = Relay(
            desk, self._client, self._head, request, over=self._ended, resend=self._resend, ledgered=self._ledgered
        )
        body, self._body = self._body, b""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            body = buffer.take()
        if self._ledgered and (len(body) == self._head.length if buffer is None else buffer.upload.complete):
            relay.choices = choices_asked(request.request_class, body)
        if buffer is None:
            relay.begin(body)
        else:
            relay.begin_with(buffer.upload, body, buffer.progress)
        if not self._ledgered:
            self._launch(relay)
            return
        desk.journal.accept(request, self._on_record)

    def _on_record(self, written: bool) -> None:
        """Go on, now that it is known whether the acceptance is in the file."""
        relay = self._relay
        if relay is None:
            return
        if not written:
            self._later(self._wait_for_record)
            return
        self._entered = True
        try:
            self._go_on(relay)
        except Exception as fault:  # noqa: BLE001 - our fault ends this exchange, not the turn with all others
            self._client.fail(fault)

    def _go_on(self, relay: Relay) -> None:
        if relay.ending is None:
            self._launch(relay)
        else:
            self._ended()

    async def _wait_for_record(self) -> None:
        request, relay = self._request, self._relay
        if request is None or relay is None:
            return
        if relay.ending is not None:
            self._forget()
            return
        self._entered = True  # the journal enters it before it waits
        if not await self._desk.journal.accepted(request):
            relay.end(Ending.LEDGER)
        self._go_on(relay)

    def _launch(self, relay: Relay) -> None:
        """Send the request on an idle connection, or on a new one if there is none."""
        while relay.ending is None:
            engine = self._desk.links.idle()
            if engine is None:
                self._later(self._connect)
                break
            if relay.start(engine):
                break

    def _resend(self) -> None:
        self._later(self._connect)

    async def _connect(self) -> None:
        """Send the request on a new connection."""
        relay = self._relay
        if relay is None:
            return
        engine: EngineLink | None = None
        try:
            with trio.CancelScope() as self._scope:
                engine = await self._desk.links.connect()
        except OSError:
            relay.end(Ending.ENGINE_FAILED)
            return
        finally:
            self._scope = None
        if engine is None:  # the exchange has ended meanwhile, and with it the waiting
            return
        if relay.ending is not None:
            engine.close()
            return
        if not relay.start(engine):
            relay.end(Ending.ENGINE_FAILED)

    def _cut(self, cut: Cut) -> bool:
        return self._relay is not None and self._relay.end(CUTS[cut])

    # -- the account -------------------------------------------------------------------------------------------

    def _ended(self) -> None:
        """Account for the exchange. An end before the journal knows of the request waits until it does."""
        request, relay = self._request, self._relay
        if request is None or relay is None or not self._entered:
            return
        if self._scope is not None:
            self._scope.cancel()
        request.cut = _already_over
        try:
            if self._ledgered:
                self._account(request, relay)
        finally:  # a fault of the books must not keep the place
            self._desk.gate.release(request)
            self._relay = None  # no ring is left for the collector
            self._over(relay)

    def _forget(self) -> None:
        """End what has ended before anything of it was on record: only its place is given back."""
        self._entered, self._ledgered = True, False
        self._ended()

    def _account(self, request: OpenRequest, relay: Relay) -> None:
        ending = relay.ending or Ending.STOPPED
        meaning = MEANINGS[ending]
        outcome, why, marker, judged = meaning.outcome, meaning.why, "", None
        if relay.judge is not None:
            judged = relay.judge.judge()
            request.engine_id = judged.engine_id or request.engine_id
            marker = judged.marker
            if ending is Ending.ANSWERED:
                outcome, why = judged.outcome, judged.why
        admitted, first = request.admitted_at, request.first_byte_at
        ended = RequestOutcome(
            request.id,
            request.request_class,
            outcome,
            why,
            relay.status,
            bool(request.stream),
            meaning.ended_by,
            relay.bytes_out,
            None if first is None else first - admitted,
            self._desk.now() - admitted,
            marker,
        )
        self._desk.journal.ended(ended, *_execution(relay, ending, judged))


def _execution(relay: Relay, ending: Ending, judged: Judgement | None) -> tuple[ExecutionState, Evidence]:
    """Say what the exchange knows of the engine's work; what comes later is the ledger's to add.

    A whole answer that tells an error or an abort says that the work has stopped, not that it was completed.
    """
    if not relay.sent_any:
        return ExecutionState.NOT_STARTED, Evidence.NONE
    if ending is Ending.ANSWERED or relay.answered:
        if judged is not None and judged.running:
            return ExecutionState.RUNNING, Evidence.ANSWER
        stopped = judged is not None and judged.outcome is not Outcome.COMPLETED
        return (ExecutionState.CONFIRMED_STOPPED if stopped else ExecutionState.COMPLETED), Evidence.ANSWER
    return ExecutionState.RUNNING, Evidence.CONNECTION_CLOSED


def _already_over(_cut: Cut) -> bool:
    """Stand in once the exchange has ended."""
    return False
