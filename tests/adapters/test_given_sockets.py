"""Sockets from the service manager: ours by pid, taken in order with their names, refused when they do not listen."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_supervisor.adapters.given_sockets import take
from vllm_supervisor.core.address import TcpAddress, UnixAddress
from vllm_supervisor.core.errors import SetupError

FIRST = 200  # far from any descriptor of the test run's own


def give(at: int, sock: socket.socket) -> None:
    """Put `sock` where a service manager would, inheritable as it leaves it."""
    os.dup2(sock.fileno(), FIRST + at, inheritable=True)


@pytest.fixture
def tcp() -> Iterator[socket.socket]:
    """Give a listening TCP socket."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def environ(count: int, **more: str) -> dict[str, str]:
    """Say that `count` sockets are given to this process."""
    return {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(count), **more}


def test_sockets_are_taken_in_order_with_names(tcp: socket.socket, tmp_path: Path) -> None:
    """Each socket has its name and address, does not block, and no child of ours inherits it."""
    path = str(tmp_path / "front.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as unix:
        unix.bind(path)
        unix.listen()
        give(0, tcp)
        give(1, unix)
        given = take(environ(2, LISTEN_FDNAMES="http:local"), FIRST)
    assert [one.name for one in given] == ["http", "local"]
    assert [one.address for one in given] == [TcpAddress("127.0.0.1", tcp.getsockname()[1]), UnixAddress(path)]
    for one in given:
        assert not one.sock.getblocking()
        assert not one.sock.get_inheritable()
        one.sock.close()


def test_names_may_be_missing(tcp: socket.socket) -> None:
    """A manager that gives no names gives sockets all the same."""
    give(0, tcp)
    (given,) = take(environ(1), FIRST)
    assert given.name == "unknown"
    given.sock.close()


@pytest.mark.parametrize(
    "environment",
    [{}, {"LISTEN_FDS": "1"}, {"LISTEN_FDS": "1", "LISTEN_PID": "1"}, {"LISTEN_PID": str(os.getpid())}],
)
def test_what_was_meant_for_another_process_is_left_alone(environment: dict[str, str]) -> None:
    """Without both variables, or with another pid, nothing is taken."""
    assert take(environment, FIRST) == []


def test_a_socket_that_does_not_listen_is_refused_by_name() -> None:
    """A datagram socket, a connected one or a file is the socket unit's mistake, and the message says whose."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram:
        give(0, datagram)
        with pytest.raises(SetupError, match=r"^web\.socket: .*ListenStream="):
            take(environ(1, LISTEN_FDNAMES="web.socket"), FIRST)
    with Path(os.devnull).open("rb") as file:
        os.dup2(file.fileno(), FIRST)
    with pytest.raises(SetupError, match="is no socket"):
        take(environ(1), FIRST)
    os.close(FIRST)
