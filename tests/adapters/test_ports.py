"""Listeners: bound where asked, refused in one clear line."""

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_supervisor.adapters.ports import listen
from vllm_supervisor.core.address import TcpAddress, UnixAddress
from vllm_supervisor.core.errors import SetupError

# A separate process that listens on port or path, so that its pid is not ours.
HOLDER = (
    "import socket, sys\n"
    "where = sys.argv[1]\n"
    "if where.startswith('/'): s = socket.socket(socket.AF_UNIX); s.bind(where); s.listen()\n"
    "else: s = socket.create_server((where, 0))\n"
    "print(s.getsockname() if where.startswith('/') else s.getsockname()[1], flush=True)\n"
    "sys.stdin.read()\n"
)


def holder(where: str) -> subprocess.Popen[str]:
    """Start the other listener; it ends with its stdin."""
    return subprocess.Popen(
        [sys.executable, "-I", "-c", HOLDER, where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "", "::1", "::"])
def test_a_tcp_address_listens_at_once(host: str) -> None:
    """Bound means listening, non-blocking, and reachable over the family the host asks for."""
    with listen(TcpAddress(host, 0)) as sock:
        assert not sock.getblocking()
        port = sock.getsockname()[1]
        target = {"": "127.0.0.1", "::": "127.0.0.1"}.get(host, host)
        socket.create_connection((target, port), timeout=10).close()


def test_the_holder_of_a_port_is_named() -> None:
    """A port in use is refused with the holder's pid and command, over IPv4 and IPv6."""
    for host in ("127.0.0.1", "::1"):
        with holder("127.0.0.1") if host == "127.0.0.1" else listening_six() as other:
            port = int(other.stdout.readline())
            with pytest.raises(SetupError, match=rf"in use by pid {other.pid} \(python") as caught:
                listen(TcpAddress(host, port))
            assert caught.value.status == 78
            assert "--port" in str(caught.value)
            other.communicate("")


def listening_six() -> subprocess.Popen[str]:
    """Start a listener on the IPv6 loopback."""
    code = "import socket, sys; s = socket.create_server(('::1', 0), family=socket.AF_INET6); print(s.getsockname()[1], flush=True); sys.stdin.read()"
    return subprocess.Popen(
        [sys.executable, "-I", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("address", "says"),
    [
        (TcpAddress("no-such-host.invalid", 1), "unknown here"),
        (TcpAddress("a" * 70, 1), "unknown here"),
        (TcpAddress("192.0.2.1", 0), "no address of this machine"),
        (TcpAddress("127.0.0.1", 70000), "not between 0 and 65535"),
        (UnixAddress("/nonexistent/sock"), "No such file"),
        (UnixAddress("/tmp/" + "x" * 120), "longer than 107"),
    ],
)
def test_a_refusal_says_what_to_change(address: TcpAddress | UnixAddress, says: str) -> None:
    """Every mistake is one line that names the address and the mend."""
    with pytest.raises(SetupError, match=says) as caught:
        listen(address)
    assert "\n" not in str(caught.value)
    assert "choose" in str(caught.value) or "change" in str(caught.value)


def test_a_privileged_port_is_explained() -> None:
    """Without the capability a port below 1024 is refused with the reason."""
    code = (
        "from vllm_supervisor.adapters.ports import listen; from vllm_supervisor.core.address import TcpAddress\n"
        "try: listen(TcpAddress('127.0.0.1', 81))\n"
        "except Exception as error: print(error)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # A network namespace of a user namespace without capabilities: as any user on any machine.
    command = ["unshare", "--user", "--map-user=1000", "--net", sys.executable, "-c", code]
    said = subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=30).stdout
    assert "CAP_NET_BIND_SERVICE" in said


def test_a_unix_socket_has_its_mode(tmp_path: Path) -> None:
    """The mode asked for is set whatever the umask; a stale socket is replaced and its mode kept."""
    path = tmp_path / "s"
    before = os.umask(0o022)
    try:
        listen(UnixAddress(str(path)), mode=0o660).close()
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with listen(UnixAddress(str(path))):
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
    finally:
        os.umask(before)


def test_a_file_that_is_no_socket_is_kept(tmp_path: Path) -> None:
    """A path that holds something else is refused, and the file stays."""
    path = tmp_path / "precious"
    path.write_text("kept")
    with pytest.raises(SetupError, match="is no socket; choose another path"):
        listen(UnixAddress(str(path)))
    assert path.read_text() == "kept"


def test_a_unix_socket_is_never_wider_than_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is born with its mode: there is no moment in which others could connect."""
    born: list[int] = []
    monkeypatch.setattr(Path, "chmod", lambda path, _mode: born.append(stat.S_IMODE(path.stat().st_mode)))
    before = os.umask(0)
    try:
        listen(UnixAddress(str(tmp_path / "s")), mode=0o600).close()
    finally:
        os.umask(before)
    assert born == [0o600]


def test_a_living_unix_socket_is_not_replaced(tmp_path: Path) -> None:
    """While somebody answers on the path, it stays theirs and they are named."""
    path = str(tmp_path / "s")
    with holder(path) as other:
        other.stdout.readline()
        with pytest.raises(SetupError, match=rf"in use by pid {other.pid} \(python"):
            listen(UnixAddress(path))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
        other.communicate("")
