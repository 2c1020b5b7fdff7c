"""The composition root: the only place that constructs adapters and ties them together.

Lifetimes, from the outermost in: output and log, the state directory's lock, listeners, ledger, loop and control
socket, engine, front door. They end in the opposite order, and each end is bounded.
"""

import gc
import os
import secrets
import signal
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import trio

from vllm_supervisor import __version__
from vllm_supervisor.adapters import (
    cgroup,
    clock,
    descriptors,
    given_sockets,
    journal_stream,
    kernel_needs,
    log,
    nvidia,
    outer_limit,
    page_cache,
    ports,
    processes,
    reaper,
    run_fate,
    signals,
)
from vllm_supervisor.adapters.kernel_log import KernelLog
from vllm_supervisor.adapters.kill_list import KillList
from vllm_supervisor.adapters.ledger_file import LedgerFile
from vllm_supervisor.adapters.lock import StateLock
from vllm_supervisor.adapters.memory import MemoryReader
from vllm_supervisor.adapters.output import Output, fill_standard_descriptors
from vllm_supervisor.adapters.sd_notify import Notifier
from vllm_supervisor.adapters.signals import Signals
from vllm_supervisor.adapters.terminal import StatusLine, controls_us, is_terminal
from vllm_supervisor.adapters.tls import Certificates
from vllm_supervisor.core import memory_mode
from vllm_supervisor.core.address import UnixAddress
from vllm_supervisor.core.config_sections import Config
from vllm_supervisor.core.errors import SetupError
from vllm_supervisor.core.ledger import Clock, LedgerPolicy
from vllm_supervisor.core.lifecycle import Policy
from vllm_supervisor.core.memory import GuardPolicy
from vllm_supervisor.core.plan import Plan
from vllm_supervisor.core.restart import RestartPolicy
from vllm_supervisor.core.signal_policy import IGNORED, to_read
from vllm_supervisor.core.timeouts import Limits
from vllm_supervisor.runtime.journal import LedgerJournal
from vllm_supervisor.runtime.ledger_writer import LedgerWriter
from vllm_supervisor.runtime.memory_keeper import MemoryWorld
from vllm_supervisor.runtime.run_directory import RunDirectory
from vllm_supervisor.runtime.run_identity import LineFactory, RunIdentity
from vllm_supervisor.runtime.supervise import supervise
from vllm_supervisor.runtime.world import LEDGER, Listener, World

# Descriptors that clients can never take: listeners, logs, ledgers, the control socket's callers, health checks beyond
# the limit, and all that custody opens for a moment.
OWN_DESCRIPTORS = 256
FEWEST_CONNECTIONS = 16
FLUSH_WITHIN = 1.0  # seconds for our last lines to be taken


class Streams:
    """Our standard output and error, each behind a queue; on a terminal with a status line between them."""

    def __init__(self, term: str) -> None:
        """`term` is $TERM."""
        self.on_terminal = os.isatty(2)
        self.terminal: tuple[StatusLine, Output] | None = None
        if is_terminal(2, term):
            line = StatusLine(2)
            self.err = Output(2, write=line.write)
            # Standard output shares the line only if it is the same terminal.
            same = os.isatty(1) and os.ttyname(1) == os.ttyname(2)
            self.out = Output(1, write=line.write) if same else Output(1)
            self.terminal = (line, self.err)
        else:
            self.out, self.err = Output(1), Output(2)

    def close(self) -> None:
        """Give the last lines a moment."""
        self.out.close(FLUSH_WITHIN)
        self.err.close(FLUSH_WITHIN)


def run(plan: Plan) -> int:
    """Do what the plan says; return our exit status, or end by the signal that asked, as shells expect.

    Raises UserError for what a person can mend: port in use, lock held, directory not writable.
    """
    fill_standard_descriptors()
    kernel_needs.check()
    hangup_ignored = signals.ignored(signal.SIGHUP)
    received = Signals(to_read(plan.config.signals.forward), ignored=IGNORED)
    streams = Streams(plan.environ.get("TERM", ""))
    form = plan.config.log.format
    logger = log.build(
        lambda line: streams.err.put((line,)),
        json=form == "json" or (form == "auto" and not streams.on_terminal),
        level=plan.config.log.level,
        stamp=clock.stamp,
        journal=journal_stream.connected(plan.environ),
    )
    for doubt in plan.doubts:
        logger.warning("configuration", sentence=doubt)
    gc.freeze()  # what was imported stays: no collection need look at it again
    try:
        with ExitStack() as held:
            ending = trio.run(supervise, _world(plan, held, received, streams, logger, hangup_ignored=hangup_ignored))
    finally:
        streams.close()
    if ending.reraise is not None:
        signals.die_by(signal.Signals[ending.reraise])
    return ending.status


def _world(
    plan: Plan, held: ExitStack, received: Signals, streams: Streams, logger: Any, *, hangup_ignored: bool
) -> World:
    """Take hold of everything outside; what is held is let go by `held`. Raises SetupError."""
    run_id = secrets.token_hex(4)
    lock = StateLock(plan.state_dir, run=run_id, name=plan.name, port_option=plan.port_option)
    held.callback(lock.release)
    place = RunDirectory(plan)  # under the lock: the last holder removes it as it leaves
    held.callback(place.close)
    certificates = None if plan.tls is None else Certificates(plan.tls)
    listeners = _listeners(plan, held)
    notifier = Notifier(plan.environ)
    held.callback(notifier.close)
    journal, writer = _ledgers(plan, run_id, lock)
    memory = _memory(plan)
    return World(
        plan=plan,
        run=run_id,
        instance=lock.instance,
        hold=lock.again,
        signals=received,
        hangup_ignored=hangup_ignored,
        listeners=listeners,
        max_connections=connections_there_is_room_for(plan.config.front_door.max_connections),
        certificates=certificates,
        place=place,
        output=streams.out,
        terminal=streams.terminal,
        hangs_up=controls_us(),
        log=logger,
        writer=writer,
        journal=journal,
        subreaper=reaper.become_subreaper(),
        cgroup=cgroup.delegated(),
        notifier=notifier,
        memory=memory,
        policy=_policy(plan, memory, on_terminal=streams.on_terminal, has_notify=notifier.enabled),
    )


def _listeners(plan: Plan, held: ExitStack) -> list[Listener]:
    """The service manager's sockets where it gave us any, for it keeps them open while we restart; else our own."""
    given = given_sockets.take(plan.environ) if plan.listeners else []
    if given:
        return [Listener(held.enter_context(one.sock), f"{one.address} (given by {one.name})") for one in given]
    bound = []
    for address in plan.listeners:
        bound.append(Listener(held.enter_context(ports.listen(address)), str(address)))
        if isinstance(address, UnixAddress):
            held.callback(ports.remover(address.path))
    return bound


def connections_there_is_room_for(configured: int) -> int:
    """How many connections there are descriptors for, one to the client and one to the engine each.

    Raises the limit of open files first; raises SetupError where even a few connections would not fit.
    """
    allowed = descriptors.allow(2 * configured + OWN_DESCRIPTORS)
    room = (allowed - OWN_DESCRIPTORS) // 2
    fewest = min(configured, FEWEST_CONNECTIONS)
    if room < fewest:
        least = 2 * fewest + OWN_DESCRIPTORS
        sentence = (
            f"only {allowed} open files are allowed; raise the limit (ulimit -n, LimitNOFILE=) to at least {least}"
        )
        raise SetupError(sentence)
    return min(configured, room)


def _ledgers(plan: Plan, run_id: str, lock: StateLock) -> tuple[LedgerJournal, LedgerWriter]:
    config = plan.config.ledger
    identity = RunIdentity(
        run=run_id,
        boot=run_fate.boot_id(),
        release=plan.config.release or plan.model,
        version=__version__,
        name=plan.name,
        pid=os.getpid(),
        start=processes.start_ticks(os.getpid()) or 0,
    )
    stamps = Clock(time.monotonic, time.time)
    lines = LineFactory(identity, stamps)
    writer = LedgerWriter(
        LedgerFile(plan.state_dir / LEDGER, min(config.segment, config.max_size), hold=lock),
        LedgerPolicy(sync=config.sync, interval_s=config.interval, max_bytes=config.max_size, keep_s=config.keep),
        header=lines.header,
        gap=lines.gap,
    )
    return LedgerJournal(identity, stamps, writer, required=config.required), writer


def _memory(plan: Plan) -> MemoryWorld:
    """Look at what can be told at once of this machine's memory; the GPU's driver is asked later, if it has to be."""
    config = plan.config.memory
    proc = Path(config.proc)
    model = "" if plan.options is None else plan.options.model
    return MemoryWorld(
        mode=memory_mode.by_configuration(config.mode) or memory_mode.by_names(nvidia.names(proc)),
        policy=GuardPolicy(floor=config.floor, low=config.low),
        reader=MemoryReader(proc),
        guard_reader=MemoryReader(proc),
        kernel_log=KernelLog(Path(config.kernel_log)),
        evidence_log=KernelLog(Path(config.kernel_log)),
        kill_list=KillList(),
        ask_driver=partial(nvidia.ask, plan.environ.get("PATH", "")),
        gpu_processes=partial(nvidia.process_memory, plan.environ.get("PATH", ""), proc),
        engine_environ={**plan.environ, **plan.config.engine.env},
        proc=proc,
        evict=page_cache.model_directory(model, plan.environ) if config.evict_page_cache else None,
        drop_caches=config.drop_caches,
    )


def _policy(plan: Plan, memory: MemoryWorld, *, on_terminal: bool, has_notify: bool) -> Policy:
    config = plan.config
    restart = config.restart
    return Policy(
        restart=RestartPolicy(
            max=restart.max,
            within=restart.within,
            stuck_max=restart.stuck_max,
            stuck_within=restart.stuck_within,
            start_attempts=restart.start_attempts,
            backoff=restart.backoff,
            backoff_max=max(restart.backoff, restart.backoff_max),
            healthy_after=restart.healthy_after,
            on_give_up=restart.on_give_up,
            slow_retry=restart.slow_retry,
        ),
        limits=_limits(plan, config, has_notify=has_notify),
        start_timeout=config.engine.start_timeout,
        stop_grace=config.engine.stop_grace,
        headless=not plan.listeners,
        memory_gate=memory.mode is None or memory.mode.on,
        gate_timeout=config.memory.gate_timeout,
        on_terminal=on_terminal,
        has_notify=has_notify,
        is_pid1=os.getpid() == 1,
    )


def _limits(plan: Plan, config: Config, *, has_notify: bool) -> Limits:
    """The limits of a stop; systemd is asked for its own only where it started us."""
    drain = config.drain
    outer, owner = None, "nobody"
    if drain.outer != "auto":
        outer, owner = drain.outer, "drain.outer"
    elif has_notify and (found := outer_limit.read()) is not None:
        outer, owner = found.seconds, found.owner
    return Limits(
        outer=outer,
        outer_owner=owner,
        propagation=drain.propagation,
        drain=drain.budget,
        engine_stop=config.engine.stop_grace,
        documentation=drain.documentation,
        reserve=drain.reserve,
        server_graceful=None if plan.options is None else float(plan.options.shutdown_timeout),
        request_deadline=config.front_door.request_deadline,
    )
