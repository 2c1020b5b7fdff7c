"""One run of the supervisor: its tasks, and how they hang together.

Rules:
* The loop decides; everything else sees or does. The front door asks the gate and reports to the journal.
* Whatever happens in here, the engine's processes do not outlive it: a fault of ours kills the tree on its way out.
"""

import os
import random
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import trio

from vllm_supervisor import __version__
from vllm_supervisor.adapters import clock, control_server
from vllm_supervisor.adapters.cgroup import Cgroup, Unavailable
from vllm_supervisor.adapters.child import owned
from vllm_supervisor.adapters.reaper import Reaper
from vllm_supervisor.adapters.run_fate import fate
from vllm_supervisor.adapters.signals import SignalReceived, Signals
from vllm_supervisor.adapters.upstream import Upstreams
from vllm_supervisor.core import facts, orders
from vllm_supervisor.core.admission import Gate, Rejection
from vllm_supervisor.core.events import Events
from vllm_supervisor.core.front_door_settings import FrontDoorSettings
from vllm_supervisor.core.ledger import RequestIds
from vllm_supervisor.core.lifecycle import ImpossibleFact, Node, Policy, State, engine_state
from vllm_supervisor.core.own_status import Ending, OwnStatus, own_status
from vllm_supervisor.core.plan import Plan
from vllm_supervisor.core.retry_after import retry_after
from vllm_supervisor.core.signal_policy import Action, Condition, decide
from vllm_supervisor.core.view import View
from vllm_supervisor.core.words import Cut, ExecutionState, Outcome
from vllm_supervisor.runtime.control import Control
from vllm_supervisor.runtime.engine_room import KEEP_ALIVE, EngineRoom
from vllm_supervisor.runtime.execute import Hands
from vllm_supervisor.runtime.front_door import FrontDoor
from vllm_supervisor.runtime.journal import LedgerJournal
from vllm_supervisor.runtime.ledger_writer import LedgerWriter
from vllm_supervisor.runtime.loop import Loop
from vllm_supervisor.runtime.recovery import recover_ledger
from vllm_supervisor.runtime.status import Identity, Status

DOCUMENT_WITHIN = 5.0  # seconds for the ledgers to be closed
LEDGER = "ledger"  # the ledgers' directory in the state directory
TICK = 1.0  # seconds between the small chores: refusals of a second, the progress of a load

SERVING = (Node.READY, Node.EMPTYING, Node.CUTTING)


@dataclass(frozen=True, slots=True)
class World:
    """Everything the composition root has made for one run."""

    plan: Plan
    run: str
    instance: str
    signals: Signals
    hangup_ignored: bool
    listeners: Sequence[socket.socket]
    control: socket.socket
    forward: Callable[[Sequence[bytes]], None]
    log: Any
    writer: LedgerWriter
    journal: LedgerJournal
    subreaper: bool
    cgroup: Cgroup | Unavailable
    policy: Policy
    on_terminal: bool


class Supervisor:
    """Ties the parts of one run together."""

    def __init__(self, world: World) -> None:
        """Construct the parts that need no event loop."""
        self._world = world
        self._plan = world.plan
        self._log = world.log
        self._journal = world.journal
        self.gate = Gate(limit=world.plan.config.front_door.max_in_flight, new_id=RequestIds(world.run))
        self.events = Events()
        self.loop = Loop(world.policy, now=clock.monotonic, on_fault=self._on_fault)
        self._engine = Upstreams()
        self._pointed = False
        self._phase = self.loop.state.phase
        self._recovering = False
        self._balanced = False
        self._room: EngineRoom | None = None
        self._nursery: trio.Nursery | None = None

    async def run(self) -> OwnStatus:
        """Live; return how to end."""
        world = self._world
        world.writer.start()
        self._journal.life()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._room = room = EngineRoom(
                self._plan,
                nursery=nursery,
                instance=world.instance,
                run=world.run,
                subreaper=world.subreaper,
                cgroup=world.cgroup,
                tell=self.loop.tell,
                forward=world.forward,
                log=self._log,
            )
            try:
                hands = Hands(
                    gate=self.gate,
                    room=room,
                    record=self._record,
                    tell=self.loop.tell,
                    document=self._document,
                )
                self._start_tasks(nursery, room)
                await nursery.start(partial(self._front_door().serve, list(world.listeners)))
                self._record(orders.Record("listening", f"listening on {', '.join(map(str, self._plan.listeners))}"))
                self.loop.tell(facts.Began())
                state = await self.loop.run(hands, after=self._after)
            except BaseException:
                room.kill_tree()
                raise
            nursery.cancel_scope.cancel()
        await trio.lowlevel.cancel_shielded_checkpoint()
        return self._status_of(state)

    # -- tasks -------------------------------------------------------------------------------------------------------

    def _start_tasks(self, nursery: trio.Nursery, room: EngineRoom) -> None:
        world = self._world
        control = Control(
            status=self._status(room),
            state=lambda: self.loop.state,
            gate=self.gate,
            events=self.events,
            tell=self.loop.tell,
            record=lambda event, sentence: self._record(orders.Record(event, sentence)),
            drain_budget=world.policy.drain_budget,
        )
        nursery.start_soon(control_server.serve, world.control, control, self._on_error)
        nursery.start_soon(self._take_signals, room)
        nursery.start_soon(self._tick)

    def _front_door(self) -> FrontDoor:
        config = self._plan.config.front_door
        return FrontDoor(
            gate=self.gate,
            journal=self._journal,
            settings=FrontDoorSettings(
                max_connections=config.max_connections,
                max_head=config.max_head,
                max_body=config.max_body,
                head_timeout=config.head_timeout,
                body_timeout=config.body_timeout,
                idle_timeout=config.idle_timeout,
                client_stall_timeout=config.client_stall_timeout,
                request_deadline=config.request_deadline,
                hold=config.hold,
                health=config.health,
                allow_paths=config.allow_paths,
                root_path=self._plan.root_path,
            ),
            engine=self._engine,
            view=self.view,
            exposition=self._exposition,
            retry_after=self._retry_after,
            log=self._log,
        )

    async def _take_signals(self, room: EngineRoom) -> None:
        reaper = Reaper(owned)
        while True:
            for one in await self._world.signals.receive():
                if one.signum == signal.SIGCHLD:
                    reaper.reap()
                else:
                    self._take_signal(one, room)

    def _take_signal(self, one: SignalReceived, room: EngineRoom) -> None:
        name = signal.Signals(one.signum).name
        state = self.loop.state
        who = f"pid {one.pid} (uid {one.uid}{f', {one.command}' if one.command else ''})" if one.pid else "the kernel"
        match decide(name, state.phase, self._conditions(name, state)):
            case Action.STOP | Action.HASTEN | Action.KILL:
                self.loop.tell(facts.StopRequested(f"{name} from {who}", one.signum))
            case Action.FORWARD:
                sent = room.current is not None and room.current.body.child.send(one.signum)
                self._say("signal", f"{name} from {who} was {'passed on' if sent else 'not passed on: no engine runs'}")
            case Action.IGNORE:
                self._say("signal", f"{name} from {who} was ignored")
            case action:
                self._say("signal", f"{name} from {who}: {action.value}")

    def _conditions(self, name: str, state: State) -> frozenset[Condition]:
        held = {
            Condition.IGNORED_AT_START: name == "SIGHUP" and self._world.hangup_ignored,
            Condition.TERMINAL: self._world.on_terminal,
            Condition.HASTENED: state.stops > 1,
            Condition.LISTED: name in self._plan.config.signals.forward,
        }
        return frozenset(condition for condition, holds in held.items() if holds)

    async def _tick(self) -> None:
        while True:
            await trio.sleep(TICK)
            self._journal.tick()

    # -- what the loop wants done ------------------------------------------------------------------------------------

    def _after(self, state: State) -> None:
        """Follow a new state: where requests go, and what the ledger says of it."""
        assert self._room is not None
        assert self._nursery is not None
        current = self._room.current
        serving = state.node in SERVING and current is not None
        if serving != self._pointed:
            self._pointed = serving
            self._engine.point_at(current.body.address if serving and current is not None else None, KEEP_ALIVE)
        if state.phase is not self._phase:
            self._phase = state.phase
            self._journal.phase(state.phase)
        if state.incarnation and not self._recovering:
            self._recovering = True  # the first sweep has just proven that nothing of an earlier run is left
            self._nursery.start_soon(self._recover)

    def _record(self, order: orders.Record) -> None:
        fields = dict(order.fields)
        self.events.add(order.event, order.sentence, at=clock.stamp(), level=order.level, **fields)
        getattr(self._log, order.level)(order.event, sentence=order.sentence, **fields)
        current = self._room.current if self._room is not None else None
        match order.event:
            case "spawned" if current is not None:
                self._journal.spawned(current.body.number, current.body.child.id)
            case "ready" if current is not None:
                self._journal.engine_processes(member.id for member in current.body.tree.look())
                self._journal.engine("ready", fields)
            case "exited":
                self._journal.engine_gone()
                self._journal.engine("exited", fields)

    def _say(self, event: str, sentence: str) -> None:
        self._record(orders.Record(event, sentence))

    def _document(self) -> None:
        self._nursery.start_soon(self._write_down)

    async def _recover(self) -> None:
        """Close what lost runs left open in the ledgers."""
        boot = self._journal.identity.boot
        try:
            found = await recover_ledger(
                self._plan.state_dir / LEDGER, self._journal, self._world.writer, lambda run: fate(run, boot)
            )
        except OSError as fault:
            self._record(orders.Record("recovery_failed", f"earlier ledgers cannot be read: {fault}", level="error"))
            return
        if found.runs:
            self._say(
                "recovered",
                f"closed the books of {found.runs} lost run(s): {found.opened} requests were open, "
                f"{found.stopped} executions proven stopped, {found.unknown} unknown",
            )

    async def _write_down(self) -> None:
        self._balanced = await self._journal.end(DOCUMENT_WITHIN, clean=True)
        await self._world.writer.aclose(DOCUMENT_WITHIN)
        self.loop.tell(facts.Documented())

    # -- what others ask ---------------------------------------------------------------------------------------------

    def view(self) -> View:
        """The state of the moment as the public address shows it."""
        state = self.loop.state
        engine = engine_state(state)
        ready = self.gate.reason is None and state.node is Node.READY
        return View(state.phase, engine, "" if ready else self.gate.sentence or state.problem, ready, state.started)

    def _retry_after(self, rejection: Rejection) -> int:
        state, now = self.loop.state, clock.monotonic()
        remaining = None
        if state.load_s is not None and state.spawned_at is not None:
            remaining = state.load_s - (now - state.spawned_at if state.node is Node.STARTING else 0.0)
        return retry_after(rejection, remaining, random.random())  # noqa: S311 - spreads a crowd, guards nothing

    def _exposition(self) -> bytes:
        return b""

    def _status(self, room: EngineRoom) -> Status:
        plan, world = self._plan, self._world
        identity = Identity(
            version=__version__,
            name=plan.name,
            run=world.run,
            pid=os.getpid(),
            began=clock.monotonic(),
            release=plan.config.release or plan.model,
            listeners=tuple(map(str, plan.listeners)),
        )
        return Status(
            identity,
            state=lambda: self.loop.state,
            gate=self.gate,
            policy=world.policy,
            now=clock.monotonic,
            members=lambda: room.current.body.tree.look() if room.current else [],
            address=lambda: room.current.body.address if room.current else None,
            load=lambda: room.current.load.line if room.current else "",
            requests=self._request_counts,
            executions=lambda: self._journal.executions,
            available_bytes=lambda: psutil.virtual_memory().available,
        )

    def _request_counts(self) -> dict[str, int]:
        outcomes = self._journal.requests.outcomes
        ended = {o.value: outcomes[o] for o in (Outcome.COMPLETED, Outcome.FAILED, Outcome.CANCELLED)}
        accepted = self._journal.requests.accepted
        return {"accepted": accepted, **ended, "open": accepted - sum(ended.values())}

    def _status_of(self, state: State) -> OwnStatus:
        signum = state.stop_signum
        ending = Ending(
            by_signal=None if signum is None else signal.Signals(signum).name,
            gave_up=state.give_up_status,
            cut=self._journal.requests.why[Cut.DRAIN_DEADLINE],
            unknown_executions=self._journal.executions[ExecutionState.UNKNOWN],
            unremoved_processes=int(state.unkillable),
            evidence_missing=not self._balanced,
        )
        return own_status(ending, reraise=self._plan.config.exit.reraise, is_pid1=self._world.policy.is_pid1)

    def _on_fault(self, fault: ImpossibleFact) -> None:
        self._log.error("fault", sentence=f"an impossible fact was ignored: {fault}", exc_info=fault)

    def _on_error(self, fault: BaseException) -> None:
        self._log.error("control_fault", sentence=f"the control socket failed to answer: {fault}", exc_info=fault)
