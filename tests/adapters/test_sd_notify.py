"""Messages to the service manager: both kinds of socket, the watchdog's patience, and silence where nobody listens."""

import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_supervisor.adapters.sd_notify import Notifier


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """Give a listening socket and the NOTIFY_SOCKET that names it."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@vsup-test-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("\0" + name[1:] if name.startswith("@") else name)
        listening.settimeout(5.0)
        yield listening, name


def test_assignments_arrive_as_one_message(manager: tuple[socket.socket, str]) -> None:
    """Each call is one datagram, its assignments one a line."""
    listening, name = manager
    notifier = Notifier({"NOTIFY_SOCKET": name})
    assert notifier.enabled
    assert notifier.send("READY=1", "STATUS=fine")
    assert listening.recv(4096) == b"READY=1\nSTATUS=fine"
    notifier.close()
    assert not notifier.send("READY=1")


def test_nobody_listens() -> None:
    """Without a socket nothing is sent; a manager that has gone costs the message alone."""
    assert not Notifier({}).enabled
    assert not Notifier({"NOTIFY_SOCKET": "vsock:2:1"}).send("READY=1")
    gone = Notifier({"NOTIFY_SOCKET": "/nowhere/notify"})
    assert not gone.send("READY=1")
    gone.close()


def test_a_full_queue_does_not_block(manager: tuple[socket.socket, str]) -> None:
    """A manager that reads nothing never makes us wait."""
    _, name = manager
    notifier = Notifier({"NOTIFY_SOCKET": name})
    sent = [notifier.send("STATUS=" + "x" * 4000) for _ in range(10_000)]
    assert sent[0]
    assert not sent[-1]
    notifier.close()


@pytest.mark.parametrize(
    ("environ", "patience"),
    [
        ({"WATCHDOG_USEC": "60000000"}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_ours_only_if_it_names_us(environ: dict[str, str], patience: float | None) -> None:
    """Another process's watchdog, none, or nonsense is no watchdog."""
    notifier = Notifier({"NOTIFY_SOCKET": "/nowhere/notify", **environ})
    assert notifier.watchdog_s == patience
    notifier.close()
    assert Notifier(environ).watchdog_s is None
