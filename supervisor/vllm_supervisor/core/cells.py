"""The whole table of the engine's life: every cell, and the pairs that are harmless."""

from vllm_supervisor.core import cells_between, cells_loss, cells_start, cells_stop, facts
from vllm_supervisor.core.lifecycle import Node
from vllm_supervisor.core.table import BEYOND, LEADS_TO, TABLE, on, stay

__all__ = ["LEADS_TO", "TABLE", "cells_between", "cells_loss", "cells_start", "cells_stop"]

for _nodes, _fact in (
    # A watcher may be late: what it saw has been dealt with since.
    (BEYOND, facts.MemberDied),
    (BEYOND, facts.ReportedDead),
    (tuple(node for node in Node if node is not Node.READY), facts.Condemned),
    (tuple(node for node in Node if node is not Node.EXAMINING), facts.EvidenceSaved),
    (tuple(node for node in Node if node is not Node.STARTING), facts.LoadProgressed),
    (tuple(node for node in Node if node is not Node.STARTING), facts.StaysUnready),
    (tuple(node for node in Node if node is not Node.STARTING), facts.BecameReady),
    (tuple(node for node in Node if node is not Node.EMPTYING), facts.Drained),
    (tuple(node for node in Node if node is not Node.CUTTING), facts.CutSettled),
    # Two requests to stop may come before the front door is open.
    ((Node.GONE,), facts.Began),
    # What the drain wants of an engine that is already on its way out.
    ((Node.SWEEPING, Node.KILLING, Node.GONE), facts.EngineStopOrdered),
    (
        (*(node for node in BEYOND if node not in (Node.LOSING, Node.TERMINATING)), Node.BOOTING),
        facts.EngineKillOrdered,
    ),
    (tuple(node for node in Node if node is not Node.EMPTYING), facts.StopRequested),
    # Somebody stopped us while we waited for memory.
    ((Node.GONE,), facts.MemoryBack),
    ((Node.GONE,), facts.MemoryShort),
    # The engine ended, and its end was judged, before the guard's word of it came.
    (
        (Node.WAITING, Node.GATING, Node.PARKED, Node.UNKILLABLE, Node.GONE),
        facts.MemoryFloor,
    ),
    # After "it cannot be killed" it may still end.
    ((Node.SWEEPING, Node.WAITING, Node.GATING, Node.PARKED, Node.UNKILLABLE, Node.GONE), facts.Exited),
):
    for _node in _nodes:
        on(_node, fact=_fact)(stay)
