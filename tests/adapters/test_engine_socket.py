"""The engine's socket is reached whatever becomes of its path."""

import os
import socket
from pathlib import Path

import pytest

from vllm_supervisor.adapters.engine_socket import EngineSocket
from vllm_supervisor.core.address import UnixAddress


def listening(path: Path) -> socket.socket:
    """Listen on `path`, however long it is."""
    listener = socket.socket(socket.AF_UNIX)
    folder = os.open(path.parent, os.O_PATH)
    listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)
    listener.listen()
    return listener


def reached(held: EngineSocket, listener: socket.socket) -> bool:
    """Say whether a connection made by `held` comes out at `listener`."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(held.address.path)
        listener.settimeout(5.0)
        with listener.accept()[0] as server:
            client.sendall(b"x")
            return server.recv(1) == b"x"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Give a path that is longer than a socket's may be."""
    path = tmp_path / ("d" * 120) / "s.sock"
    path.parent.mkdir()
    return path


def test_it_outlives_its_path(place: Path) -> None:
    """Held, it is reached by a path too long for a socket, and after its file and directory are gone."""
    held = EngineSocket(UnixAddress(str(place)))
    assert held.hold()
    assert held.address.path == str(place)
    with listening(place) as listener:
        assert held.hold()
        assert reached(held, listener)
        place.unlink()
        place.parent.rmdir()
        assert not held.hold()
        assert reached(held, listener)
    held.close()


def test_an_engine_that_binds_anew_is_followed(place: Path) -> None:
    """The path wins while it is there, and the address stays the same for whoever keeps it."""
    held = EngineSocket(UnixAddress(str(place)))
    with listening(place):
        held.hold()
        address = held.address
        place.unlink()
        with listening(place) as second:
            assert held.hold()
            assert held.address == address
            assert reached(held, second)
    held.close()


def test_what_is_no_socket_is_not_held(place: Path) -> None:
    """A file or a link in its place is never taken for it."""
    held = EngineSocket(UnixAddress(str(place)))
    place.write_text("x")
    assert held.hold()
    place.unlink()
    place.symlink_to("/dev/null")
    assert held.hold()
    assert held.address.path == str(place)
    held.close()
