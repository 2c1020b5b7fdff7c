"""A supervisor whose judgement is under test: its status, its engine's faults, its bundles, and clients that wait."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from fakes.supervisor_process import Account, Client, Supervisor, chat_body

CHAT = "/v1/chat/completions"


def settings(*values: str) -> tuple[str, ...]:
    """Give `values` as options of the command."""
    return tuple(word for value in values for word in ("--set", value))


class Judged:
    """A supervisor under test, with the ways to its control socket and to its engine's faults."""

    def __init__(self, account: Account, supervisor: Supervisor, client: Client) -> None:
        self.account = account
        self.supervisor = supervisor
        self.client = client
        self._control = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(account.home / f"run/vllm-supervisor/{client.port}/control.sock")),
            base_url="http://localhost",
            timeout=10.0,
        )

    def ready(self, incarnation: int = 1, within: float = 40.0) -> "Judged":
        """Wait for a ready engine, of this incarnation at least, that is judged."""
        self.wait(
            lambda status: (
                status["engine"]["state"] == "ready"
                and status["engine"]["incarnation"] >= incarnation
                and status["health"]["source"] != "life of the engine"
            ),
            f"engine {incarnation} ready",
            within,
        )
        return self

    def status(self) -> dict[str, Any]:
        """Ask for the status."""
        answer: dict[str, Any] = self._control.get("/status").json()
        return answer

    def wait(self, holds: Callable[[dict[str, Any]], object], what: str, within: float = 20.0) -> dict[str, Any]:
        """Wait until a status satisfies `holds`; give it."""

        def look() -> dict[str, Any] | None:
            status = self.status()
            return status if holds(status) else None

        return self.supervisor.until(look, within=within, what=what)

    def verdict(self, *wanted: str) -> dict[str, Any]:
        """Wait for one of these verdicts."""
        return self.wait(lambda status: status["health"]["verdict"] in wanted, f"a verdict of {wanted}")

    def report(self, source: str) -> dict[str, Any]:
        """Complain as another watchdog."""
        answer = self._control.post("/report", json={"source": source, "reason": "it looks hung"})
        assert answer.status_code == 202, answer.text
        found: dict[str, Any] = answer.json()
        return found

    @property
    def restarts(self) -> dict[str, int]:
        """Give the restarts by cause."""
        counts: dict[str, int] = self.status()["restarts"]["by_cause"]
        return counts

    def fault(self, name: str, value: str | None = None, *, clear: bool = False) -> None:
        """Switch a fault of the stand-in on or off, past the front door."""
        incarnation = self.status()["engine"]["incarnation"]
        [path] = (self.account.home / f"run/vllm-supervisor/{self.client.port}").glob(f"engine-*-{incarnation}/sock")
        body = {"name": name} | ({"clear": True} if clear else {"value": value} if value is not None else {})
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=10.0) as engine:
            assert engine.post("http://localhost/mock/fault", json=body).status_code == 200

    def events(self, name: str) -> list[dict[str, Any]]:
        """Give the log entries of one event."""
        return [entry for entry in self.supervisor.log() if entry["event"] == name]

    @property
    def bundles(self) -> list[Path]:
        """Give the evidence bundles, the oldest first."""
        found = (self.account.home / "state").glob("vllm-supervisor/*/incidents/*")
        return sorted((path for path in found if path.name.isdecimal()), key=lambda path: int(path.name))

    def close(self) -> None:
        """Close the connection to the control socket."""
        self._control.close()


@contextlib.contextmanager
def asking(client: Client, number: int = 1, **more: Any) -> Iterator[list[str]]:
    """Keep `number` streams open beside the test; what they received is complete when the block ends."""
    received: list[str] = []

    def ask() -> None:
        lines: list[str] = []
        body = chat_body(stream=True, **({"max_tokens": 100_000, "ignore_eos": True} | more))
        with (
            contextlib.suppress(httpx.TransportError),  # an answer that is cut ends with an aborted connection
            httpx.stream("POST", f"{client.url}{CHAT}", json=body, timeout=120.0, trust_env=False) as response,
        ):
            lines.extend(response.iter_lines())
        received.append("\n".join(lines))

    threads = [threading.Thread(target=ask) for _ in range(number)]
    for thread in threads:
        thread.start()
    yield received
    for thread in threads:
        thread.join(120.0)
        assert not thread.is_alive()
