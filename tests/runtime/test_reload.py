"""What a reload does and says."""

from typing import Any

import pytest

from vllm_supervisor.core import facts
from vllm_supervisor.core.errors import SetupError
from vllm_supervisor.core.facts import Fact
from vllm_supervisor.core.lifecycle import Node, State
from vllm_supervisor.runtime.reload import NOTHING, Reload


class Certificates:
    """Certificates that can be read again, or not; `reads` counts."""

    def __init__(self, *, bad: bool = False) -> None:
        self.bad = bad
        self.reads = 0

    def reload(self) -> None:
        """Read them."""
        self.reads += 1
        if self.bad:
            raise SetupError("no certificate")


class Quiet:
    """A service manager that listens to nothing."""

    def reloading(self) -> None:
        """A reload begins."""

    def reloaded(self) -> None:
        """It is over."""


GOOD, BAD = "new connections use the certificates read just now", "the certificates in use stay: no certificate"


@pytest.mark.parametrize(
    ("certificates", "node", "said", "told"),
    [
        (None, Node.READY, [NOTHING], []),
        (None, Node.STARTING, [NOTHING], []),
        (None, Node.PARKED, [], [facts.RestartRequested]),
        (Certificates(), Node.READY, [GOOD], []),
        (Certificates(), Node.PARKED, [GOOD], [facts.RestartRequested]),
        (Certificates(bad=True), Node.READY, [BAD], []),
    ],
)
def test_a_reload_says_what_came_of_it(certificates: Any, node: Node, said: list[str], told: list[type]) -> None:
    """Certificates read again or kept, a parked engine tried again (the engine's life says that), or nothing to do."""
    heard: list[str] = []
    facts_told: list[Fact] = []
    reload = Reload(
        certificates,
        refresh=False,
        service=Quiet(),  # type: ignore[arg-type]
        state=lambda: State(node=node),
        tell=facts_told.append,
        say=lambda _event, sentence, _level: heard.append(sentence),
    )
    reload.asked("HUP")
    assert heard == said
    assert [type(fact) for fact in facts_told] == told
