"""The control client against a server on a real Unix socket."""

import socket
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
