"""Connections to the engine are reused only while the engine surely keeps them."""

import socket
from collections.abc import Iterator

import pytest

from vllm_supervisor.adapters.upstream import Upstreams
from vllm_supervisor.core.address import UnixAddress
from vllm_supervisor.runtime.engine_links import EngineLink, EngineLinks
from vllm_supervisor.runtime.pump import Pump


class Rig:
    """A pool with a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.upstreams = Upstreams()
        self.upstreams.point_at(UnixAddress("/nowhere"), 10.0)
        self.pump = Pump(now=lambda: self.now, on_fault=lambda fault: pytest.fail(str(fault)))
        self.unsolicited = 0
        self.links = EngineLinks(self.pump, self.upstreams, lambda: self.now, self._unsolicited)
        self.peers: list[socket.socket] = []

    def _unsolicited(self) -> None:
        self.unsolicited += 1

    def link(self) -> EngineLink:
        """Make a connection whose other end is in `peers`."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.peers.append(theirs)
        link = EngineLink(self.pump, ours, patient=True)
        link.generation = self.upstreams.generation
        link.pool = self.links
        return link


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Build a pool, and close what is left of it."""
    made = Rig()
    yield made
    made.links.drop_all()
    made.pump.close()
    for peer in made.peers:
        peer.close()


def test_the_youngest_is_used_first(rig: Rig):
    """What was given back last is taken first, each once."""
    first, second = rig.link(), rig.link()
    rig.links.give_back(first)
    rig.links.give_back(second)
    assert rig.links.idle() is second
    assert rig.links.idle() is first
    assert rig.links.idle() is None
    first.close()
    second.close()


@pytest.mark.parametrize("noticed_by", ["use", "sweep"])
def test_old_ones_are_closed_and_not_used(rig: Rig, noticed_by: str):
    """Nothing older than a safe part of the engine's keep-alive is used, and the sweep closes it."""
    link = rig.link()
    rig.links.give_back(link)
    rig.now += 7.5
    if noticed_by == "use":
        assert rig.links.idle() is None
    else:
        rig.links.drop_old()
    assert link.closed


def test_one_of_an_earlier_address_is_never_kept(rig: Rig):
    """A new incarnation drops what is idle, and what comes back late."""
    idle, late = rig.link(), rig.link()
    rig.links.give_back(idle)
    rig.upstreams.point_at(UnixAddress("/elsewhere"), 10.0)
    assert idle.closed
    rig.links.give_back(late)
    assert late.closed
    assert rig.links.idle() is None


@pytest.mark.parametrize(
    ("what", "told"), [(b"HTTP/1.1 408 Request Timeout\r\n", 1), (b"\r\n", 1), (True, 0), (False, 0)]
)
def test_bytes_on_an_idle_one_drop_it_and_are_told(rig: Rig, what: bytes | bool, told: int):
    """Bytes that belong to no answer end the connection and are counted; its end is nothing to tell."""
    link = rig.link()
    rig.links.give_back(link)
    (link.on_bytes if isinstance(what, bytes) else link.on_gone)(what)
    assert link.closed
    assert rig.links.idle() is None
    assert rig.unsolicited == told
