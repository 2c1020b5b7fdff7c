"""What the composition root hands to a run, and the settings of its parts read out of it."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_supervisor import __version__
from vllm_supervisor.adapters import clock
from vllm_supervisor.adapters.cgroup import Cgroup, Unavailable
from vllm_supervisor.adapters.output import Output
from vllm_supervisor.adapters.sd_notify import Notifier
from vllm_supervisor.adapters.signals import Signals
from vllm_supervisor.adapters.terminal import StatusLine
from vllm_supervisor.adapters.tls import Certificates
from vllm_supervisor.core.forwarding import Forwarding
from vllm_supervisor.core.front_door_settings import FrontDoorSettings
from vllm_supervisor.core.lifecycle import Policy
from vllm_supervisor.core.plan import Plan
from vllm_supervisor.core.situation import HealthPolicy
from vllm_supervisor.runtime.journal import LedgerJournal
from vllm_supervisor.runtime.ledger_writer import LedgerWriter
from vllm_supervisor.runtime.memory_keeper import MemoryWorld
from vllm_supervisor.runtime.picture import Identity
from vllm_supervisor.runtime.run_directory import RunDirectory

LEDGER = "ledger"  # the ledgers' directory in the state directory


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket of the public address, bound and listening, and its address for people."""

    sock: socket.socket
    address: str


@dataclass(frozen=True, slots=True)
class World:
    """Everything the composition root has made for one run."""

    plan: Plan
    run: str
    instance: str
    hold: Callable[[], None]  # see that the state directory is ours; raises OSError if it is not
    signals: Signals
    hangup_ignored: bool
    listeners: Sequence[Listener]
    max_connections: int  # as configured, or as many as there are descriptors for
    certificates: Certificates | None  # None: plain HTTP
    place: RunDirectory
    output: Output
    terminal: tuple[StatusLine, Output] | None
    hangs_up: bool  # we have a controlling terminal, whose end is told to us by HUP
    log: Any
    writer: LedgerWriter
    journal: LedgerJournal
    subreaper: bool
    cgroup: Cgroup | Unavailable
    notifier: Notifier
    memory: MemoryWorld
    policy: Policy


def identity(world: World) -> Identity:
    """What does not change in this run."""
    known = world.journal.identity
    return Identity(
        version=__version__,
        name=known.name,
        run=known.run,
        pid=known.pid,
        began=clock.monotonic(),
        release=known.release,
        listeners=tuple(listener.address for listener in world.listeners),
    )


def door_settings(world: World) -> FrontDoorSettings:
    """The limits of the public address."""
    config = world.plan.config.front_door
    return FrontDoorSettings(
        max_connections=world.max_connections,
        max_head=config.max_head,
        max_body=config.max_body,
        head_timeout=config.head_timeout,
        body_timeout=config.body_timeout,
        body_deadline=config.body_deadline,
        body_min_rate=config.body_min_rate,
        idle_timeout=world.plan.idle_timeout_s,
        client_stall_timeout=config.client_stall_timeout,
        request_deadline=config.request_deadline,
        hold=config.hold,
        health=config.health,
        allow_paths=config.allow_paths,
        cors=world.plan.cors,
        forwarding=Forwarding(world.plan.trusted_proxies, https=world.plan.tls is not None),
        root_paths=world.plan.root_paths,
    )


def health_policy(plan: Plan) -> HealthPolicy:
    """The waits of the judgement."""
    health = plan.config.health
    return HealthPolicy(
        waits=health.waits,
        waits_slow=health.waits_slow,
        compile_extension=health.compile_extension,
        failing_after=health.failing_after,
    )
