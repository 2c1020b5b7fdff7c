"""The control client against a server on a real Unix socket."""

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from fakes.control_socket import serving
from vllm_supervisor.adapters import control_client
from vllm_supervisor.adapters.control_client import ControlClient, ControlError, NotRunningError, choose
from vllm_supervisor.core.errors import UsageError


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a short path for a socket."""
    return tmp_path_factory.mktemp("c") / "control.sock"


def test_get_and_post(path: Path) -> None:
    """Objects are read, and bodies written, as JSON over the socket."""
    with serving(path, {"/status": (200, b'{"pid": 1}'), "/stop": (202, b'{"phase": "running"}')}) as server:
        client = ControlClient(path)
        assert client.get("/status", n=3) == {"pid": 1}
        assert client.post("/stop", {"a": None}, patient=True) == {"phase": "running"}
        assert server.asked == [("GET", "/status?n=3", None), ("POST", "/stop", {"a": None})]


def test_lines(path: Path) -> None:
    """A followed answer gives one object a line, empty lines left out."""
    with serving(path, {"/events": (200, b'{"n": 1}\n\n{"n": 2}\n')}):
        client = ControlClient(path)
        assert list(client.lines("/events", follow=1)) == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize(
    ("status", "content", "told"),
    [
        (409, b'{"error": {"message": "already stopping"}}', "^already stopping$"),
        (500, b'{"x": 1}', "^the supervisor refused: HTTP 500$"),
        (500, b'{"error": "text"}', "^the supervisor refused: HTTP 500$"),
        (200, b"[1]", "broke off its answer"),
        (200, b"not json", "broke off its answer"),
        (200, b"", "broke off its answer"),
    ],
)
def test_refusals_and_broken_answers(path: Path, status: int, content: bytes, told: str) -> None:
    """A refusal shows the server's own sentence, a broken answer one of ours, with status 1."""
    with serving(path, {"/x": (status, content)}):
        client = ControlClient(path)
        for ask in (lambda: client.get("/x"), lambda: client.post("/x", {})):
            with pytest.raises(ControlError, match=told) as caught:
                ask()
            assert caught.value.status == 1


@pytest.mark.parametrize(("status", "content"), [(400, b'{"error": {"message": "n=x"}}'), (200, b"not json")])
def test_followed_answers_fail_the_same_way(path: Path, status: int, content: bytes) -> None:
    """A refused or broken followed answer is a ControlError as well."""
    with serving(path, {"/x": (status, content)}), pytest.raises(ControlError):
        list(ControlClient(path).lines("/x"))


def test_a_supervisor_that_does_not_answer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an answer an order is said to be perhaps still carried out, with where to look; a question is not."""
    monkeypatch.setattr(control_client, "_ANSWER_TIMEOUT", 0.05)
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(path))
        frozen.listen()
        with pytest.raises(ControlError, match="did not answer within") as caught:
            ControlClient(path).post("/restart", {"reason": "x"})
        assert caught.value.status == 1
        assert "may still be carried out: look at `status` and `events`" in str(caught.value)
        with pytest.raises(ControlError, match="did not answer within") as caught:
            ControlClient(path).get("/status")
        assert "carried out" not in str(caught.value)


@contextlib.contextmanager
def answering(path: Path, pieces: Iterable[bytes], pause: float = 0.0) -> Iterator[None]:
    """Answer every connection on `path` with these bytes, whatever is asked, until the caller or the bytes end."""
    over = threading.Event()

    def serve(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            sock.recv(65536)
            for piece in pieces:
                sock.sendall(piece)
                if over.wait(pause):
                    break
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):  # what was not read would reset the connection
                pass

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            if over.is_set():
                sock.close()
                return
            served.append(threading.Thread(target=serve, args=(sock,)))
            served[-1].start()

    served: list[threading.Thread] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield
        finally:
            over.set()
            with socket.socket(socket.AF_UNIX) as last:
                last.connect(str(path))
            for thread in (accepting, *served):
                thread.join()


OK = b"HTTP/1.1 200 OK\r\n"
NO_SUPERVISOR = "is no vllm-supervisor: it speaks no HTTP"
BROKE_OFF = "broke off its answer"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        pytest.param(b"SSH-2.0-OpenSSH_9.6\r\n", NO_SUPERVISOR, id="another protocol"),
        pytest.param(b"\0" * 4096, NO_SUPERVISOR, id="zeros"),
        pytest.param(b"x" * 200_000, NO_SUPERVISOR, id="a line without an end"),
        pytest.param(b"HTTP/1.1 OK\r\n\r\n", NO_SUPERVISOR, id="no status"),
        pytest.param(OK + b"X: " + b"y" * 200_000, NO_SUPERVISOR, id="a field without an end"),
        pytest.param(OK + b"A: b\r\n" * 500 + b"\r\n", BROKE_OFF, id="many fields"),
        pytest.param(OK + b"Content-Length: 10\r\n\r\n{", BROKE_OFF, id="broken off"),
        pytest.param(OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}", BROKE_OFF, id="no chunk"),
        pytest.param(OK + b"\r\n" + b"[" * 100_000, BROKE_OFF, id="deep"),
        pytest.param(OK + b"\r\n\xff\xfe", BROKE_OFF, id="no text"),
        pytest.param(OK + b"\r\n" + b"9" * 5000, BROKE_OFF, id="a long number"),
        pytest.param(b"HTTP/1.1 404 No\r\n\r\n<html>", "the supervisor refused: HTTP 404", id="a web server"),
        pytest.param(
            b"HTTP/1.1 500 No\r\n\r\n" + b"[" * 100_000, "the supervisor refused: HTTP 500", id="deep refusal"
        ),
        pytest.param(
            b'HTTP/1.1 409 No\r\n\r\n{"error": {"message": "a\\n\\u001b[31mb"}}', r"^a \?\[31mb$", id="escape sequences"
        ),
        pytest.param(b"", BROKE_OFF, id="nothing"),
    ],
)
def test_whatever_answers_is_told_in_a_sentence(path: Path, answer: bytes, told: str) -> None:
    """Rubbish, other protocols, broken JSON: a ControlError of one line for each way to ask, never anything else."""
    with answering(path, [answer]):
        client = ControlClient(path)
        for ask in (lambda: client.get("/x"), lambda: client.post("/x", {}), lambda: list(client.lines("/x"))):
            with pytest.raises(ControlError, match=told) as caught:
                ask()
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nX: ",
        OK + b"Content-Length: 999\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n3e7\r\n",
    ],
    ids=["a status line", "a field", "a body", "a chunk"],
)
def test_an_answer_that_trickles_in_ends_with_the_time_limit(
    path: Path, start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is for the whole answer, not for each byte of it."""
    monkeypatch.setattr(control_client, "_ANSWER_TIMEOUT", 0.1)
    trickle = itertools.chain([start], itertools.repeat(b" "))
    with answering(path, trickle, pause=0.02), pytest.raises(ControlError, match="did not answer within"):
        ControlClient(path).get("/x")


def test_interim_answers_without_end_end_with_the_time_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As does a server that only ever says 100."""
    monkeypatch.setattr(control_client, "_ANSWER_TIMEOUT", 0.1)
    interim = itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n")
    with answering(path, interim, pause=0.001), pytest.raises(ControlError, match="did not answer within"):
        ControlClient(path).get("/x")


def test_a_long_line_or_body_is_not_read_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer beyond the limits is a broken one."""
    monkeypatch.setattr(control_client, "_MAX_ANSWER", 1000)
    monkeypatch.setattr(control_client, "_MAX_LINE", 1000)
    with answering(path, [OK + b"\r\n{" + b" " * 2000 + b"}"]):
        for ask in (lambda: ControlClient(path).get("/x"), lambda: list(ControlClient(path).lines("/x"))):
            with pytest.raises(ControlError, match=BROKE_OFF):
                ask()


@pytest.mark.parametrize("head", [b"", OK + b"Content-Length: 2\r\n\r\n"], ids=["at once", "in its answer"])
def test_a_patient_call_ends_when_the_supervisor_hangs(
    path: Path, head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait for long, but only while the supervisor answers other calls."""
    monkeypatch.setattr(control_client, "_ANSWER_TIMEOUT", 0.1)
    with answering(path, [head, b""], pause=60):
        with pytest.raises(ControlError, match="did not answer within"):
            ControlClient(path).post("/drain", {}, patient=True)
        if head:
            with pytest.raises(ControlError, match="did not answer within"):
                list(ControlClient(path).lines("/events"))


def test_a_patient_call_waits_for_a_supervisor_that_lives(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several times the usual limit, while `/status` is answered."""
    monkeypatch.setattr(control_client, "_ANSWER_TIMEOUT", 0.05)
    looks = 0

    def look(_client: ControlClient, _path: str) -> dict[str, object]:
        nonlocal looks
        looks += 1
        return {}

    monkeypatch.setattr(ControlClient, "get", look)
    with answering(path, [OK, b"\r\n", b"{}"], pause=0.15):
        assert ControlClient(path).post("/drain", {}, patient=True) == {}
    assert looks >= 2


def test_a_supervisor_that_takes_no_connection(path: Path) -> None:
    """An order that found a full queue was not sent, and that is said."""
    with socket.socket(socket.AF_UNIX) as frozen, socket.socket(socket.AF_UNIX) as waiting:
        frozen.bind(str(path))
        frozen.listen(0)
        waiting.connect(str(path))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(control_client, "_CONNECT_TIMEOUT", 0.05)
            with pytest.raises(ControlError, match="nothing was sent to it"):
                ControlClient(path).post("/stop", {})


def test_a_supervisor_that_has_gone(path: Path) -> None:
    """Nobody behind the socket any more is "not running", status 3."""
    with pytest.raises(NotRunningError, match="no supervisor listens on") as caught:
        ControlClient(path).get("/status")
    assert caught.value.status == 3


def test_choosing(path: Path) -> None:
    """The named one, else the only one; a socket that nobody serves does not count."""
    stale = path.with_name("stale.sock")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(stale))
    other = path.with_name("other.sock")
    with serving(path, {}):
        assert choose([("a", path), ("b", stale)], None, []) == path
        assert choose([("a", path), ("b", stale)], "a", []) == path
        for found, name in (
            ([("b", stale)], None),
            ([], None),
            ([("a", path)], "b"),
            ([("a", path), ("b", stale)], "b"),
        ):
            with pytest.raises(NotRunningError) as caught:
                choose(found, name, [Path("/run/x")])
            assert caught.value.status == 3
        with serving(other, {}):
            with pytest.raises(UsageError, match="several supervisors run here: a, c; choose one with --name"):
                choose([("a", path), ("c", other)], None, [])
            with pytest.raises(UsageError, match=r"several supervisors run here: a .*, a .*; "):
                choose([("a", path), ("a", other)], "a", [])
            assert choose([("a", path), ("c", other)], "c", []) == other
