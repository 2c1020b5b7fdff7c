"""One run of the supervisor: its tasks, and how they hang together.

Rules:
* The loop decides; everything else sees or does. The front door asks the gate and reports to the journal.
* Whatever happens in here, the engine's processes do not outlive it: a fault of ours kills the tree on its way out.
"""

from functools import partial

import trio

from vllm_supervisor.adapters import clock
from vllm_supervisor.adapters.control_server import Server
from vllm_supervisor.adapters.upstream import Upstreams
from vllm_supervisor.core import facts, orders, timeouts
from vllm_supervisor.core.admission import Gate
from vllm_supervisor.core.events import Events
from vllm_supervisor.core.ledger import RequestIds
from vllm_supervisor.core.lifecycle import ImpossibleFact, Node, State
from vllm_supervisor.core.own_status import OwnStatus
from vllm_supervisor.runtime.answers import Answers
from vllm_supervisor.runtime.closing import Books, close_lost_runs
from vllm_supervisor.runtime.control import Control
from vllm_supervisor.runtime.door_account import DoorAccount
from vllm_supervisor.runtime.engine_room import EngineRoom
from vllm_supervisor.runtime.execute import Hands
from vllm_supervisor.runtime.front_door import FrontDoor
from vllm_supervisor.runtime.incidents import Incidents
from vllm_supervisor.runtime.ledger_guard import LedgerGuard
from vllm_supervisor.runtime.loop import Loop
from vllm_supervisor.runtime.memory_keeper import MemoryKeeper
from vllm_supervisor.runtime.picture import Picture
from vllm_supervisor.runtime.reload import Reload
from vllm_supervisor.runtime.service import ServiceManager
from vllm_supervisor.runtime.show import Show
from vllm_supervisor.runtime.take_signals import Hearing, take_signals
from vllm_supervisor.runtime.testimony import Testimony
from vllm_supervisor.runtime.watch import Watch
from vllm_supervisor.runtime.world import LEDGER, World, door_settings, health_policy, identity

INCIDENTS = "incidents"  # and that of the evidence bundles
TICK = 1.0  # seconds between the small chores: refusals of a second, what is shown of a load, the service manager

SERVING = (Node.READY, Node.EXAMINING, Node.EMPTYING, Node.CUTTING)


class Supervisor:
    """Ties the parts of one run together; made inside the event loop."""

    def __init__(self, world: World, nursery: trio.Nursery) -> None:
        """Construct the parts; nothing runs yet."""
        plan = world.plan
        self._world = world
        self._nursery = nursery
        self._log = world.log
        self._journal = world.journal
        self._events = Events()
        self._recovering = False
        self._pointed = False
        self._removed = False  # the file of the engine's socket, by somebody else
        self._gate = Gate(limit=plan.config.front_door.max_in_flight, new_id=RequestIds(world.run))
        self._loop = Loop(world.policy, now=clock.monotonic, on_fault=self._on_impossible)
        self._engine = Upstreams()
        self._memory = MemoryKeeper(
            world.memory,
            nursery=nursery,
            state=lambda: self._loop.state,
            gate=self._gate,
            tell=self._loop.tell,
            record=self._record,
        )
        self._room = EngineRoom(
            plan,
            nursery=nursery,
            instance=world.instance,
            run=world.run,
            run_dir=world.place.for_sockets,
            subreaper=world.subreaper,
            cgroup=world.cgroup,
            tell=self._loop.tell,
            forward=world.output.put,
            requests_lost=lambda since: self._account.lost_since(since),  # noqa: PLW0108 - it is made further down
            memory=self._memory,
            log=world.log,
        )
        self._hands = Hands(
            gate=self._gate,
            room=self._room,
            record=self._record,
            tell=self._loop.tell,
            document=lambda: nursery.start_soon(self._write_down),
            enter=world.journal.phase,
            save_evidence=lambda cause: self._incidents.save(cause),  # noqa: PLW0108 - it is made further down
            await_memory=self._memory.await_memory,
            background=world.journal.in_background,
            awaited=lambda: self._testimony.awaited,
            leaving=lambda: self._loop.state.leaving,
            now=clock.monotonic,
        )
        health = plan.config.health
        self._testimony = Testimony(
            current=lambda: self._room.current,
            gate=self._gate,
            journal=world.journal,
            interval=health.interval,
            heard=self._hands.look,
        )
        self._guard = LedgerGuard(world.writer, self._gate, required=plan.config.ledger.required, say=self._say)
        self._account = DoorAccount(
            world.journal,
            self._gate,
            clock.monotonic,
            late=self._on_refusal,
            ledger_failed=self._guard.look,
        )
        self._watch = Watch(
            state=lambda: self._loop.state,
            current=lambda: self._room.current,
            gate=self._gate,
            account=self._account,
            journal=world.journal,
            testimony=self._testimony,
            policy=health_policy(plan),
            interval=health.interval,
            probe_interval=health.probe_interval,
            api_key=plan.api_key,
            tell=self._loop.tell,
            say=self._say,
        )
        self._picture = Picture(
            identity(world),
            state=lambda: self._loop.state,
            gate=self._gate,
            room=self._room,
            journal=world.journal,
            policy=world.policy,
            now=clock.monotonic,
            memory=self._memory.picture,
            watch=self._watch,
        )
        self._books = Books(
            journal=world.journal,
            writer=world.writer,
            state_dir=plan.state_dir,
            hold=world.hold,
            reraise=plan.config.exit.reraise,
            is_pid1=world.policy.is_pid1,
        )
        self._answers = Answers(
            state=lambda: self._loop.state,
            gate=self._gate,
            watch=self._watch,
            current=lambda: self._room.current,
            background=lambda: self._journal.background,
            limits=world.policy.limits,
            waits_for=lambda: self._memory.waiting,
        )
        self._incidents = Incidents(
            plan.state_dir / INCIDENTS,
            run=world.run,
            gate=self._gate,
            room=self._room,
            watch=self._watch,
            memory=self._memory.recent,
            nursery=nursery,
            tell=self._loop.tell,
            say=self._say,
            search_path=plan.environ.get("PATH", ""),
            keep=plan.config.incidents.keep,
            max_size=plan.config.incidents.max_size,
        )
        self._service = ServiceManager(
            world.notifier,
            ready_when=plan.config.systemd.ready,
            sentence=self._answers.sentence,
            stop_takes_s=lambda state: state.drain.budget.total,
        )
        self._reload = Reload(
            world.certificates,
            refresh=plan.tls is not None and plan.tls.refresh,
            service=self._service,
            state=lambda: self._loop.state,
            tell=self._loop.tell,
            say=self._say,
        )

    async def run(self) -> OwnStatus:
        """Live; return how to end."""
        world = self._world
        self._journal.life()
        try:
            control = self._start_tasks()
            await self._nursery.start(partial(self._front_door().serve, [one.sock for one in world.listeners]))
            where = ", ".join(listener.address for listener in world.listeners)
            self._say("listening", f"listening on {where}" if where else "no front door: a headless node has no HTTP")
            if world.max_connections < world.plan.config.front_door.max_connections:
                said = f"front_door.max_connections is held to {world.max_connections}: the limit of open files is low"
                self._say("few_descriptors", f"{said} (ulimit -n, LimitNOFILE=)", "warning")
            planned = timeouts.plan(world.policy.limits)
            if planned.outer is not None:
                self._say("stop_plan", f"for a stop: {planned.sentence}", "info" if planned.fits else "warning")
            self._loop.tell(facts.Began())
            await self._loop.run(self._hands, after=self._after)
            await control.last_words()
        except BaseException:
            self._room.kill_tree()
            raise
        return self._books.status

    # -- tasks -------------------------------------------------------------------------------------------------------

    def _start_tasks(self) -> Control:
        world, nursery, planned = self._world, self._nursery, timeouts.plan(self._world.policy.limits)
        control = Control(
            status=self._picture.status,
            state=lambda: self._loop.state,
            timeouts=self._answers.timeouts,
            gate=self._gate,
            background=lambda: self._journal.background,
            cuts=lambda: self._hands.cuts,
            summary=self._picture.ledger_summary,
            events=self._events,
            tell=self._loop.tell,
            say=self._say,
            look_now=self._watch.look_now,
            drain_budget=world.policy.limits.drain,
            hook_budget=planned.propagation + planned.drain,
        )
        hearing = Hearing(
            state=lambda: self._loop.state,
            tell=self._loop.tell,
            say=self._say,
            forward=lambda signum: self._room.current is not None and self._room.current.body.child.send(signum),
            evidence=self._incidents.on_quit,
            reload=self._reload.asked,
        )
        world.place.serve(
            nursery,
            partial(Server, handler=control, on_fault=self._on_control_fault, on_refused=self._on_control_refused),
        )
        nursery.start_soon(
            partial(
                take_signals,
                world.signals,
                hearing,
                hangs_up=world.hangs_up,
                hangup_ignored=world.hangup_ignored,
                forwarded=world.plan.config.signals.forward,
            )
        )
        nursery.start_soon(self._tick)
        nursery.start_soon(self._watch.run)
        nursery.start_soon(self._memory.run)
        nursery.start_soon(self._testimony.run)
        nursery.start_soon(self._service.feed_watchdog)
        return control

    def _front_door(self) -> FrontDoor:
        certificates = self._world.certificates
        return FrontDoor(
            gate=self._gate,
            journal=self._account,
            settings=door_settings(self._world),
            engine=self._engine,
            view=self._answers.view,
            exposition=self._picture.exposition,
            retry_after=self._answers.retry_after,
            log=self._log,
            tls=None if certificates is None else certificates.current,
        )

    async def _tick(self) -> None:
        show = Show(self._world.terminal, log=self._log, draining=self._answers.draining)
        try:
            while True:
                await trio.sleep(TICK)
                self._journal.tick()
                self._guard.look()
                self._hands.look()
                self._keep_places()
                self._reload.tick()
                state = self._loop.state
                show.tick(state, self._room.current)
                self._service.after(state)
        finally:
            show.clear()

    def _keep_places(self) -> None:
        """Make again what somebody removed of our places, and say so once."""
        if (news := self._world.place.restore()) is not None:
            self._say(*news)
        current = self._room.current
        if current is not None and current.socket_removed and not self._removed:
            said = f"the socket of engine {current.body.number} was removed; the engine is reached all the same"
            self._say("engine_socket_removed", said, "warning")
        self._removed = current is not None and current.socket_removed

    # -- what the loop wants done ------------------------------------------------------------------------------------

    def _after(self, state: State) -> None:
        """Follow a new state: where requests go, and who has to hear of it."""
        current = self._room.current
        serving = state.node in SERVING and current is not None
        if serving != self._pointed:
            self._pointed = serving
            address = current.address if serving and current is not None else None
            self._engine.point_at(address, self._world.plan.engine_keep_alive_s)
        if not serving:
            self._watch.forget()
        if state.incarnation and not self._recovering:
            self._recovering = True  # the first sweep has just proven that nothing of an earlier run is left
            self._nursery.start_soon(self._recover)
        self._service.after(state)

    def _record(self, order: orders.Record) -> None:
        fields = dict(order.fields)
        self._events.add(order.event, order.sentence, at=clock.stamp(), level=order.level, **fields)
        getattr(self._log, order.level)(order.event, sentence=order.sentence, **fields)
        current = self._room.current
        match order.event:
            case "spawned" if current is not None:
                self._journal.spawned(current.body.number, current.body.child.id)
            case "ready" if current is not None:
                self._journal.engine_processes(member.id for member in current.body.tree.remaining())
                self._journal.engine("ready", fields)
            case "exited":
                self._testimony.close()
                self._journal.engine_gone()
                self._journal.engine("exited", fields)

    def _say(self, event: str, sentence: str, level: str = "info") -> None:
        self._record(orders.Record(event, sentence, level=level))

    def _on_refusal(self) -> None:
        if self._loop.state.drain.withdrawn_at is not None:
            self._loop.tell(facts.LateRequest())

    async def _recover(self) -> None:
        try:
            closed, damage = await close_lost_runs(
                self._world.plan.state_dir / LEDGER, self._journal, self._world.writer
            )
        except OSError as fault:
            self._record(
                orders.Record("recovery_failed", f"earlier ledgers cannot be read: {fault.strerror}", level="error")
            )
            return
        if closed:
            self._say("recovered", closed)
        if damage:
            self._say("ledger_damaged", damage, "warning")

    async def _write_down(self) -> None:
        within = self._world.policy.limits.documentation
        line, level = await self._books.close(self._loop.state, self._hands.cut, within)
        self._say("ended", line, level)
        self._loop.tell(facts.Documented())

    # -- faults of ours ----------------------------------------------------------------------------------------------

    def _on_impossible(self, fault: ImpossibleFact) -> None:
        self._log.error("fault", sentence=f"an impossible fact was ignored: {fault}", exc_info=fault)

    def _on_control_fault(self, fault: Exception) -> None:
        self._log.error("fault", sentence="internal error in a call to the control socket", exc_info=fault)

    def _on_control_refused(self, fault: OSError) -> None:
        sentence = f"the control socket cannot accept calls: {fault.strerror}"
        self._say(
            "control_refused", f"{sentence}; if it lasts, raise the limit of open files (LimitNOFILE=)", "warning"
        )


async def supervise(world: World) -> OwnStatus:
    """Run the supervisor to its end; return how to end the process."""
    world.writer.start()  # before any task: a mistake of setting up is told as such, not as a fault among tasks
    async with trio.open_nursery() as nursery:
        status = await Supervisor(world, nursery).run()
        nursery.cancel_scope.cancel()
    return status
