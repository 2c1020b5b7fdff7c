"""Speak with a running supervisor over its control socket: HTTP/JSON on a Unix socket.

The protocol, as the server must answer it:

| request | body | answer |
|---|---|---|
| `GET /status` | - | 200, the status object |
| `GET /events?n=N` | - | 200, `{"events": [EVENT, …]}`, the oldest first, at most N |
| `GET /events?n=N&follow=1` | - | 200, `application/x-ndjson`: one EVENT a line, the last N first, then each new one at once |
| `POST /drain` | `{"wait": bool, "hook": bool, "timeout_s": number or null}` | 200, `{"drained": bool, "in_flight": n, "background": n, "cut": n}` |
| `POST /resume` | `{}` | 200, `{"admission": "open" or the reason it stays closed}` |
| `POST /restart` | `{"reason": text}` | 202, `{"incarnation": n}`, the one that is being replaced |
| `POST /stop` | `{}` | 202, `{"phase": word, "does": sentence}`: where we were, and what this stop does there |
| `POST /report` | `{"source": text, "reason": text}` | 202, `{"recorded": true}` |

* EVENT is an object with at least `at` (UTC, ISO 8601), `event` (a word) and `why` (a sentence, may be empty).
* `wait` of a drain holds the answer until nothing is in flight, or `timeout_s` (null: the drain's own budget) is
  over; `drained` says which, `background` counts the answered requests that run on, and `cut` those that the end of a
  drain has cut: by a stop that is under way, or by a restart while this call waited. `hook` says that a stop will
  follow (a service manager's or an orchestrator's pre-stop hook).
* A refusal has a status of 400 or above and `{"error": {"message": one line}}`; the line is shown as it is.
* Every answer but the followed events is JSON with a Content-Length.
"""

import contextlib
import errno
import http.client
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from vllm_supervisor.core.errors import UsageError, UserError

_CONNECT_TIMEOUT = 5.0
_ANSWER_TIMEOUT = 10.0  # everything but a waiting drain is answered from memory


class NotRunningError(UserError):
    """No running supervisor was found: exit status 3."""

    status = 3


class ControlError(UserError):
    """A running supervisor refused a request, did not answer, or broke off: exit status 1."""

    status = 1


def choose(found: Sequence[tuple[str, Path]], name: str | None, places: Sequence[Path]) -> Path:
    """Return the control socket to speak to: that of `name`, else of the only supervisor that runs.

    `places` are where was looked, to be told when nothing was found.
    NotRunningError when there is none, UsageError when there are several and none is named.
    """
    meant = found if name is None else [(known, path) for known, path in found if known == name]
    alive = [(known, path) for known, path in meant if _accepts(path)]
    if not alive:
        called = f" called {name}" if name else ""
        others = [known for known, path in found if name is not None and known != name and _lives(path)]
        raise NotRunningError(
            f"no running supervisor{called} was found in {' or '.join(map(str, places))}"
            + (f"; these run: {', '.join(others)}" if others else "")
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
            raise ControlError(
                f"{path}: a supervisor runs there, not accessible to you: use sudo, or set its control.group to a "
                "group of yours (its unit then needs SupplementaryGroups=GROUP as well)"
            ) from None
        except OSError as error:
            return error.errno in {errno.EAGAIN, errno.ETIMEDOUT}  # its queue is full: it lives
    return True


def _lives(path: Path) -> bool:
    """Say whether somebody listens there, or may: one who is not open to us is one that runs."""
    try:
        return _accepts(path)
    except ControlError:
        return True


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket; the host is a name for the Host header alone."""

    def __init__(self, path: Path, timeout: float | None) -> None:
        super().__init__("control")
        self._path = path
        self._patience = timeout

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_CONNECT_TIMEOUT)
        self.sock.connect(str(self._path))
        self.sock.settimeout(self._patience)


class ControlClient:
    """Asks one supervisor, each time over a connection of its own. Every method may raise NotRunningError and ControlError.

    The standard library's client is used: it is loaded in a fraction of the time of a full one.
    """

    def __init__(self, path: Path) -> None:
        """Speak to the socket at `path`."""
        self._path = path

    def get(self, path: str, **query: int) -> dict[str, Any]:
        """Return the JSON object at `path`."""
        with self._asked("GET", path, query=query, timeout=_ANSWER_TIMEOUT) as answer:
            return _object(answer)

    def post(self, path: str, body: Mapping[str, object], *, patient: bool = False) -> dict[str, Any]:
        """Send `body` and return the answer; `patient` waits for it as long as the connection lives."""
        with self._asked("POST", path, body=body, timeout=None if patient else _ANSWER_TIMEOUT) as answer:
            return _object(answer)

    def lines(self, path: str, **query: int) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects of an endless answer, one a line, until the supervisor ends it."""
        with self._asked("GET", path, query=query, timeout=None) as answer:
            if answer.status >= HTTPStatus.BAD_REQUEST:
                _object(answer)
            for line in answer:
                if line.strip():
                    yield json.loads(line)

    @contextlib.contextmanager
    def _asked(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, int] | None = None,
        body: Mapping[str, object] | None = None,
        timeout: float | None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Ask, hand out the answer, and tell every fault in a sentence."""
        connection = _Connection(self._path, timeout)
        try:
            self._connect(connection)
            content = None if body is None else json.dumps(body)
            target = f"{path}?{urlencode(query)}" if query else path
            connection.request(method, target, content, {"Content-Type": "application/json"} if content else {})
            with connection.getresponse() as answer:
                yield answer
        except (ConnectionRefusedError, FileNotFoundError):
            raise NotRunningError(f"no supervisor listens on {self._path} any more") from None
        except TimeoutError:
            late = f"the supervisor on {self._path} did not answer within {timeout:.0f} s"
            if method == "POST":
                late += "; the order may still be carried out: look at `status` and `events` before you repeat it"
            raise ControlError(late) from None
        except (OSError, http.client.HTTPException, ValueError):
            raise ControlError(f"the supervisor on {self._path} broke off its answer; it may have ended") from None
        finally:
            connection.close()

    def _connect(self, connection: _Connection) -> None:
        """Connect by itself: what fails here has not been sent."""
        try:
            connection.connect()
        except (TimeoutError, BlockingIOError):
            raise ControlError(f"the supervisor on {self._path} takes no connection; nothing was sent to it") from None


def _object(answer: http.client.HTTPResponse) -> dict[str, Any]:
    body = json.loads(answer.read())
    if not isinstance(body, dict):
        raise ValueError("expected a JSON object")  # noqa: TRY004  # told as a broken answer, above
    if answer.status >= HTTPStatus.BAD_REQUEST:
        error = body.get("error")
        message = error.get("message") if isinstance(error, dict) else None
        raise ControlError(str(message or f"the supervisor refused: HTTP {answer.status}"))
    return body
