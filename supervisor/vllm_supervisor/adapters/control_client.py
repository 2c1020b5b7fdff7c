"""Speak with a running supervisor over its control socket: HTTP/JSON on a Unix socket.

The protocol, as the server must answer it:

| request | body | answer |
|---|---|---|
| `GET /status` | - | 200, the status object |
| `GET /events?n=N` | - | 200, `{"events": [EVENT, …]}`, the oldest first, at most N |
| `GET /events?n=N&follow=1` | - | 200, `application/x-ndjson`: one EVENT a line, the last N first, then each new one at once |
| `POST /drain` | `{"wait": bool, "hook": bool, "timeout_s": number or null}` | 200, `{"drained": bool, "in_flight": n}` |
| `POST /resume` | `{}` | 200, `{"admission": "open" or the reason it stays closed}` |
| `POST /restart` | `{"reason": text}` | 202, `{"incarnation": n}`, the one that is being replaced |
| `POST /stop` | `{}` | 202, `{"phase": word}` |
| `POST /report` | `{"source": text, "reason": text}` | 202, `{"recorded": true}` |

* EVENT is an object with at least `at` (UTC, ISO 8601), `event` (a word) and `why` (a sentence, may be empty).
* `wait` of a drain holds the answer until nothing is in flight, or `timeout_s` (null: the drain's own budget) is over;
  `drained` says which. `hook` says that a stop will follow (a service manager's or an orchestrator's pre-stop hook).
* A refusal has a status of 400 or above and `{"error": {"message": one line}}`; the line is shown as it is.
* Every answer but the followed events is JSON with a Content-Length.
"""

import contextlib
import errno
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from vllm_supervisor.core.errors import UsageError, UserError

if TYPE_CHECKING:
    import httpx

_CONNECT_TIMEOUT = 5.0
_ANSWER_TIMEOUT = 10.0  # everything but a waiting drain is answered from memory


class NotRunningError(UserError):
    """No running supervisor was found: exit status 3."""

    status = 3


class ControlError(UserError):
    """A running supervisor refused a request, or broke off: exit status 1."""

    status = 1


def choose(found: Sequence[tuple[str, Path]], name: str | None) -> Path:
    """Return the control socket to speak to: that of `name`, else of the only supervisor that runs.

    NotRunningError when there is none, UsageError when there are several and none is named.
    """
    if name is not None:
        found = [(known, path) for known, path in found if known == name]
    alive = [(known, path) for known, path in found if _accepts(path)]
    if not alive:
        raise NotRunningError(
            f"no running supervisor called {name} was found" if name else "no running supervisor was found"
        )
    if len(alive) > 1:
        names = ", ".join(f"{known} ({path})" if name else known for known, path in alive)
        raise UsageError(f"several supervisors run here: {names}; choose one with --name NAME")
    return alive[0][1]


def _accepts(path: Path) -> bool:
    """Say whether somebody listens: a socket's file outlives the process that made it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT)
        try:
            probe.connect(str(path))
        except PermissionError:
            raise ControlError(f"{path} is not open to this user; run as its owner, or set control.group") from None
        except OSError as error:
            return error.errno in {errno.EAGAIN, errno.ETIMEDOUT}  # its queue is full: it lives
    return True


class ControlClient:
    """A connection to one supervisor's control socket. Every method may raise NotRunningError and ControlError."""

    def __init__(self, path: Path) -> None:
        """Speak to the socket at `path`."""
        import httpx  # noqa: PLC0415  # a supervisor itself never needs it for this

        self._httpx = httpx
        self._path = path
        timeout = httpx.Timeout(_ANSWER_TIMEOUT, connect=_CONNECT_TIMEOUT)
        transport = httpx.HTTPTransport(uds=str(path))
        self._client = httpx.Client(transport=transport, base_url="http://control", timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._client.close()

    def get(self, path: str, **query: int) -> dict[str, Any]:
        """Return the JSON object at `path`."""
        with self._faults_told():
            return self._object(self._client.get(path, params=query))

    def post(self, path: str, body: Mapping[str, object], *, patient: bool = False) -> dict[str, Any]:
        """Send `body` and return the answer; `patient` waits for it as long as the connection lives."""
        timeout = self._httpx.Timeout(None, connect=_CONNECT_TIMEOUT) if patient else self._httpx.USE_CLIENT_DEFAULT
        with self._faults_told():
            return self._object(self._client.post(path, json=body, timeout=timeout))

    def lines(self, path: str, **query: int) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects of an endless answer, one a line, until the supervisor ends it."""
        timeout = self._httpx.Timeout(None, connect=_CONNECT_TIMEOUT)
        with self._faults_told(), self._client.stream("GET", path, params=query, timeout=timeout) as answer:
            if answer.status_code >= 400:
                answer.read()
                self._object(answer)
            for line in answer.iter_lines():
                if line:
                    yield json.loads(line)

    @contextlib.contextmanager
    def _faults_told(self) -> Iterator[None]:
        try:
            yield
        except self._httpx.ConnectError:
            raise NotRunningError(f"no supervisor listens on {self._path} any more") from None
        except self._httpx.TimeoutException:
            raise ControlError(f"the supervisor on {self._path} did not answer in time") from None
        except (self._httpx.TransportError, ValueError):
            raise ControlError(f"the supervisor on {self._path} broke off its answer; it may have ended") from None

    def _object(self, answer: "httpx.Response") -> dict[str, Any]:
        body = answer.json()
        if not isinstance(body, dict):
            raise ValueError("expected a JSON object")  # noqa: TRY004  # told as a broken answer, above
        if answer.status_code >= 400:
            error = body.get("error")
            message = error.get("message") if isinstance(error, dict) else None
            raise ControlError(str(message or f"the supervisor refused: HTTP {answer.status_code}"))
        return body
