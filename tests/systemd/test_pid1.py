"""As PID 1 of a namespace, as in a container without an init: signals, orphans, exit statuses."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fakes.ports import free_port
from fakes.streams import Streams
from fakes.supervisor_process import Account, Client, command, until

pytestmark = pytest.mark.systemd

# Forks children that end at once and goes away itself: a hundred orphans for PID 1.
ORPHANS = """
import os
for _ in range(100):
    if os.fork() == 0:
        os.fork() or os._exit(0)
        os._exit(0)
"""


@pytest.fixture
def account() -> Iterator[Account]:
    """Give an account of its own."""
    with Account() as account:
        yield account


class Container:
    """A supervisor as PID 1 of a namespace; `unshare` outside passes its exit status on."""

    def __init__(self, account: Account, *options: str, before: tuple[str, ...] = ()) -> None:
        """Start the stand-in in it."""
        self.client = Client(port := free_port())
        self.port = port
        serve = ("--engine", "mock", "serve", "tiny", "--host", "127.0.0.1", "--port", str(port), *options)
        argv = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *command(), *before, *serve]
        self.process = subprocess.Popen(
            argv, env=account.env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        self.pid = until(self._child, within=5.0, what="PID 1")

    def _child(self) -> int | None:
        words = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(words[0]) if words else None

    def ready(self) -> None:
        """Wait until it is."""
        until(self.client.is_ready, within=30.0, what="ready", else_say=lambda: f"ended: {self.process.poll()}")

    def ends(self) -> int:
        """Give its exit status, as a container runtime would see it."""
        return self.process.wait(30.0)

    def zombies(self) -> int:
        """Count the ended processes that it has not reaped."""
        found = 0
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and f") Z {self.pid} " in (entry / "stat").read_text():
                    found += 1
        return found

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()
        self.client.close()


@pytest.fixture
def container(account: Account) -> Iterator[Container]:
    """Give one that is ready."""
    container = Container(account)
    container.ready()
    yield container
    container.close()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signals_without_a_default_for_pid_1_stop_in_order(
    container: Container, account: Account, number: signal.Signals, status: int
) -> None:
    """TERM and INT finish an open stream and end with 0 and 130, though the kernel would ignore them for PID 1."""
    with Streams(container.port, 2, max_tokens=40, ignore_eos=True) as streams:
        os.kill(container.pid, number)
    assert all(seen.complete for seen in streams.seen)
    assert container.ends() == status
    account.expect_nothing_left()


def test_orphans_are_reaped_and_no_status_is_stolen(container: Container) -> None:
    """A hundred orphans leave no zombie, and the engine's own end is still seen afterwards."""
    enter = ["nsenter", "--target", str(container.pid), "--pid", "--mount", "--", sys.executable, "-c", ORPHANS]
    subprocess.run(enter, check=True)
    until(lambda: container.zombies() == 0, within=5.0, what="no zombie")
    core = next(
        pid for pid in descendants(container.pid) if Path(f"/proc/{pid}/comm").read_text().startswith("VLLM::EngineCor")
    )
    os.kill(core, signal.SIGKILL)
    until(lambda: container.client.get("/readyz").status_code == 503, within=10.0, what="the loss is noticed")
    until(container.client.is_ready, within=20.0, what="ready again")
    assert container.zombies() == 0
    os.kill(container.pid, signal.SIGTERM)
    assert container.ends() == 0


def descendants(pid: int) -> list[int]:
    """Give the pids below `pid`."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def test_a_start_that_cannot_work_parks_and_still_stops(account: Account) -> None:
    """As PID 1 giving up is not exiting, so that no runtime loops: liveness 200, refusals say why, TERM ends it."""
    container = Container(account, "--mock-fault", "error=bad_value@load")
    try:
        until(container.client.listens, within=15.0, what="listening")
        until(lambda: container.client.get("/startupz").status_code == 200, within=15.0, what="parked")
        assert container.client.get("/livez").status_code == 200
        assert container.client.chat().json()["error"]["code"] == "engine_parked"
        os.kill(container.pid, signal.SIGTERM)
        assert container.ends() == 0
    finally:
        container.close()


def test_cut_requests_are_80_and_a_used_address_is_78(account: Account, container: Container) -> None:
    """The statuses are those of any other start."""
    argv = [
        "unshare",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child",
        *command(),
        "--name",
        "second",
        "--engine",
        "mock",
    ]
    second = subprocess.run(
        [*argv, "serve", "tiny", "--host", "127.0.0.1", "--port", str(container.port)],
        env=account.env,
        capture_output=True,
        text=True,
        timeout=20.0,
        check=False,
    )
    assert (second.returncode, "in use by" in second.stderr) == (78, True)
    short = Container(account, "--max-model-len", "1m", before=("--set", "drain.budget=200ms"))
    try:
        short.ready()
        with Streams(short.port, 1, max_tokens=100_000, ignore_eos=True):
            os.kill(short.pid, signal.SIGTERM)
        assert short.ends() == 80
    finally:
        short.close()
