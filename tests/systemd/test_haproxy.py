"""The shipped HAProxy configuration with the real HAProxy: one of two supervisors is stopped under load."""

import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.ports import free_port
from fakes.streams import Streams, load
from fakes.supervisor_process import Account, Client, until

pytestmark = pytest.mark.systemd

CONFIG = Path(__file__).parents[2] / "configs" / "haproxy" / "haproxy.cfg"


@pytest.fixture
def account() -> Iterator[Account]:
    """Give an account of its own."""
    with Account() as account:
        yield account


def test_one_of_two_is_stopped_under_load_and_no_request_fails(account: Account) -> None:
    """Streams and small requests go through HAProxy all the while: every one is 200 and whole, on either server."""
    ports = [free_port(), free_port()]
    one, two = (
        account.start(
            "--engine",
            "mock",
            "serve",
            "tiny",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--mock-tokens-per-second",
            "30",
        )
        for port in ports
    )
    public = free_port()
    places = {"BIND": public, "ONE": ports[0], "TWO": ports[1]}
    env = {**account.env, **{name: f"127.0.0.1:{port}" for name, port in places.items()}}
    with Client(ports[0]) as first, Client(ports[1]) as second, Client(public) as front:
        one.until(first.is_ready, within=30.0, what="one is ready")
        two.until(second.is_ready, within=30.0, what="two is ready")
        haproxy = subprocess.Popen(
            ["haproxy", "-db", "-f", str(CONFIG)], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            until(front.is_ready, within=10.0, what="HAProxy has a server")
            with load(public, 8) as answers, Streams(public, 10, max_tokens=120, ignore_eos=True) as streams:
                before = len(answers)
                until(lambda: len(answers) > before + 20, within=20.0, what="load")
                one.signal(signal.SIGTERM)
                assert one.ends(within=30.0) == 0, one.words()
                after = len(answers)
                until(lambda: len(answers) > after + 20, within=20.0, what="load on the other")
            assert Counter(answers).keys() == {200}, Counter(answers)
            assert all(seen.complete for seen in streams.seen), [seen for seen in streams.seen if not seen.complete][:2]
        finally:
            haproxy.terminate()
            haproxy.wait(10.0)
    two.signal(signal.SIGTERM)
    assert two.ends(within=20.0) == 0, two.words()
    account.expect_nothing_left()
