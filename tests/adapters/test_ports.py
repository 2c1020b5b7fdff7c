"""Listeners: bound where asked, refused in one clear line."""

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_supervisor.adapters import ports
from vllm_supervisor.adapters.ports import listen
from vllm_supervisor.core.address import TcpAddress, UnixAddress
from vllm_supervisor.core.errors import SetupError
from vllm_supervisor.core.neighbours import serve_arguments

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


# Binds as vLLM does before its load: with SO_REUSEADDR, and without listening.
LOADER = (
    "import socket, sys\n"
    "s = socket.socket(socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET)\n"
    "s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
    "s.bind((sys.argv[1], int(sys.argv[2])))\n"
    "print(s.getsockname()[1], flush=True)\n"
    "sys.stdin.read()\n"
)


def loader(host: str, port: int = 0) -> subprocess.Popen[str]:
    """Start a server that has bound its port and does not listen; it ends with its stdin."""
    return subprocess.Popen(
        [sys.executable, "-I", "-c", LOADER, host, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("127.0.0.1", ""), ("::1", "::1"), ("127.0.0.1", "::")],
)
def test_a_port_that_is_bound_and_not_listened_on_is_in_use(theirs: str, ours: str) -> None:
    """A server in the middle of its load is refused like one that listens, with its pid and command."""
    with loader(theirs) as other:
        assert other.stdout
        port = int(other.stdout.readline())
        with pytest.raises(SetupError, match=rf"is bound by pid {other.pid} \(python.*does not listen yet") as caught:
            listen(TcpAddress(ours, port))
        assert caught.value.status == 78
        other.communicate("")


def test_a_port_bound_at_another_address_is_free() -> None:
    """Two addresses of one machine do not clash."""
    with loader("127.0.0.2") as other:
        assert other.stdout
        listen(TcpAddress("127.0.0.1", int(other.stdout.readline()))).close()
        other.communicate("")


def leave_a_connection() -> int:
    """End a server whose last connection the kernel still remembers (TIME_WAIT); give its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            accepted, _ = server.accept()
            accepted.close()  # the server's end closes first, and so it is the one that waits
            assert client.recv(1) == b""
    return port


def test_connections_of_a_server_that_has_ended_keep_no_port() -> None:
    """A restart right after the end of the last server listens at once."""
    port = leave_a_connection()
    with pytest.raises(OSError, match="in use"), socket.socket() as plain:
        plain.bind(("127.0.0.1", port))  # it is there: a bind without SO_REUSEADDR fails for it
    listen(TcpAddress("127.0.0.1", port)).close()


def test_a_loading_server_is_found_behind_such_connections() -> None:
    """The kernel's tables show the old connections alone; the one that has bound the port is still named."""
    port = leave_a_connection()
    with loader("127.0.0.1", port) as other:
        assert other.stdout
        assert int(other.stdout.readline()) == port
        with pytest.raises(SetupError, match=rf"is bound by pid {other.pid} "):
            listen(TcpAddress("127.0.0.1", port))
        other.communicate("")


def test_a_kernel_that_lists_no_bound_sockets_still_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 6.8: refused without the holder's name, or with it where a vLLM's command line names the port."""
    monkeypatch.setattr(ports, "_BOUND_INACTIVE", 1 << 30)
    with loader("127.0.0.1") as other:
        assert other.stdout
        port = int(other.stdout.readline())
        with pytest.raises(SetupError, match="is bound by a process that this user may not see"):
            listen(TcpAddress("127.0.0.1", port))
        words = ["vllm", "serve", "m", "--port", str(port)]
        # `sh -s` takes any words and reads its script from a pipe, which stays empty.
        with subprocess.Popen(["vllm", "-s", *words[1:]], executable="/bin/sh", stdin=subprocess.PIPE) as vllm:
            monkeypatch.setattr(ports, "serve_arguments", lambda line: serve_arguments(line.replace(b"\0-s\0", b"\0")))
            with pytest.raises(SetupError, match=rf"is bound by pid {vllm.pid} \(vllm"):
                listen(TcpAddress("127.0.0.1", port))
            vllm.communicate(b"")
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
