"""A real systemd for tests, and in it the shipped unit with the stand-in engine where vLLM would be.

Rules:
* Inside, the command stands where the unit looks for it, /opt/vllm-supervisor/bin/vllm-supervisor, and the stand-in at
  /opt/vllm/bin/vllm; so the unit under test is the file that is shipped, plus a drop-in of what one test changes.
* What else of this machine a test needs is seen inside at its own place, and every user of the rig may go there.
* Nothing in it outlives it; a test's unit is stopped and its drop-in removed at the test's end.
"""

import contextlib
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from fakes.supervisor_process import until

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "configs" / "systemd"
_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
_WRAPPER = f"""#!/bin/sh
export LD_LIBRARY_PATH=/opt/test/python/lib
exec /opt/test/python/bin/{_PYTHON} -I -c 'import sys
sys.path[:0] = ["/opt/test/src", "/opt/test/site"]
from vllm_supervisor.%s import main
sys.exit(main(sys.argv[1:]))' "$@"
"""


class Rig:
    """One booted systemd, and files in its root."""

    def __init__(self, *also: Path) -> None:
        """Boot, with the directories `also` seen inside; fails where that is not possible, never skips."""
        self._dir = Path(tempfile.mkdtemp(prefix="vsup-rig-"))
        self._script = ROOT / "scripts" / "systemd-rig"
        seen = {"python": sys.base_prefix, "site": sysconfig.get_path("purelib"), "src": str(ROOT / "supervisor")}
        binds = [f"{source}:/opt/test/{name}" for name, source in seen.items()]
        binds += [f"{path}:{path}" for path in also]
        done = subprocess.run([self._script, "start", self._dir, *binds], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self.pid = int((self._dir / "pid").read_text())
        self.write("/opt/vllm-supervisor/bin/vllm-supervisor", _WRAPPER % "cli.__main__", mode=0o755)
        self.write("/opt/vllm/bin/vllm", _WRAPPER % "mock", mode=0o755)
        for unit in UNITS.glob("*.*"):
            if unit.suffix in {".service", ".socket"}:
                self.write(f"/etc/systemd/system/{unit.name}", unit.read_text())
        for parent in {parent for path in also for parent in path.parents}:  # a home may be closed to everybody else
            self.path(str(parent)).chmod(self.path(str(parent)).stat().st_mode | 0o555)

    def path(self, inside: str) -> Path:
        """Where a path of the rig is seen from outside."""
        return Path(f"/proc/{self.pid}/root{inside}")

    def write(self, inside: str, text: str, mode: int = 0o644) -> None:
        """Write a file in the rig."""
        path = self.path(inside)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)

    def run(self, *words: str, within: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as root."""
        argv = [str(self._script), "exec", str(self._dir), *words]
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=within, check=False
        )

    def systemctl(self, *words: str) -> str:
        """Run systemctl inside; it must succeed."""
        done = self.run("systemctl", *words)
        assert done.returncode == 0, f"systemctl {words}: {done.stderr}"
        return done.stdout

    def pids(self, unit: str) -> set[int]:
        """Every process of a unit, as this machine counts."""
        found: set[int] = set()
        group = self.systemctl("show", "--value", "--property=ControlGroup", unit).strip()
        for file in self.path(f"/sys/fs/cgroup{group}").rglob("cgroup.procs") if group else ():
            with contextlib.suppress(OSError):
                found.update(map(int, file.read_text().split()))
        return found

    def named(self, unit: str, name: str) -> int:
        """Give the process of a unit that calls itself `name`, as this machine counts."""
        for pid in self.pids(unit):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith(name[:15]):
                    return pid
        raise AssertionError(f"no {name} among {self.pids(unit)}")

    def close(self) -> None:
        """End it and everything in it."""
        subprocess.run([self._script, "stop", self._dir], check=True)
        shutil.rmtree(self._dir, ignore_errors=True)


class Unit:
    """The shipped service of one port in a rig, changed by a drop-in."""

    def __init__(
        self, rig: Rig, port: int, serve: str = "", env: Sequence[str] = (), *, model: str = "tiny", **service: str
    ) -> None:
        """`serve` are further options of the engine, `env` lines of the environment file, `service` keys to change."""
        self.rig, self.port = rig, port
        self.name = f"vllm-supervisor@{port}.service"
        self._files = [f"/etc/systemd/system/{self.name}.d/test.conf", f"/etc/vllm-supervisor/{port}.env"]
        lines = (f"SERVE={model} --host 127.0.0.1 {serve}", "VLLM_SUPERVISOR_ENGINE__COMMAND=/opt/vllm/bin/vllm", *env)
        rig.write(self._files[1], "\n".join(lines) + "\n")
        rig.write(self._files[0], "[Service]\n" + "".join(f"{key}={value}\n" for key, value in service.items()))
        rig.systemctl("daemon-reload")

    def start(self, *, wait: bool = True, within: float = 60.0) -> None:
        """Ask for the start; with `wait` it has to succeed `within` so many seconds."""
        if wait:
            done = self.rig.run("systemctl", "start", self.name, within=within)
            assert done.returncode == 0, self.words()
        else:
            self.rig.systemctl("start", "--no-block", self.name)

    def show(self, name: str) -> str:
        """Give one property."""
        return self.rig.systemctl("show", "--value", f"--property={name}", self.name).strip()

    def pids(self) -> set[int]:
        """Every process of it, as this machine counts."""
        return self.rig.pids(self.name)

    @property
    def pid(self) -> int:
        """The main process, as this machine counts; the rig's own number stands last in NSpid."""
        inside = self.show("MainPID")
        for pid in self.pids():
            with contextlib.suppress(OSError):
                line = next(
                    line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line[:6] == "NSpid:"
                )
                if line.split()[-1] == inside:
                    return pid
        raise AssertionError(f"no main process {inside} among {self.pids()}\n{self.words()}")

    def journal(self) -> str:
        """Everything its processes have printed."""
        return self.rig.run("journalctl", "--no-pager", "--output=cat", f"--unit={self.name}").stdout

    def words(self) -> str:
        """What a failure message shows."""
        return self.rig.run("systemctl", "status", "--no-pager", self.name).stdout + self.journal()[-6000:]

    def until(self, fact: Callable[[], T | None], *, within: float, what: str) -> T:
        """Wait for a fact."""
        return until(fact, within=within, what=what, else_say=self.words)

    def until_state(self, *states: str, within: float = 20.0) -> str:
        """Wait for one of the ActiveStates."""
        return self.until(
            lambda: state if (state := self.show("ActiveState")) in states else None, within=within, what=f"{states}"
        )

    def tool(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a tool of ours for this unit, as an operator does: as root, from another shell."""
        return self.rig.run("/opt/vllm-supervisor/bin/vllm-supervisor", "--name", str(self.port), *words)

    def status(self) -> dict[str, Any]:
        """What `status --json` says."""
        done = self.tool("status", "--json")
        assert done.returncode == 0, done.stderr + self.words()
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def remove(self) -> None:
        """Stop it, forget it, remove its files and its state."""
        self.rig.run("systemctl", "stop", self.name, f"vllm-supervisor@{self.port}.socket")
        self.rig.run("systemctl", "reset-failed", self.name)
        self.rig.run("systemctl", "clean", self.name)
        for file in self._files:
            self.rig.path(file).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        """Use it in a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Clean up."""
        self.remove()


def lives(pid: int) -> bool:
    """Say whether a process lives; one that only waits to be reaped does not."""
    with contextlib.suppress(OSError):
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    return False
