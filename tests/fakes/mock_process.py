"""The stand-in engine as a real process for tests: start it, wait for what it prints, talk to it, end it.

    with MockEngine("--mock-tokens-per-second", "200", directory=tmp_path) as engine:
        engine.wait_ready()
        engine.fault("cut_answers", 5)
        assert engine.post("/v1/completions", {"prompt": "x"}).status == 200

Rules: every wait is for an event (a line, an exit, a byte) and fails after its timeout; leaving the block kills every
process that carries this engine's marker in its environment, orphans included.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

SOURCE = Path(__file__).resolve().parents[2] / "supervisor"
READY = "Application startup complete."
TIMEOUT = 15.0  # seconds any single wait may take
MARKER = "VSUP_TEST_MOCK"


@dataclass(frozen=True)
class Reply:
    """A whole answer; header names are lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


class _Connection(http.client.HTTPConnection):
    """An HTTP connection to a Unix socket or a port."""

    def __init__(self, engine: "MockEngine") -> None:
        super().__init__("127.0.0.1", engine.port or 80, timeout=TIMEOUT)
        self._path = engine.uds

    def connect(self) -> None:
        if not self._path:
            super().connect()
            return
        self.sock = socket.socket(socket.AF_UNIX)
        try:
            self.sock.settimeout(TIMEOUT)
            self.sock.connect(self._path)
        except OSError:
            self.sock.close()
            raise


class Stream:
    """An open event stream: iterate over its events; `close` leaves like a client that goes away."""

    def __init__(self, connection: _Connection, response: http.client.HTTPResponse) -> None:
        self._connection = connection
        self._response = response
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}

    def __iter__(self) -> Iterator[str]:
        """Events as text, without their blank line. Raises http.client.IncompleteRead when the stream is cut."""
        pending = b""
        while data := self._response.read1(65_536):
            *events, pending = (pending + data).split(b"\n\n")
            for event in events:
                yield event.decode()

    def close(self) -> None:
        """Close the connection, whatever is still under way."""
        self._response.close()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MockEngine:
    """One engine process. With `port` it listens on loopback, else on a Unix socket in `directory`."""

    def __init__(
        self,
        *args: str,
        directory: Path | None = None,
        port: int | None = None,
        env: dict[str, str] | None = None,
        model: str = "tiny",
    ) -> None:
        if port is None and directory is None:
            raise ValueError("give a directory for the socket or a port")
        self.port = port
        self.uds = "" if port is not None else str(Path(str(directory)) / f"{uuid.uuid4().hex[:8]}.sock")
        self.marker = uuid.uuid4().hex
        where = ["--host", "127.0.0.1", "--port", str(port)] if port is not None else ["--uds", self.uds]
        self._lines: deque[str] = deque(maxlen=5000)
        self._more = threading.Condition()
        self._open = True
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm_supervisor.mock", "serve", model, "--mock-start-time", "0", *where, *args],
            env=os.environ | {"PYTHONPATH": str(SOURCE), MARKER: self.marker} | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    # -- output and life ---------------------------------------------------------------------------------------

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                with self._more:
                    self._lines.append(line.decode("utf-8", "replace"))
                    self._more.notify_all()
        with self._more:
            self._open = False
            self._more.notify_all()

    @property
    def output(self) -> str:
        """Everything printed so far (the last 5000 lines)."""
        with self._more:
            return "".join(self._lines)

    def wait_line(self, text: str, timeout: float = TIMEOUT) -> str:
        """Wait until a line with `text` was printed and return it."""

        def found() -> str | None:
            return next((line for line in self._lines if text in line), None)

        with self._more:
            self._more.wait_for(lambda: found() is not None or not self._open, timeout)
            line = found()
        assert line is not None, f"no line with {text!r} in:\n{self.output}"
        return line

    def wait_ready(self) -> Self:
        """Wait until it listens."""
        self.wait_line(READY)
        return self

    def wait_exit(self, timeout: float = TIMEOUT) -> int:
        """Wait for the end of the main process: its status, negative for a signal."""
        return self.process.wait(timeout)

    def send_signal(self, number: int) -> None:
        """Send a signal to the main process alone."""
        self.process.send_signal(number)

    def stop(self) -> int:
        """TERM, then the exit status."""
        self.send_signal(signal.SIGTERM)
        return self.wait_exit()

    def pids(self, title: str = "VLLM::") -> list[int]:
        """Living processes of this engine whose command line begins with `title`, orphans included."""
        return [pid for pid in _marked(self.marker) if _title(pid).startswith(title)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in _marked(self.marker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(TIMEOUT)
        self._reader.join(TIMEOUT)

    # -- talking to it -----------------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        *,
        raw: bytes | None = None,
    ) -> Reply:
        """One request on a connection of its own; `body` is sent as JSON, `raw` as it is."""
        with contextlib.closing(_Connection(self)) as connection:
            connection.request(method, path, *_content(body, headers, raw))
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, found, response.read())

    def get(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        """GET."""
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        """POST as JSON."""
        return self.request("POST", path, body, headers)

    def stream(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Stream:
        """POST with `stream: true`; the head has been read."""
        connection = _Connection(self)
        connection.request("POST", path, *_content(body | {"stream": True}, headers, None))
        return Stream(connection, connection.getresponse())

    def fault(self, name: str, value: str | float | None = None) -> None:
        """Switch a fault on."""
        reply = self.post("/mock/fault", {"name": name} | ({} if value is None else {"value": value}))
        assert reply.status == 200, reply.body

    def clear(self, name: str) -> None:
        """Switch a fault off."""
        assert self.post("/mock/fault", {"name": name, "clear": True}).status == 200

    def metric(self, name: str, **labels: str) -> float | None:
        """Give the value of a series in /metrics whose labels include these; None if there is none."""
        for line in self.get("/metrics").body.decode().splitlines():
            if line.startswith((f"{name}{{", f"{name} ")) and all(
                f'{key}="{text}"' in line for key, text in labels.items()
            ):
                return float(line.rpartition(" ")[2])
        return None


def _content(body: Any, headers: dict[str, str] | None, raw: bytes | None) -> tuple[bytes | None, dict[str, str]]:
    if body is not None:
        return json.dumps(body).encode(), {"Content-Type": "application/json"} | (headers or {})
    return raw, headers or {}


def _marked(marker: str) -> list[int]:
    wanted = f"{MARKER}={marker}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode("utf-8", "replace")
    except OSError:
        return ""
