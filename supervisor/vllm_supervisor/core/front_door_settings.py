"""What the front door is told at its start: one frozen record, parsed and checked elsewhere."""

from dataclasses import dataclass, field
from typing import Literal

from vllm_supervisor.core.cors import Cors
from vllm_supervisor.core.forwarding import Forwarding


@dataclass(frozen=True, slots=True)
class FrontDoorSettings:
    """Limits of the public address. Times in seconds, sizes in bytes; 0 turns `request_deadline` and `hold` off.

    Either of `body_deadline` and `body_min_rate` (bytes a second) at 0 turns the least rate of a body off.
    `root_paths` are prefixes like vLLM's `--root-path`: paths are known with and without them, as the engine knows them.
    `health` chooses what `/health` and `/ping` mean: readiness, or that the supervisor is alive.
    `cors` says what pages of other origins may read of our own answers, `forwarding` what the engine learns of clients.
    `allow_paths` names dangerous paths of the engine that may pass all the same.
    """

    max_connections: int = 4096
    max_head: int = 64 * 1024
    max_body: int = 1024 * 1024 * 1024
    head_timeout: float = 30.0
    body_timeout: float = 60.0
    body_deadline: float = 30.0
    body_min_rate: int = 16 * 1024
    idle_timeout: float = 75.0
    client_stall_timeout: float = 300.0
    request_deadline: float = 0.0
    hold: float = 0.0
    health: Literal["ready", "alive"] = "ready"
    allow_paths: tuple[str, ...] = ()
    cors: Cors | None = None
    forwarding: Forwarding = field(default_factory=Forwarding)
    root_paths: tuple[str, ...] = ()
