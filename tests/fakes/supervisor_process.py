"""A real supervisor process for tests: started like a person starts it, watched from outside, always cleaned up.

Rules:
* It is seen only as a user sees it: its exit status, its two outputs, HTTP on its address, its control socket, /proc.
* Nothing sleeps for luck: every wait is for a named fact and fails with the outputs when its time is over.
* Every process of one test account carries a marker in its environment, so the end of a test can prove that nothing
  is left, and removes by (pid, start time) what a failed test left behind.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, TypeVar

import httpx
import psutil

T = TypeVar("T")

_MARKER = "TEST_MARKER"
# What a service manager, a container or a developer's shell may have set, and a test must not inherit.
_FOREIGN = (
    "NOTIFY_SOCKET",
    "WATCHDOG_",
    "LISTEN_",
    "RUNTIME_DIRECTORY",
    "STATE_DIRECTORY",
    "VLLM_SUPERVISOR_",
    "VSUP_",
)


class Leftover(NamedTuple):
    """A process that should be gone."""

    pid: int
    name: str
    command: str


def until(fact: Callable[[], T | None], *, within: float, what: str, else_say: Callable[[], str] = str) -> T:
    """Ask `fact` until it gives something true; after `within` seconds fail, saying `what` did not come."""
    deadline = time.monotonic() + within
    while True:
        found = fact()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within:g} s: {what}\n{else_say()}")
        time.sleep(0.02)


def command() -> list[str]:
    """Give the command line of vllm-supervisor that belongs to the Python that runs the tests."""
    installed = Path(sys.executable).with_name("vllm-supervisor")
    if installed.exists():
        return [str(installed)]
    return [sys.executable, "-m", "vllm_supervisor.cli"]


class Account:
    """What a user's login is to the supervisor: its own run, state and temporary directories, and an environment."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        """Make the directories; `env` is set for every process of this account."""
        self.home = Path(tempfile.mkdtemp(prefix="vsup-test-"))
        for name in ("run", "state", "tmp"):
            (self.home / name).mkdir(mode=0o700)
        self.marker = uuid.uuid4().hex
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
        if command()[0] == sys.executable:
            self.env["PYTHONPATH"] = str(Path(__file__).parents[2] / "supervisor")
        self.env |= {
            "XDG_RUNTIME_DIR": str(self.home / "run"),
            "XDG_STATE_HOME": str(self.home / "state"),
            "TMPDIR": str(self.home / "tmp"),
            "TERM": "xterm",
            "VLLM_SUPERVISOR_ENGINE__SWEEP_DOMAIN": self.marker,  # tests beside this one have engines to lose
            _MARKER: self.marker,
            **(env or {}),
        }
        self._supervisors: list[Supervisor] = []

    def start(
        self, *args: str, terminal: bool = False, env: Mapping[str, str] | None = None, under: Sequence[str] = ()
    ) -> "Supervisor":
        """Start `vllm-supervisor ARGS`; on a terminal of its own if `terminal`, and by another program if `under` one."""
        supervisor = Supervisor(args, {**self.env, **(env or {})}, terminal=terminal, under=under)
        self._supervisors.append(supervisor)
        return supervisor

    def tool(self, *args: str, within: float = 20.0) -> subprocess.CompletedProcess[str]:
        """Run `vllm-supervisor ARGS` to its end and give its outputs and status."""
        return subprocess.run(
            [*command(), *args],
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within,
            check=False,
        )

    def leftovers(self) -> list[Leftover]:
        """Give every living process that carries this account's marker (titles are changed, the environment stays)."""
        wanted = f"{_MARKER}={self.marker}".encode()
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if wanted not in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    continue
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(Leftover(process.pid, process.name(), " ".join(process.cmdline())))
        return found

    def expect_nothing_left(self, within: float = 5.0) -> None:
        """Fail unless every process of this account is gone within `within` seconds, and the run directories are, too."""
        until(
            lambda: not self.leftovers(), within=within, what="no process left", else_say=lambda: f"{self.leftovers()}"
        )
        left = list(Path(self.home, "run", "vllm-supervisor").glob("*"))
        assert not left, f"run directories are left: {left}"

    def close(self) -> None:
        """Remove whatever is left: processes first, by pid, then the directories."""
        for supervisor in self._supervisors:
            supervisor.kill()
        for _ in range(100):  # a killed parent's children may fork once more
            left = self.leftovers()
            if not left:
                break
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.05)
        for supervisor in self._supervisors:
            supervisor.close()
        shutil.rmtree(self.home, ignore_errors=True)

    def __enter__(self) -> Self:
        """Use the account in a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Clean up, however the block ended."""
        self.close()


class Output:
    """One output of a process, collected by a thread as it comes, so that no pipe ever fills up."""

    def __init__(self, stream: IO[bytes]) -> None:
        """Collect `stream` until it ends."""
        self._stream = stream
        self._data = bytearray()
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # a terminal ends with EIO
            while data := os.read(self._stream.fileno(), 65536):
                self._data += data

    @property
    def text(self) -> str:
        """What has come so far."""
        return bytes(self._data).decode(errors="replace")

    def join(self) -> None:
        """Wait until the other side has closed it."""
        self._thread.join(5.0)

    def close(self) -> None:
        """Stop collecting."""
        self.join()
        if not self._thread.is_alive():
            self._stream.close()


class Supervisor:
    """One `vllm-supervisor serve …` (or any other of its commands) as a real process."""

    def __init__(
        self, args: Sequence[str], env: Mapping[str, str], *, terminal: bool, under: Sequence[str] = ()
    ) -> None:
        """Start it; `terminal` gives it a controlling terminal for both outputs, as a person's shell does.

        `under` is a program that runs the rest of its command line, such as nohup.
        """
        self.args = list(args)
        self.started_at = time.monotonic()
        self._terminal: IO[bytes] | None = None
        argv = [*under, *command(), *args]
        if terminal:
            master, slave = os.openpty()
            termios.tcsetwinsize(slave, (40, 120))
            self._terminal = os.fdopen(os.dup(master), "wb", buffering=0)
            # setsid(1) makes the terminal the controlling one and becomes the command: the pid stays.
            on_it = ["setsid", "--ctty", *argv]
            self.process = subprocess.Popen(on_it, env=env, stdin=slave, stdout=slave, stderr=slave)
            os.close(slave)
            self.out = self.err = Output(os.fdopen(master, "rb", buffering=0))
        else:
            self.process = subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            assert self.process.stdout
            assert self.process.stderr
            self.out, self.err = Output(self.process.stdout), Output(self.process.stderr)

    # -- what it said and what it is ---------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def words(self) -> str:
        """Everything it has said, for a failure message."""
        ended = f" ended with {self.process.returncode}" if self.process.poll() is not None else ""
        same = self.out is self.err
        return f"--- {self.args}{ended}\n--- stderr\n{self.err.text[-6000:]}\n" + (
            "" if same else f"--- stdout\n{self.out.text[-4000:]}"
        )

    def log(self) -> list[dict[str, Any]]:
        """Give its log so far: the JSON lines of its standard error."""
        lines = self.shown()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def shown(self) -> list[str]:
        """Give the lines of its standard error as a person sees them: what a terminal was told to erase is gone."""
        return re.sub(r"[^\n]*\r\x1b\[K", "", self.err.text).splitlines()

    def screen(self) -> list[str]:
        """Give the lines that a person sees on its terminal: erased status lines and colours are gone."""
        lines = [line.rpartition("\x1b[K")[2].strip("\r") for line in self.err.text.split("\n")]
        shown = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in lines]
        return [line for line in shown if line.strip()]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Give those of its log lines that tell this event."""
        return [line for line in self.log() if line.get("event") == name]

    def descendants(self) -> list[psutil.Process]:
        """Give its living descendants."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def named(self, name: str, *, within: float = 10.0) -> psutil.Process:
        """Wait for a descendant whose name (cut at 15 characters by the kernel) begins with `name`."""

        def look() -> psutil.Process | None:
            for process in self.descendants():
                with contextlib.suppress(psutil.Error):
                    if process.name().startswith(name[:15]):
                        return process
            return None

        return self.until(look, within=within, what=f"a process named {name}")

    # -- waiting -----------------------------------------------------------------------------------------------

    def until(self, fact: Callable[[], T | None], *, within: float, what: str) -> T:
        """Wait for `fact`; a failure shows what the supervisor said, and comes at once if it has ended."""

        def or_ended() -> T | None:
            ended = self.process.poll() is not None
            found = fact()
            if not found and ended:
                raise AssertionError(f"it ended before this came: {what}\n{self.words()}")
            return found

        return until(or_ended, within=within, what=what, else_say=self.words)

    def until_said(self, words: str, *, within: float = 10.0) -> str:
        """Wait until its standard error holds `words`; give all of it."""
        return self.until(lambda: self.err.text if words in self.err.text else None, within=within, what=repr(words))

    def ends(self, within: float) -> int:
        """Wait for its end and give its exit status (negative: the signal that ended it)."""
        try:
            status = self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not within {within:g} s: its end\n{self.words()}") from None
        self.out.join()
        self.err.join()
        return status

    # -- acting ------------------------------------------------------------------------------------------------

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def press_ctrl_c(self) -> None:
        """Type Ctrl-C on its terminal: the kernel signals the whole foreground group, as for a person."""
        assert self._terminal, "started without a terminal"
        self._terminal.write(b"\x03")

    def kill(self) -> None:
        """Kill it if it still lives, and reap it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10.0)

    def close(self) -> None:
        """Close our ends of its outputs."""
        if self._terminal:
            self._terminal.close()
        for output in {self.out, self.err}:
            output.close()


class Client:
    """A plain HTTP client for one server, with the few calls the tests make again and again."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        """Speak to `host`:`port`; connections are not kept, so that a drain is not held open by the test itself."""
        self.port = port
        self.url = f"http://{host}:{port}"
        self._http = httpx.Client(base_url=self.url, timeout=60.0, headers={"Connection": "close"}, trust_env=False)

    def get(self, path: str) -> httpx.Response:
        """GET one path."""
        return self._http.get(path)

    def post(self, path: str, body: Any) -> httpx.Response:
        """POST one JSON body."""
        return self._http.post(path, json=body)

    def chat(self, **more: Any) -> httpx.Response:
        """Ask for a small whole chat answer; `more` is merged into the request's body."""
        return self._http.post("/v1/chat/completions", json=chat_body(**more))

    @contextlib.contextmanager
    def stream(self, **more: Any) -> Iterator[Iterator[str]]:
        """Open a chat stream and give its `data:` values; the status must be 200."""
        with self._http.stream("POST", "/v1/chat/completions", json=chat_body(stream=True, **more)) as response:
            assert response.status_code == 200, response.read()
            yield (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))

    def listens(self) -> bool:
        """Say whether anything answers on the address."""
        with contextlib.suppress(httpx.TransportError):
            self._http.get("/livez")
            return True
        return False

    def is_ready(self) -> bool:
        """Say whether /readyz is 200."""
        with contextlib.suppress(httpx.TransportError):
            return self._http.get("/readyz").status_code == 200
        return False

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def __enter__(self) -> Self:
        """Use the client in a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


StartMock = Callable[..., tuple[Supervisor, Client]]  # what the fixture `start_mock` gives


def chat_body(**more: Any) -> dict[str, Any]:
    """Give the body of a small chat request."""
    return {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **more}
