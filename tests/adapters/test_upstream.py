"""Reaching the engine: its address, its absence, a full queue."""

import socket
from pathlib import Path

import pytest
import trio

from fakes.door import in_trio
from vllm_supervisor.adapters.upstream import Upstreams
from vllm_supervisor.core.address import TcpAddress, UnixAddress


def _upstreams(address: UnixAddress | TcpAddress | None) -> Upstreams:
    upstreams = Upstreams()
    upstreams.point_at(address, 5.0)
    return upstreams


@in_trio
async def test_without_an_engine_a_connection_is_refused():
    """No address is like nobody listening."""
    with pytest.raises(ConnectionRefusedError):
        await _upstreams(None).connect()


@in_trio
async def test_nobody_listens(tmp_path: Path):
    """A missing socket and a closed port raise OSError and leave nothing open."""
    with pytest.raises(OSError, match="No such file"):
        await _upstreams(UnixAddress(str(tmp_path / "none"))).connect()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(OSError, match="refused"):
        await _upstreams(TcpAddress("127.0.0.1", port)).connect()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@in_trio
async def test_tcp(host: str):
    """Both families connect, non-blocking and without delay for small writes."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        sock = await _upstreams(TcpAddress(host, server.getsockname()[1])).connect()
        with sock:
            assert not sock.getblocking()
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@in_trio
async def test_full_queue_of_a_unix_socket_is_waited_for(tmp_path: Path):
    """A full backlog is no refusal: the connection is made as soon as there is room."""
    path = str(tmp_path / "engine.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(0)
        upstreams = _upstreams(UnixAddress(path))
        made: list[socket.socket] = []
        connected = trio.Event()

        async def connect() -> None:
            made.append(await upstreams.connect())
            if len(made) == 3:
                connected.set()

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(connect)
            await trio.testing.wait_all_tasks_blocked()
            assert len(made) < 3
            for _ in range(3):
                await trio.lowlevel.wait_readable(server)
                server.accept()[0].close()
            await connected.wait()
        for sock in made:
            sock.close()


def test_each_move_is_told_and_numbered():
    """Listeners hear of each change; the generation tells old connections from new ones."""
    upstreams = Upstreams()
    heard = []
    upstreams.on_move(lambda: heard.append(upstreams.generation))
    upstreams.point_at(TcpAddress("127.0.0.1", 1), 5.0)
    upstreams.point_at(None, 0.0)
    assert heard == [1, 2]
    assert upstreams.address is None
