"""The table of the engine's life, (node, fact) → cell, and how a cell is put into it.

Each cell names the nodes it may lead to, so that the diagram in the documents is drawn from here and cannot lie. The
cells stand in `cells_start`, `cells_loss`, `cells_stop` and `cells_between`; `cells` puts them together.
"""

from collections.abc import Callable
from typing import TypeVar

from vllm_supervisor.core import orders
from vllm_supervisor.core.facts import Fact
from vllm_supervisor.core.lifecycle import Cell, Moment, Node, Policy, State

TABLE: dict[tuple[Node, type], Cell] = {}
LEADS_TO: dict[tuple[Node, type], tuple[Node, ...]] = {}

Step = tuple[State, list[orders.Order]]
F = TypeVar("F", bound=Fact)
CellFor = Callable[[State, F, Moment, Policy], Step]


def on(*nodes: Node, fact: type[F], to: tuple[Node, ...] = ()) -> Callable[[CellFor[F]], CellFor[F]]:
    """Put a cell into the table for `fact` in each of `nodes`; `to` are the nodes it may lead to (none: it stays)."""

    def put(cell: CellFor[F]) -> CellFor[F]:
        for node in nodes:
            if (node, fact) in TABLE:
                raise ValueError(f"two cells for {fact.__name__} in {node.value}")
            TABLE[node, fact] = cell
            LEADS_TO[node, fact] = to or (node,)
        return cell

    return put


def stay(state: State, _fact: Fact, _moment: Moment, _policy: Policy) -> Step:
    """Change nothing: the fact is harmless here."""
    return state, []


ALIVE = (Node.READY, Node.EXAMINING, Node.EMPTYING, Node.CUTTING)  # nodes in which requests may be at the engine
BEYOND = tuple(
    node for node in Node if node not in (Node.BOOTING, Node.STARTING, *ALIVE)
)  # it has ended, or is about to
