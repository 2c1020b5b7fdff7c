"""Show a load while it goes on: a status line on a terminal, else a line in the log now and then."""

from vllm_supervisor.adapters import clock
from vllm_supervisor.adapters.output import Output
from vllm_supervisor.adapters.terminal import StatusLine
from vllm_supervisor.core.lifecycle import Node, State
from vllm_supervisor.core.load_progress import report_due
from vllm_supervisor.runtime.incarnation import Incarnation

WIDTH = 200  # columns of a line in the log


class LoadShow:
    """What people see of a load. `terminal` is the status line and the output it is drawn through, or None."""

    def __init__(self, terminal: tuple[StatusLine, Output] | None) -> None:
        """Begin with nothing shown."""
        self._terminal = terminal
        self._reported = 0.0
        self._shown = False

    def tick(self, state: State, current: Incarnation | None) -> str | None:
        """Look once; return a line for the log when one is due."""
        if current is None or current.ready or state.node is not Node.STARTING:
            self.clear()
            return None
        elapsed = clock.monotonic() - current.started_at
        if self._terminal is None:
            if elapsed < self._reported:
                self._reported = 0.0
            if not report_due(elapsed, self._reported):
                return None
            self._reported = elapsed
            return current.load.show(elapsed, _memory(current), WIDTH)
        line, output = self._terminal
        line.show(current.load.show(elapsed, _memory(current), line.width))
        output.put((b"",))
        self._shown = True
        return None

    def clear(self) -> None:
        """Take the status line away: the load is over, or we end."""
        self._reported = 0.0
        if self._shown and self._terminal is not None:
            line, output = self._terminal
            line.show("")
            output.put((b"",))
            self._shown = False


def _memory(current: Incarnation) -> int:
    return sum(member.rss_bytes for member in current.body.tree.remaining())
