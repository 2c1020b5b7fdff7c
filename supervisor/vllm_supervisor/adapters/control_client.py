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
* HEAD is answered as GET, without the body. A path that does not take the method: 405, with `Allow`. A request that does not
  arrive within 5 s: 408; a 33rd follower or waiting call: 429; whoever takes no byte of its answer for 10 s is disconnected.
* A refusal has a status of 400 or above and `{"error": {"message": one line}}`; the line is shown as it is.
* Every answer but the followed events is JSON with a Content-Length.
"""

import contextlib
import errno
import http.client
import io
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from vllm_supervisor.core.errors import UsageError, UserError
from vllm_supervisor.core.plain_text import one_line

_CONNECT_TIMEOUT = 5.0
_ANSWER_TIMEOUT = 10.0  # for a whole answer: everything but a waiting drain is given from memory
_MAX_ANSWER = 64 << 20  # bytes of an answer that are read, a status of thousands of processes among them
_MAX_LINE = 1 << 20  # of one event


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
            raise ControlError(_closed_to_us(path)) from None
        except OSError as error:
            return error.errno in {errno.EAGAIN, errno.ETIMEDOUT}  # its queue is full: it lives
    return True


def _lives(path: Path) -> bool:
    """Say whether somebody listens there, or may: one who is not open to us is one that runs."""
    try:
        return _accepts(path)
    except ControlError:
        return True


class _Reader(io.RawIOBase):
    """A socket's bytes until a moment, however slowly they trickle in. Raises TimeoutError."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        """`deadline` in monotonic seconds."""
        self._sock = sock
        self.deadline: float | None = deadline
        self.still_there: Callable[[], object] = lambda: (
            None
        )  # called at each `_ANSWER_TIMEOUT` without a byte, may raise

    def readable(self) -> bool:
        """Say yes: `BufferedReader` asks."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Wait for bytes; without a deadline for as long as the other side is still there."""
        while True:
            rest = _ANSWER_TIMEOUT if self.deadline is None else self.deadline - time.monotonic()
            if rest <= 0:
                raise TimeoutError
            self._sock.settimeout(rest)
            try:
                return self._sock.recv_into(buffer)
            except TimeoutError:
                if self.deadline is not None:
                    raise
                self.still_there()


class _Wire:
    """What `http.client` uses of a socket; its owner closes it."""

    def __init__(self, sock: socket.socket, reader: _Reader) -> None:
        self.sendall = sock.sendall
        self._reader = reader

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Return the reading side."""
        return io.BufferedReader(self._reader)

    def close(self) -> None:
        """Keep the socket: the answer is still being read."""


class ControlClient:
    """Asks one supervisor, each time over a connection of its own. Every method may raise NotRunningError and ControlError.

    Whatever listens there (a supervisor that hangs, another program), a call ends in time and with one sentence. The
    standard library's client is used: it is loaded in a fraction of the time of a full one.
    """

    def __init__(self, path: Path) -> None:
        """Speak to the socket at `path`."""
        self._path = path

    def get(self, path: str, **query: int) -> dict[str, Any]:
        """Return the JSON object at `path`."""
        with self._asked("GET", path, query=query) as answer:
            return _object(answer)

    def post(self, path: str, body: Mapping[str, object], *, patient: bool = False) -> dict[str, Any]:
        """Send `body` and return the answer; `patient` waits for it as long as the supervisor answers other calls."""
        with self._asked("POST", path, body=body, patient=patient) as answer:
            return _object(answer)

    def lines(self, path: str, **query: int) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects of an endless answer, one a line, until the supervisor ends it."""
        with self._asked("GET", path, query=query, endless=True) as answer:
            if answer.status >= HTTPStatus.BAD_REQUEST:
                _object(answer)
            for line in _lines_of(answer):
                if line.strip():
                    yield _mapping(json.loads(line))

    @contextlib.contextmanager
    def _asked(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, int] | None = None,
        body: Mapping[str, object] | None = None,
        patient: bool = False,
        endless: bool = False,
    ) -> Iterator[http.client.HTTPResponse]:
        """Ask, hand out the answer, and tell every fault in a sentence.

        A `patient` call has no time limit, an `endless` answer none once its head is there.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            try:
                self._connect(sock)
                reader = _Reader(sock, time.monotonic() + _ANSWER_TIMEOUT)
                reader.still_there = lambda: self.get("/status")
                connection = http.client.HTTPConnection("control")  # a name for the Host header alone
                connection.sock = _Wire(sock, reader)
                content = None if body is None else json.dumps(body)
                target = f"{path}?{urlencode(query)}" if query else path
                headers = {"Connection": "close"} | ({"Content-Type": "application/json"} if content else {})
                # A refusal may come before all was sent; it is still to be read.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.request(method, target, content, headers)
                if patient:
                    reader.deadline = None
                with connection.getresponse() as answer:
                    if endless:
                        reader.deadline = None
                    yield answer
            except (ConnectionRefusedError, FileNotFoundError):
                raise NotRunningError(f"no supervisor listens on {self._path} any more") from None
            except TimeoutError:
                late = f"the supervisor on {self._path} did not answer within {_ANSWER_TIMEOUT:.0f} s"
                if method == "POST":
                    late += "; the order may still be carried out: look at `status` and `events` before you repeat it"
                raise ControlError(late) from None
            except http.client.RemoteDisconnected:
                raise ControlError(self._broke_off()) from None
            except (http.client.BadStatusLine, http.client.LineTooLong, http.client.UnknownProtocol):
                raise ControlError(f"what listens on {self._path} is no vllm-supervisor: it speaks no HTTP") from None
            except (OSError, http.client.HTTPException, ValueError, RecursionError):
                raise ControlError(self._broke_off()) from None

    def _broke_off(self) -> str:
        return f"the supervisor on {self._path} broke off its answer; it may have ended"

    def _connect(self, sock: socket.socket) -> None:
        """Connect by itself: what fails here has not been sent."""
        sock.settimeout(_CONNECT_TIMEOUT)
        try:
            sock.connect(str(self._path))
        except (TimeoutError, BlockingIOError):
            raise ControlError(f"the supervisor on {self._path} takes no connection; nothing was sent to it") from None
        except PermissionError:
            raise ControlError(_closed_to_us(self._path)) from None
        sock.settimeout(_ANSWER_TIMEOUT)


def _closed_to_us(path: Path) -> str:
    return (
        f"{path}: a supervisor runs there, not accessible to you: use sudo, or set its control.group to a group of yours "
        "(its unit then needs SupplementaryGroups=GROUP as well)"
    )


def _lines_of(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the lines as they come. Not `readline`, which takes a missing chunk for the end: a supervisor that died is not one that stopped."""
    rest = b""
    while data := answer.read1(65536):
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
        if len(rest) > _MAX_LINE:
            raise ValueError("a line without an end")
    yield rest
    if answer.length:
        raise http.client.IncompleteRead(b"", answer.length)


def _object(answer: http.client.HTTPResponse) -> dict[str, Any]:
    content = answer.read(_MAX_ANSWER)
    if answer.status < HTTPStatus.BAD_REQUEST:
        return _mapping(json.loads(content))
    error: object = None
    with contextlib.suppress(ValueError, RecursionError):
        error = _mapping(json.loads(content)).get("error")
    message = error.get("message") if isinstance(error, dict) else None
    raise ControlError(one_line(str(message or f"the supervisor refused: HTTP {answer.status}"), 1000))


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")  # noqa: TRY004  # told as a broken answer, above
    return value
