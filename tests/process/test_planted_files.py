"""Links and files that somebody planted in the state directory: never followed, never written, never deleted."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes.ports import free_port
from fakes.supervisor_process import Account, StartMock
from vllm_supervisor.core.ledger import segment_name

CONTENT = "not yours\n"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Give a directory of somebody else's, with directories named like bundles and a file."""
    place = tmp_path / "victim"
    for name in ("1", "2", "7"):
        (place / name).mkdir(parents=True)
        (place / name / "kept").write_text(CONTENT)
    (place / "9").mkdir()
    (place / "file").write_text(CONTENT)
    return place


def tree(place: Path) -> dict[str, str | None]:
    """Give everything below a directory: the text of files, None for directories."""
    return {str(path.relative_to(place)): path.read_text() if path.is_file() else None for path in place.rglob("*")}


def _link_ledger(state: Path, victim: Path) -> None:
    (state / "ledger").symlink_to(victim)


def _link_segment(state: Path, victim: Path) -> None:
    (state / "ledger").mkdir()
    (state / "ledger" / segment_name(1)).symlink_to(victim / "file")


def _second_name_of_segment(state: Path, victim: Path) -> None:
    (state / "ledger").mkdir()
    (state / "ledger" / segment_name(1)).hardlink_to(victim / "file")


def _link_lock(state: Path, victim: Path) -> None:
    (state / "lock").symlink_to(victim / "file")


def _second_name_of_lock(state: Path, victim: Path) -> None:
    (state / "lock").hardlink_to(victim / "file")


def _pipe_as_lock(state: Path, _victim: Path) -> None:
    os.mkfifo(state / "lock")


@pytest.mark.parametrize(
    "plant",
    [_link_ledger, _link_lock, _second_name_of_lock, _pipe_as_lock],
)
def test_a_start_on_planted_files_is_refused(
    plant: Callable[[Path, Path], None], victim: Path, account: Account
) -> None:
    """One line, status 78, and what the link leads to is as it was."""
    state = account.home / "state" / "vllm-supervisor" / "n"
    state.mkdir(parents=True, mode=0o700)
    plant(state, victim)
    before = tree(victim)
    ended = account.tool("--name", "n", "--engine", "mock", "serve", "tiny", "--port", str(free_port()))
    assert ended.returncode == 78, ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert str(state) in ended.stderr
    assert tree(victim) == before


@pytest.mark.parametrize("plant", [_link_segment, _second_name_of_segment])
def test_the_ledger_begins_behind_a_planted_segment(
    plant: Callable[[Path, Path], None], victim: Path, account: Account, start_mock: StartMock
) -> None:
    """The segment stays as it is, the next number begins, and what the planted one leads to is as it was."""
    state = account.home / "state" / "vllm-supervisor" / "n"
    state.mkdir(parents=True, mode=0o700)
    plant(state, victim)
    before = tree(victim)
    supervisor, client = start_mock("--mock-start-time", "0s", before=("--name", "n"))
    supervisor.until(client.is_ready, within=30.0, what="ready")
    assert client.chat().status_code == 200
    supervisor.signal(signal.SIGTERM)
    assert supervisor.ends(within=20.0) == 0, supervisor.words()
    assert (state / "ledger" / segment_name(2)).stat().st_size > 0
    assert tree(victim) == before


def test_only_our_own_bundles_are_removed(victim: Path, account: Account, start_mock: StartMock) -> None:
    """Where `incidents` is a link no bundle is written and none removed; the start says so and goes on."""
    state = account.home / "state" / "vllm-supervisor" / "n"
    state.mkdir(parents=True, mode=0o700)
    (state / "incidents").symlink_to(victim)
    before = tree(victim)
    keep = ("--name", "n", "--set", "incidents.keep=1")
    supervisor, client = start_mock("--mock-start-time", "0s", before=keep)
    supervisor.until_said("no evidence bundle can be written: ")
    supervisor.until(client.is_ready, within=10.0, what="ready")
    supervisor.signal(signal.SIGQUIT)
    supervisor.until_said("nothing was saved in")
    assert tree(victim) == before
    supervisor.signal(signal.SIGTERM)
    assert supervisor.ends(within=10.0) == 0, supervisor.words()


def test_directories_among_the_bundles_stay(victim: Path, account: Account, start_mock: StartMock) -> None:
    """A directory with a number for a name that holds no account of ours is not counted, tidied or removed."""
    state = account.home / "state" / "vllm-supervisor" / "n"
    state.mkdir(parents=True, mode=0o700)
    victim.rename(state / "incidents")
    before = tree(state / "incidents")
    keep = ("--name", "n", "--set", "incidents.keep=1")
    supervisor, client = start_mock("--mock-start-time", "0s", before=keep)
    supervisor.until(client.is_ready, within=10.0, what="ready")
    for number in (10, 11):
        supervisor.signal(signal.SIGQUIT)
        supervisor.until_said(f"incidents/{number}")
        supervisor.until(
            lambda n=number: (state / "incidents" / str(n) / "threads.txt").exists(), within=15.0, what="the bundle"
        )
    supervisor.until(lambda: not (state / "incidents" / "10").exists(), within=10.0, what="the older bundle removed")
    after = tree(state / "incidents")
    assert {path: text for path, text in after.items() if not path.startswith("11")} == before


def test_a_socket_that_took_our_place_stays(account: Account, start_mock: StartMock) -> None:
    """At its end a supervisor removes its own control socket, and not what somebody else made in its place."""
    supervisor, client = start_mock("--mock-start-time", "0s", before=("--name", "n"))
    supervisor.until(client.is_ready, within=10.0, what="ready")
    control = account.home / "run" / "vllm-supervisor" / "n" / "control.sock"
    control.unlink()
    control.write_text(CONTENT)
    supervisor.signal(signal.SIGTERM)
    assert supervisor.ends(within=10.0) == 0, supervisor.words()
    assert control.read_text() == CONTENT
