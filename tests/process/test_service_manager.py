"""The real command under a service manager: what it tells, the sockets it is given, and what a reload changes."""

import itertools
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import trustme

from fakes.notify_socket import NotifySocket
from fakes.ports import free_port
from fakes.supervisor_process import Account, Client, Supervisor, command

# Becomes the command with a listening socket at descriptor 3, as systemd's fork does it.
ACTIVATE = """
import os, socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
os.dup2(sock.fileno(), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "front.socket"}
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[NotifySocket]:
    """Give a service manager's socket."""
    with NotifySocket(tmp_path / "notify") as manager:
        yield manager


def serve(
    account: Account, manager: NotifySocket, *options: str, before: tuple[str, ...] = ()
) -> tuple[Supervisor, Client]:
    """Start the stand-in under `manager` with a watchdog of two seconds."""
    port = free_port()
    supervisor = account.start(
        *before,
        *("--engine", "mock", "serve", "tiny", "--host", "127.0.0.1", "--port", str(port), *options),
        env={"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "2000000"},
    )
    return supervisor, Client(port)


def test_a_life_as_the_service_manager_hears_it(account: Account, manager: NotifySocket) -> None:
    """Extension while loading, READY with the engine, status in between, watchdog throughout, one farewell."""
    supervisor, client = serve(account, manager, "--mock-start-time", "2.5s")
    with client:
        supervisor.until(lambda: manager.values("READY"), within=15.0, what="READY")
        assert client.is_ready()
        (engine,) = (
            child for child in psutil.Process(supervisor.pid).children() if "mock" in " ".join(child.cmdline())
        )
        theirs = engine.environ()
        supervisor.until(lambda: len(manager.values("WATCHDOG")) >= 5, within=10.0, what="pings")
        supervisor.signal(signal.SIGTERM)
        assert supervisor.ends(within=10.0) == 0, supervisor.words()
    assert not [name for name in theirs if name == "NOTIFY_SOCKET" or name.startswith(("WATCHDOG_", "LISTEN_"))]
    ready, stopping = manager.first("READY=1"), manager.first("STOPPING=1")
    assert ready is not None
    assert stopping is not None
    assert manager.values("READY") == manager.values("STOPPING") == ["1"]
    extensions = [(told.at, word) for told in manager.messages for word in told.words if word.startswith("EXTEND_")]
    assert [word for at, word in extensions if at < ready] == ["EXTEND_TIMEOUT_USEC=30000000"]
    # 60 s drain + 30 s engine + 5 s documentation + 5 s reserve, once, with the farewell.
    assert [word for at, word in extensions if at > ready] == ["EXTEND_TIMEOUT_USEC=100000000"]
    status = manager.values("STATUS")
    assert sum(line.startswith("starting 0:0") for line in status) >= 2, status
    assert "ready, 0 in flight" in status
    beats = [told.at for told in manager.messages if "WATCHDOG=1" in told.words]
    assert max(later - earlier for earlier, later in itertools.pairwise(beats)) < 2.0


def test_ready_can_come_with_the_listener(account: Account, manager: NotifySocket) -> None:
    """With systemd.ready = "listening" READY does not wait for a load of minutes."""
    supervisor, client = serve(account, manager, "--mock-start-time", "5m", before=("--set", "systemd.ready=listening"))
    with client:
        supervisor.until(lambda: manager.values("READY"), within=10.0, what="READY")
        assert client.get("/readyz").status_code == 503
        supervisor.signal(signal.SIGTERM)
        assert supervisor.ends(within=10.0) == 0, supervisor.words()


def test_the_reason_of_a_failed_start_is_the_last_status(account: Account, manager: NotifySocket) -> None:
    """A start that gives up ends at once, and `systemctl status` keeps the engine's own line."""
    supervisor, client = serve(account, manager, "--mock-fault", "error=bad_value@load")
    with client:
        assert supervisor.ends(within=10.0) == 78, supervisor.words()
    assert manager.values("READY") == []
    assert any(line.startswith("gave up: ") for line in manager.values("STATUS")[-2:]), manager.values("STATUS")


def activated(account: Account, listening: socket.socket, *args: str) -> subprocess.Popen[bytes]:
    """Start the command with `listening` as its given socket."""
    program = [sys.executable, "-c", ACTIVATE, str(listening.fileno()), *command(), *args]
    return subprocess.Popen(
        program,
        env=account.env,
        pass_fds=[listening.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def test_given_sockets_are_served_and_outlive_us(account: Account) -> None:
    """The front door serves on the given socket, not on --port; a connection made while nobody runs is answered by the next life."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        other = free_port()
        for _ in range(2):
            waiting = socket.create_connection(listening.getsockname(), timeout=20.0)
            waiting.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            own = ("--name", "given", "--engine", "mock")
            process = activated(account, listening, *own, "serve", "tiny", "--port", str(other))
            try:
                assert waiting.recv(100).startswith(b"HTTP/1.1 200")
                assert not Client(other).listens()
                assert "(given by front.socket)" in account.tool("--name", "given", "status", "--json").stdout
                process.send_signal(signal.SIGTERM)
                assert process.wait(15.0) == 0
            finally:
                waiting.close()
                process.kill()
                process.wait()
    account.expect_nothing_left()


def write_certificate(directory: Path, authority: trustme.CA) -> None:
    """Write a fresh certificate for localhost, in place."""
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(str(directory / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(directory / "cert.pem"))


def served_certificate(port: int, trust: ssl.SSLContext) -> bytes | None:
    """Shake hands and give the certificate that was shown."""
    plain = socket.create_connection(("127.0.0.1", port), 5.0)
    with trust.wrap_socket(plain, server_hostname="localhost") as sock:
        return sock.getpeercert(binary_form=True)


def test_a_reload_renews_the_certificate_and_says_so(account: Account, manager: NotifySocket, tmp_path: Path) -> None:
    """HUP: new connections get the new certificate, RELOADING and READY bracket it; a broken file changes nothing."""
    authority = trustme.CA()
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    write_certificate(tmp_path, authority)
    files = ("--ssl-certfile", str(tmp_path / "cert.pem"), "--ssl-keyfile", str(tmp_path / "key.pem"))
    supervisor, client = serve(account, manager, *files)
    port = int(client.url.rpartition(":")[2])
    client.close()
    supervisor.until(lambda: manager.values("READY"), within=15.0, what="READY")
    first = served_certificate(port, trust)
    write_certificate(tmp_path, authority)
    assert served_certificate(port, trust) == first
    supervisor.signal(signal.SIGHUP)
    supervisor.until(lambda: len(manager.values("READY")) == 2, within=5.0, what="the second READY")
    second = served_certificate(port, trust)
    assert second != first
    assert len(manager.values("RELOADING")) == len(manager.values("MONOTONIC_USEC")) == 1
    (tmp_path / "cert.pem").write_text("no certificate")
    supervisor.signal(signal.SIGHUP)
    supervisor.until_said("the certificates in use stay")
    assert served_certificate(port, trust) == second
    supervisor.signal(signal.SIGTERM)
    assert supervisor.ends(within=10.0) == 0, supervisor.words()


def test_a_reload_tries_a_parked_engine_again(account: Account, manager: NotifySocket) -> None:
    """HUP leaves `parked`, as `restart` does."""
    supervisor, client = serve(
        account, manager, "--mock-fault", "error=bad_value@load", before=("--set", "restart.on_give_up=park")
    )
    with client:
        supervisor.until_said("parked: ")
        supervisor.signal(signal.SIGHUP)
        supervisor.until_said("restart requested by SIGHUP")
        supervisor.signal(signal.SIGTERM)
        assert supervisor.ends(within=10.0) == 0, supervisor.words()
