"""The composition root: the only place that constructs adapters and ties them together.

Lifetimes, from the outermost in: output and log, the state directory's lock, listeners, ledger, loop and control
socket, engine, front door. They end in the opposite order, and each end is bounded.
"""

import os
import secrets
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import trio

from vllm_supervisor import __version__
from vllm_supervisor.adapters import cgroup, log, ports, processes, reaper, run_fate, signals
from vllm_supervisor.adapters.clock import stamp
from vllm_supervisor.adapters.ledger_file import LedgerFile
from vllm_supervisor.adapters.lock import StateLock
from vllm_supervisor.adapters.output import Output, fill_standard_descriptors
from vllm_supervisor.core.address import UnixAddress
from vllm_supervisor.core.ledger import Clock
from vllm_supervisor.core.lifecycle import Policy
from vllm_supervisor.core.own_status import OwnStatus
from vllm_supervisor.core.plan import Plan
from vllm_supervisor.core.restart import RestartPolicy
from vllm_supervisor.runtime.journal import LedgerJournal, LineFactory, RunIdentity
from vllm_supervisor.runtime.ledger_writer import LedgerPolicy, LedgerWriter
from vllm_supervisor.runtime.supervise import LEDGER, Supervisor, World

FLUSH_WITHIN = 1.0  # seconds for our last lines to be taken
SEGMENT_BYTES = 64 * 1024 * 1024
OURS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGCHLD)


def run(plan: Plan) -> int:
    """Do what the plan says; return our exit status, or end by the signal that asked, as shells expect.

    Raises UserError for what a person can mend: port in use, lock held, directory not writable.
    """
    fill_standard_descriptors()
    hangup_ignored = signals.ignored(signal.SIGHUP)
    received = signals.Signals(OURS + tuple(signal.Signals[name] for name in plan.config.signals.forward))
    out, err = Output(1), Output(2)
    on_terminal = sys.stderr is not None and os.isatty(2)
    form = plan.config.log.format
    logger = log.build(
        lambda line: err.put((line,)),
        json=form == "json" or (form == "auto" and not on_terminal),
        level=plan.config.log.level,
        stamp=stamp,
    )
    try:
        ending = _run(plan, received, out.put, logger, on_terminal=on_terminal, hangup_ignored=hangup_ignored)
    finally:
        out.close(FLUSH_WITHIN)
        err.close(FLUSH_WITHIN)
    if ending.reraise is not None:
        signals.die_by(signal.Signals[ending.reraise])
    return ending.status


def _run(
    plan: Plan,
    received: signals.Signals,
    forward: Any,
    logger: Any,
    *,
    on_terminal: bool,
    hangup_ignored: bool,
) -> OwnStatus:
    run_id = secrets.token_hex(4)
    with ExitStack() as held:
        lock = StateLock(plan.state_dir, run=run_id, name=plan.name)
        held.callback(lock.release)
        listeners = [held.enter_context(ports.listen(address)) for address in plan.listeners]
        control_path = plan.run_dir / "control.sock"
        control = held.enter_context(ports.listen(UnixAddress(str(control_path)), mode=0o600))
        for address in (*plan.listeners, UnixAddress(str(control_path))):
            if isinstance(address, UnixAddress):
                held.callback(Path(address.path).unlink, missing_ok=True)
        identity = RunIdentity(
            run=run_id,
            boot=run_fate.boot_id(),
            release=plan.config.release or plan.model,
            version=__version__,
            name=plan.name,
            pid=os.getpid(),
            start=processes.start_ticks(os.getpid()) or 0,
        )
        clock = Clock(time.monotonic, time.time)
        lines = LineFactory(identity, clock)
        writer = LedgerWriter(
            LedgerFile(plan.state_dir / LEDGER, SEGMENT_BYTES), LedgerPolicy(), header=lines.header, gap=lines.gap
        )
        world = World(
            plan=plan,
            run=run_id,
            instance=lock.instance,
            signals=received,
            hangup_ignored=hangup_ignored,
            listeners=listeners,
            control=control,
            forward=forward,
            log=logger,
            writer=writer,
            journal=LedgerJournal(identity, clock, writer),
            subreaper=reaper.become_subreaper(),
            cgroup=cgroup.delegated(),
            policy=_policy(plan, on_terminal=on_terminal),
            on_terminal=on_terminal,
        )
        return trio.run(Supervisor(world).run)


def _policy(plan: Plan, *, on_terminal: bool) -> Policy:
    config = plan.config
    return Policy(
        restart=RestartPolicy(
            max=config.restart.max,
            within=config.restart.within,
            stuck_max=config.restart.stuck_max,
            stuck_within=config.restart.stuck_within,
            start_attempts=config.restart.start_attempts,
            backoff=config.restart.backoff,
            backoff_max=config.restart.backoff_max,
            healthy_after=config.restart.healthy_after,
            on_give_up=config.restart.on_give_up,
            slow_retry=config.restart.slow_retry,
        ),
        start_timeout=config.engine.start_timeout,
        stop_grace=config.engine.stop_grace,
        drain_budget=config.drain.budget,
        on_terminal=on_terminal,
        has_notify="NOTIFY_SOCKET" in plan.environ,
        is_pid1=os.getpid() == 1,
    )
