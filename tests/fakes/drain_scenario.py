"""The published drain test as a scenario: three accepted requests, a late one, a budget of a second, and what must be left.

One request is short, one is a stream without end, and one goes on in the engine although it is told to stop. Run by
`scripts/drain-test`, which prints the rows, and by tests with the stand-in engine and with real vLLM.

With the stand-in the fault `keep_running` makes it ignore cancellation. Real vLLM has no such fault, so its EngineCore is
stopped (SIGSTOP) once the short request is complete: it can neither finish nor hear that it shall stop.
"""

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from fakes.books import Books
from fakes.ports import free_port
from fakes.supervisor_process import Account, Client, Supervisor, chat_body
from fakes.tiny_engine import START, TinyEngine

BUDGET = ("--set", "drain.budget=1s", "--set", "engine.stop_grace=3s", "--set", "health.interval=200ms")
ENDLESS = 100_000


@dataclass(frozen=True)
class Row:
    """One thing that was to be seen, and what was."""

    what: str
    expected: object
    seen: object

    @property
    def holds(self) -> bool:
        """Whether it was seen."""
        return self.expected == self.seen


@dataclass
class Asked:
    """One request in a thread of its own, and what came of it."""

    url: str
    name: str
    body: dict[str, Any]
    status: int | None = None
    events: list[str] = field(default_factory=list)
    whole: str = ""
    began: threading.Event = field(default_factory=threading.Event)

    def start(self) -> threading.Thread:
        """Ask."""
        thread = threading.Thread(target=self._ask, name=self.name, daemon=True)
        thread.start()
        return thread

    def _ask(self) -> None:
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream(
                "POST", f"{self.url}/v1/chat/completions?{self.name}", json=self.body, timeout=120.0, trust_env=False
            ) as response,
        ):
            self.status = response.status_code
            if not self.body.get("stream"):
                self.whole = response.read().decode()
                return
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line.removeprefix("data: "))
                    self.began.set()

    @property
    def last(self) -> str:
        """The last event, or the code of the error in it."""
        text = self.whole or (self.events[-1] if self.events else "")
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return str(json.loads(text)["error"]["code"])
        return text


class Watcher:
    """Reads the control socket of an account's only supervisor; a thread of it until that is gone."""

    def __init__(self, account: Account) -> None:
        """Find the socket."""
        (self._path,) = Path(account.home, "run").glob("vllm-supervisor/*/control.sock")
        self.seen: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def get(self, path: str) -> dict[str, Any]:
        """Read one path."""
        with contextlib.closing(http.client.HTTPConnection("supervisor", timeout=10.0)) as connection:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(10.0)
            connection.sock.connect(str(self._path))
            connection.request("GET", path)
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer

    def status(self) -> dict[str, Any]:
        """Read the status once."""
        return self.get("/status")

    def start(self) -> None:
        """Read the status again and again."""
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            while True:
                self.seen.append(self.status())

    def join(self) -> list[dict[str, Any]]:
        """Wait until the supervisor is gone; give everything that was read."""
        self._thread.join(30.0)
        return self.seen


def late_request(connection: http.client.HTTPConnection) -> tuple[int, str, str | None, str | None]:
    """Ask on a connection that was kept open; give status, error code, Connection and Retry-After."""
    body = json.dumps(chat_body())
    connection.request("POST", "/v1/chat/completions?late", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    told = json.loads(answer.read())
    return answer.status, told["error"]["code"], answer.headers["Connection"], answer.headers["Retry-After"]


def play(account: Account, supervisor: Supervisor, client: Client, *, real: bool) -> list[Row]:
    """Play the scenario on a ready supervisor; give the rows of the table. It has ended then."""
    kept = http.client.HTTPConnection(client.url.removeprefix("http://"), timeout=30.0)
    with contextlib.closing(kept):
        return _play(account, supervisor, client, kept, real=real)


def _play(
    account: Account, supervisor: Supervisor, client: Client, kept: http.client.HTTPConnection, *, real: bool
) -> list[Row]:
    watcher = Watcher(account)
    kept.request("GET", "/readyz")
    ready_before = kept.getresponse()
    ready_before.read()
    long = {"max_tokens": 30_000 if real else ENDLESS, "ignore_eos": True}
    endless = Asked(client.url, "endless", chat_body(stream=True, **long))
    ignoring = Asked(client.url, "ignoring", chat_body(stream=True, **long))
    short = Asked(client.url, "short", chat_body(stream=True, max_tokens=12, ignore_eos=True))
    asked = [endless, ignoring, short]
    core = supervisor.named("VLLM::EngineCor") if real else None
    threads = []
    for one in asked:
        threads.append(one.start())
        if not one.began.wait(30.0):
            raise AssertionError(f"{one.name} got no first token\n{supervisor.words()}")
    accepted_before = watcher.status()["requests"]["accepted"]
    supervisor.signal(signal.SIGTERM)
    watcher.start()
    supervisor.until(lambda: client.get("/readyz").status_code == 503, within=20.0, what="readiness off")
    alive = client.get("/livez").status_code
    late = late_request(kept)
    threads[asked.index(short)].join(30.0)
    if core is not None:
        os.kill(core.pid, signal.SIGSTOP)
    status = supervisor.ends(within=30.0)
    statuses = watcher.join()
    for thread in threads:
        thread.join(30.0)
    return [
        Row("accepted before the stop", 3, accepted_before),
        Row("readiness on the kept-open connection before the stop", 200, ready_before.status),
        Row("liveness during the drain", 200, alive),
        Row("late request on the kept-open connection", (503, "draining", "close"), late[:3]),
        Row("late request has a Retry-After", True, late[3] is not None),
        Row("short request: status, last event", (200, "[DONE]"), (short.status, short.last)),
        Row("endless stream: last event", "drain_deadline", endless.last),
        Row("the one that ignores cancellation: last event", "drain_deadline", ignoring.last),
        Row("engine saw the short one, and not the late one", (True, False), _engine_saw(supervisor, "short", "late")),
        *_ledger_rows(Books(account)),
        *_status_rows(statuses),
        Row("exit status (requests were cut)", 80, status),
        Row("processes left", [], account.leftovers()),
    ]


def _engine_saw(supervisor: Supervisor, *names: str) -> tuple[bool, ...]:
    return tuple(f"/v1/chat/completions?{name} HTTP" in supervisor.out.text for name in names)


def _status_rows(seen: list[dict[str, Any]]) -> list[Row]:
    after = [one for one in seen if one["requests"]["cancelled"]]
    return [
        Row("phases seen, in order", True, _in_order([one["phase"] for one in seen])),
        Row("after the cut the status showed the execution as running", True, _shows(after)),
    ]


def _in_order(phases: list[str]) -> bool:
    order = ["running", "admission_stop", "draining", "documenting", "ended"]
    return "draining" in phases and phases == sorted(phases, key=order.index)


def _shows(statuses: list[dict[str, Any]]) -> bool:
    return any(one["executions"]["running"] + one["executions"]["unknown"] for one in statuses)


def _ledger_rows(books: Books) -> list[Row]:
    report = books.report
    counts = {name: report["requests"][name] for name in ("accepted", "completed", "cancelled", "rejected")}
    told = [books.executions(one["id"]) for one in books.events("outcome", why="drain_deadline")]
    ignored = [("running", "connection_closed"), ("confirmed_stopped", "process_gone")]
    return [
        Row("outcome", {"accepted": 3, "completed": 1, "cancelled": 2, "rejected": 1}, counts),
        Row("execution that ignores cancellation: running, then stopped by its process's end", True, ignored in told),
        Row("both ledgers balance, audit holds", (True, True), (report["balance_holds"], books.audit.holds)),
        Row("late requests measured", 1, report["late_requests"]["n"]),
    ]


def mock(account: Account, *, options: tuple[str, ...] = ()) -> tuple[Supervisor, Client]:
    """Start the supervisor with a stand-in that ignores cancellation and takes half a second more to end."""
    port = free_port()
    faults = ("--mock-fault", "keep_running", "--mock-fault", "slow_term=500ms", "--max-model-len", "1m")
    address = ("--host", "127.0.0.1", "--port", str(port))
    supervisor = account.start(*BUDGET, "--engine", "mock", "serve", "tiny", *address, *faults, *options)
    return supervisor, Client(port)


def run(account: Account, start: Callable[[], tuple[Supervisor, Client]], *, real: bool) -> list[Row]:
    """Start, wait until it is ready, play."""
    supervisor, client = start()
    with client:
        supervisor.until(client.is_ready, within=START if real else 60.0, what="ready")
        return play(account, supervisor, client, real=real)


def play_mock(*options: str) -> list[Row]:
    """Play it with the stand-in engine."""
    with Account() as account:
        return run(account, lambda: mock(account, options=options), real=False)


def play_real(*options: str) -> list[Row]:
    """Play it with real vLLM, which two variables name."""
    engine = TinyEngine(Path(os.environ["TEST_VLLM"]), Path(os.environ["TEST_TINY_MODEL"]))
    with Account(engine.env) as account:
        return run(account, lambda: engine.serve(account, *options, before=BUDGET), real=True)


def main() -> int:
    """Print the table, once or, with --real, with one and with two API servers."""
    parser = argparse.ArgumentParser(description="the published drain test")
    parser.add_argument("--real", action="store_true", help="real vLLM; TEST_VLLM and TEST_TINY_MODEL name it")
    real = parser.parse_args().real
    failed = False
    for servers in ("1", "2"):
        options = ("--api-server-count", servers)
        rows = play_real(*options) if real else play_mock(*options)
        print(f"\n{'real vLLM' if real else 'stand-in engine'}, {servers} API server(s), drain.budget 1 s")  # noqa: T201
        for row in rows:
            seen = row.seen if row.holds else f"{row.seen}, expected {row.expected}"
            print(f"  {'ok  ' if row.holds else 'FAIL'}  {row.what}: {seen}")  # noqa: T201
            failed = failed or not row.holds
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
