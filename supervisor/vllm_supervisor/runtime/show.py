"""Show what takes its time while it goes on, a load or a drain: a status line on a terminal, else a log line now and then."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_supervisor.adapters import clock
from vllm_supervisor.adapters.output import Output
from vllm_supervisor.adapters.terminal import StatusLine
from vllm_supervisor.core.lifecycle import Node, State
from vllm_supervisor.core.load_progress import report_due
from vllm_supervisor.core.words import Phase
from vllm_supervisor.runtime.incarnation import Incarnation

WIDTH = 200  # columns of a line in the log


@dataclass(frozen=True, slots=True)
class _Topic:
    """What goes on: the log's word for it, since when (monotonic seconds), and one line of at most so many columns."""

    event: str
    since: float
    at_once: bool  # the first log line comes at the first look
    line: Callable[[int], str]


class Show:
    """Looks once a second. `terminal` is the status line and the output it is drawn through, or None."""

    def __init__(
        self, terminal: tuple[StatusLine, Output] | None, *, log: Any, draining: Callable[[], str | None]
    ) -> None:
        """`draining` says how a drain stands, or None when nothing is waited for."""
        self._terminal = terminal
        self._log = log
        self._draining = draining
        self._topic: tuple[str, float] | None = None
        self._reported = 0.0
        self._shown = False

    def tick(self, state: State, current: Incarnation | None) -> None:
        """Look once."""
        topic = self._find(state, current)
        if topic is None:
            self.clear()
            return
        if self._terminal is not None:
            line, output = self._terminal
            line.show(topic.line(line.width))
            output.put((b"",))
            self._shown = True
            return
        elapsed, first = clock.monotonic() - topic.since, False
        if self._topic != (topic.event, topic.since):
            self._topic, self._reported, first = (topic.event, topic.since), 0.0, topic.at_once
        if first or report_due(elapsed, self._reported):
            self._reported = elapsed
            self._log.info(topic.event, sentence=topic.line(WIDTH))

    def clear(self) -> None:
        """Take the status line away: it is over, or we end."""
        self._topic = None
        if self._shown and self._terminal is not None:
            line, output = self._terminal
            line.show("")
            output.put((b"",))
            self._shown = False

    def _find(self, state: State, current: Incarnation | None) -> _Topic | None:
        drain = state.drain
        if drain.withdrawn_at is not None and state.phase not in (Phase.DOCUMENTING, Phase.ENDED):
            said = self._draining()
            if said is None:
                return None
            return _Topic("draining", drain.withdrawn_at, True, lambda width: said[:width])
        if current is not None and not current.ready and state.node is Node.STARTING:
            elapsed = clock.monotonic() - current.started_at
            return _Topic(
                "loading",
                current.started_at,
                False,
                lambda width: current.load.show(elapsed, _memory(current), width),
            )
        return None


def _memory(current: Incarnation) -> int:
    return sum(member.rss_bytes for member in current.body.tree.remaining())
