"""One request that goes to the engine: admission, acceptance on record, relay, and exactly one account of its end.

Rules:
* `gate.admit` is called when the head is complete; nothing is awaited between that decision and its registration.
* The acceptance is on record before one byte goes to the engine.
* A request is sent again, on a fresh connection, only if not one byte of it went out.
* Whatever happens, `finally` writes one outcome and one execution statement and gives the place back.
"""

from collections.abc import Callable
from dataclasses import dataclass

import trio

from vllm_supervisor.adapters.upstream import Upstreams
from vllm_supervisor.core import replies
from vllm_supervisor.core.admission import Gate, OpenRequest, Rejection
from vllm_supervisor.core.asked import choices_asked
from vllm_supervisor.core.completion import Judgement
from vllm_supervisor.core.ending import CUTS, MEANINGS, Ending
from vllm_supervisor.core.front_door_settings import FrontDoorSettings
from vllm_supervisor.core.http_semantics import RequestHead
from vllm_supervisor.core.journal import Journal, RequestOutcome
from vllm_supervisor.core.routes import Kind, Route
from vllm_supervisor.core.words import Cut, Evidence, ExecutionState
from vllm_supervisor.runtime.engine_links import EngineLinks
from vllm_supervisor.runtime.link import Link
from vllm_supervisor.runtime.pump import Pump
from vllm_supervisor.runtime.relay import Relay

# Refusals that a request may wait out, if the configuration lets it.
_HOLDABLE = frozenset({"engine_starting", "engine_restarting"})


@dataclass(frozen=True, slots=True)
class Desk:
    """What every exchange uses, the same for all of them."""

    gate: Gate
    journal: Journal
    settings: FrontDoorSettings
    upstreams: Upstreams
    links: EngineLinks
    pump: Pump
    retry_after: Callable[[Rejection], int]
    now: Callable[[], float]
    closing: Callable[[], bool]
    opened: trio.lowlevel.ParkingLot  # where held requests wait for admission to open


class Exchange:
    """One request of one client; `serve` is its whole life."""

    __slots__ = ("_client", "_cut_by", "_desk", "_head", "_ledgered", "_route", "_scope", "relay")

    def __init__(self, desk: Desk, client: Link, head: RequestHead, route: Route) -> None:
        """Prepare; nothing is decided yet."""
        self._desk = desk
        self._client = client
        self._head = head
        self._route = route
        self._ledgered = route.kind is Kind.GATED
        self._cut_by: Ending | None = None
        self._scope: trio.CancelScope | None = None
        self.relay: Relay | None = None

    async def serve(self, body: bytes) -> Relay | None:
        """Serve the request, of whose body `body` has come; None if it was refused (and told so)."""
        admitted = self._admit()
        if isinstance(admitted, Rejection) and self._desk.settings.hold and admitted.code in _HOLDABLE:
            admitted = await self._hold(admitted)
        if isinstance(admitted, Rejection):
            self._refuse(admitted)
            return None
        return await self._run(admitted, body)

    # -- admission ---------------------------------------------------------------------------------------------

    def _admit(self) -> OpenRequest | Rejection:
        desk = self._desk
        if self._ledgered:
            return desk.gate.admit(self._route.request_class, desk.now())
        if desk.upstreams.address is None:
            return self._not_up()
        return desk.gate.pass_through(desk.now())

    def _not_up(self) -> Rejection:
        rejection = self._desk.gate.check()
        if rejection is None or rejection.status != 503:
            rejection = Rejection(503, "engine_restarting", "the engine is not up")
        return rejection

    async def _hold(self, rejection: Rejection) -> OpenRequest | Rejection:
        """Let the request wait for admission to open. It has no place meanwhile, and leaves with its client."""
        desk = self._desk
        admitted: OpenRequest | Rejection = rejection
        with trio.move_on_after(desk.settings.hold) as scope:
            self._client.on_gone = lambda _clean: scope.cancel()
            while isinstance(admitted, Rejection) and admitted.code in _HOLDABLE:
                await desk.opened.park()
                admitted = self._admit()
        return admitted

    def _refuse(self, rejection: Rejection) -> None:
        desk = self._desk
        if self._ledgered:
            desk.journal.rejected(self._route.request_class, rejection.code)
        fields = replies.retry_after(desk.retry_after(rejection))
        self._client.write(
            replies.refusal(
                rejection.status,
                rejection.code,
                rejection.message,
                fields=fields,
                head_only=self._head.method == b"HEAD",
            )
        )

    # -- the admitted request ----------------------------------------------------------------------------------

    async def _run(self, request: OpenRequest, body: bytes) -> Relay:
        desk = self._desk
        relay = self.relay = Relay(
            desk.pump,
            self._client,
            self._head,
            request,
            desk.settings,
            ledgered=self._ledgered,
            closing=desk.closing,
            give_back=desk.links.give_back,
        )
        request.upgrade = self._head.upgrade
        request.admin = self._route.admin
        request.cut = self._cut
        try:
            if self._ledgered:
                relay.choices = choices_asked(request.request_class, body)
                await desk.journal.accepted(request)
            relay.prepare(body)
            await self._connect(relay, told=bool(body))
            if relay.ending is None:
                await relay.done.wait()
        finally:
            relay.end(Ending.STOPPED)
            request.cut = _already_over
            if self._ledgered:
                self._account(request, relay)
            desk.gate.release(request)
        return relay

    async def _connect(self, relay: Relay, *, told: bool) -> None:
        """Start the relay, unless something ended it first; `told`: the client needs no 100 to send its body."""
        if relay.ending is None and self._client.ended:
            relay.end(Ending.CLIENT_LEFT)
        fresh = False
        while relay.ending is None:
            try:
                with trio.CancelScope() as self._scope:
                    engine = await self._desk.links.take(fresh=fresh)
            except OSError:
                relay.end(Ending.ENGINE_FAILED)
                return
            finally:
                self._scope = None
            if relay.ending is not None:
                engine.close()
                return
            if self._head.expects_continue and not told:
                self._client.write(replies.CONTINUE)
                told = True
            if relay.start(engine):
                return
            if engine.fresh:
                relay.end(Ending.ENGINE_FAILED)
            fresh = True

    def _cut(self, cut: Cut) -> None:
        relay = self.relay
        if relay is not None:
            relay.end(CUTS[cut])
        if self._scope is not None:
            self._scope.cancel()

    # -- the account -------------------------------------------------------------------------------------------

    def _account(self, request: OpenRequest, relay: Relay) -> None:
        ending = relay.ending or Ending.STOPPED
        meaning = MEANINGS[ending]
        verdict = Judgement(meaning.outcome, meaning.why)
        running = False
        if relay.judge is not None:
            judged = relay.judge.judge()
            running = judged.running
            verdict = judged if ending is Ending.ANSWERED else Judgement(meaning.outcome, meaning.why, judged.marker)
        journal = self._desk.journal
        journal.execution(request.id, *_execution(relay, ending, running=running))
        first = request.first_byte_at
        journal.outcome(
            RequestOutcome(
                id=request.id,
                request_class=request.request_class,
                outcome=verdict.outcome,
                why=verdict.why,
                status=relay.status,
                stream=bool(request.stream),
                ended_by=meaning.ended_by,
                bytes=relay.bytes_out,
                first_byte_s=None if first is None else first - request.admitted_at,
                duration_s=self._desk.now() - request.admitted_at,
                marker=verdict.marker,
            )
        )


def _execution(relay: Relay, ending: Ending, *, running: bool) -> tuple[ExecutionState, Evidence]:
    """Say what the exchange knows of the engine's work; what comes later is the ledger's to add."""
    if not relay.sent_any:
        return ExecutionState.NOT_STARTED, Evidence.NONE
    if ending is Ending.ANSWERED or relay.answered:
        return (ExecutionState.RUNNING if running else ExecutionState.COMPLETED), Evidence.ANSWER
    return ExecutionState.RUNNING, Evidence.CONNECTION_CLOSED


def _already_over(_cut: Cut) -> None:
    """Stand in once the exchange has ended."""
