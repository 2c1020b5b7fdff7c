"""The shipped user's service under a real `systemd --user`, for somebody who is not root, with the stand-in engine."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.ports import free_port
from fakes.rig import UNITS, Rig, lives
from fakes.streams import Streams
from fakes.supervisor_process import Client, until

pytestmark = pytest.mark.systemd

UID = "4711"
HOME = "/home/somebody"
UNIT = "vllm-supervisor.service"


class Somebody:
    """A user of the rig, with the shipped unit where its first comment says; only the port differs."""

    def __init__(self, rig: Rig) -> None:
        """Make the user, and do what the comments in the unit say."""
        self.rig, self.port = rig, free_port()
        self._root("useradd", "--create-home", "--home-dir", HOME, "--uid", UID, "--shell", "/bin/sh", "somebody")
        units = f"{HOME}/.config/systemd/user"
        rig.write(f"{units}/{UNIT}", (UNITS / "user" / UNIT).read_text())
        rig.write(f"{units}/{UNIT}.d/port.conf", f"[Service]\nEnvironment=PORT={self.port}\n")
        serve = "SERVE=tiny --host 127.0.0.1 --mock-tokens-per-second 20\n"
        rig.write(f"{HOME}/.config/vllm-supervisor.env", f"{serve}VLLM_SUPERVISOR_ENGINE__COMMAND=/opt/vllm/bin/vllm\n")
        rig.path(f"{HOME}/vllm-supervisor/bin").mkdir(parents=True)
        self._root("ln", "-s", "/opt/vllm-supervisor/bin/vllm-supervisor", f"{HOME}/vllm-supervisor/bin/")
        self._root("chown", "-R", f"{UID}:{UID}", HOME)

    def _root(self, *words: str) -> None:
        done = self.rig.run(*words)
        assert done.returncode == 0, (words, done.stderr)

    def linger(self) -> None:
        """Have the user's manager run without a login."""
        self._root("loginctl", "enable-linger", "somebody")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command as this user, in the environment of a login."""
        env = (f"HOME={HOME}", f"XDG_RUNTIME_DIR=/run/user/{UID}", "PATH=/usr/bin:/bin", "USER=somebody")
        return self.rig.run("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "env", "-i", *env, *words)

    def systemctl(self, *words: str) -> str:
        """Run `systemctl --user`; it must succeed."""
        done = self.run("systemctl", "--user", *words)
        assert done.returncode == 0, f"{words}: {done.stderr}{self.words()}"
        return done.stdout

    def show(self, name: str) -> str:
        """Give one property of the unit."""
        return self.systemctl("show", "--value", f"--property={name}", UNIT).strip()

    def words(self) -> str:
        """What a failure message shows."""
        status = self.run("systemctl", "--user", "status", "--no-pager", UNIT)
        return status.stdout + status.stderr + self.rig.run("journalctl", "--no-pager", "-n", "60").stdout

    def pids(self, group: Path) -> set[int]:
        """Every process of the unit, as this machine counts."""
        return {int(pid) for file in group.rglob("cgroup.procs") for pid in file.read_text().split()}

    def tool(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a tool of ours as this user."""
        return self.run(f"{HOME}/vllm-supervisor/bin/vllm-supervisor", "--name", "user", *words)

    def status(self) -> dict[str, Any]:
        """What `status --json` says."""
        done = self.tool("status", "--json")
        assert done.returncode == 0, done.stderr + self.words()
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def named(pid: int) -> str:
    """Give the name a process goes by, cut as the kernel cuts it."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


@pytest.fixture
def somebody(rig: Rig) -> Iterator[Somebody]:
    """Give the user, whose manager runs without a login and ends with the test."""
    somebody = Somebody(rig)
    somebody.linger()
    ask = ("systemctl", "--user", "is-system-running")
    until(lambda: somebody.run(*ask).stdout.strip() in {"running", "degraded"}, within=20.0, what="the user's manager")
    yield somebody
    rig.run("loginctl", "disable-linger", "somebody")
    rig.run("systemctl", "stop", f"user@{UID}.service")


def test_a_user_s_service_serves_without_a_login_and_stops_without_a_loss(somebody: Somebody) -> None:
    """Ready when `start` returns, as that user, its stop limit known; EngineCore's end is ours to mend; a stop loses none."""
    somebody.systemctl("daemon-reload")
    somebody.systemctl("start", UNIT)
    with Client(somebody.port) as client:
        assert client.chat().status_code == 200, somebody.words()
        group = somebody.rig.path(f"/sys/fs/cgroup{somebody.show('ControlGroup')}")
        assert "user@4711.service" in str(group)
        pids = somebody.pids(group)
        assert {Path(f"/proc/{pid}").stat().st_uid for pid in pids} == {int(UID)}
        assert "120 s allowed by TimeoutStopSec of vllm-supervisor.service" in somebody.tool("timeouts").stdout
        os.kill(next(pid for pid in pids if named(pid) == "VLLM::EngineCor"), signal.SIGKILL)
        until(
            lambda: somebody.status()["engine"]["incarnation"] == 2 and client.is_ready(),
            within=30.0,
            what="engine 2",
            else_say=somebody.words,
        )
        assert (somebody.show("ActiveState"), somebody.show("NRestarts")) == ("active", "0")
        pids = somebody.pids(group)
        with Streams(somebody.port, 5, max_tokens=40, ignore_eos=True) as streams:
            somebody.systemctl("stop", UNIT)
    assert all(seen.complete for seen in streams.seen), streams.seen
    assert (somebody.show("Result"), somebody.show("ExecMainStatus")) == ("success", "0")
    assert not group.exists()
    assert not [pid for pid in pids if lives(pid)]
