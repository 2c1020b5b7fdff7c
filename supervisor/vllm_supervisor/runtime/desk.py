"""What every exchange uses, the same for all of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from vllm_supervisor.adapters.http1 import AnswerHeads
from vllm_supervisor.adapters.upstream import Upstreams
from vllm_supervisor.core.admission import Gate, Rejection
from vllm_supervisor.core.front_door_settings import FrontDoorSettings
from vllm_supervisor.core.journal import Journal
from vllm_supervisor.runtime.engine_links import EngineLinks
from vllm_supervisor.runtime.pump import Pump

if TYPE_CHECKING:
    from vllm_supervisor.runtime.exchange import Exchange


@dataclass(frozen=True, slots=True)
class Desk:
    """`closing` says whether a client's connection shall end with its answer; `now` is monotonic seconds."""

    gate: Gate
    journal: Journal
    settings: FrontDoorSettings
    upstreams: Upstreams
    links: EngineLinks
    pump: Pump
    retry_after: Callable[[Rejection], int]
    now: Callable[[], float]
    closing: Callable[[], bool]
    limit_reached: Callable[[str, int], None]  # takes the key of the limit, and its value
    changed: trio.lowlevel.ParkingLot  # where held requests wait for admission to open, or to close for good
    heads: AnswerHeads = field(default_factory=AnswerHeads)
    arriving: "dict[Exchange, None]" = field(default_factory=dict)  # not admitted, as the body is to come; oldest first
