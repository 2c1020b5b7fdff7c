"""Somebody removes what stands in /run under a running supervisor: a sweeper of /tmp, the end of a login session."""

import json
import shutil
from pathlib import Path

import pytest

from fakes.supervisor_process import Account, Client, StartMock


def place(account: Account, client: Client) -> Path:
    """Give the run directory of the supervisor on this client's port."""
    return account.home / "run" / "vllm-supervisor" / str(client.port)


def status(account: Account, client: Client) -> dict[str, dict[str, object]]:
    """Ask for the status by name."""
    told = account.tool("--name", str(client.port), "status", "--json")
    assert told.returncode == 0, told
    found: dict[str, dict[str, object]] = json.loads(told.stdout)
    return found


@pytest.mark.parametrize("removed", ["directory", "sockets", "login"])
def test_the_engine_lives_on_and_the_tools_find_us(removed: str, start_mock: StartMock, account: Account) -> None:
    """Directory, sockets alone or the whole XDG_RUNTIME_DIR: requests go on, no restart, and it is said once."""
    supervisor, client = start_mock()
    supervisor.until(client.is_ready, within=30.0, what="ready")
    with client.stream(max_tokens=2000, ignore_eos=True) as stream:
        next(stream)
        if removed == "sockets":
            for socket in [*place(account, client).glob("*.sock"), *place(account, client).glob("engine-*/sock")]:
                socket.unlink()
        else:
            shutil.rmtree(place(account, client) if removed == "directory" else account.home / "run")
        next(stream)
        assert client.chat().status_code == 200, "a new connection to the engine"
        supervisor.until(lambda: supervisor.events("run_directory_restored"), within=10.0, what="made again")
        assert status(account, client)["engine"]["incarnation"] == 1
    assert client.chat().status_code == 200
    supervisor.until(
        lambda: supervisor.events("engine_socket_removed"), within=20.0, what="the engine's socket is missed"
    )
    assert client.get("/readyz").status_code == 200
    # A new engine finds a place for its sockets.
    told = account.tool("restart", "--reason", "to see it start")
    assert told.returncode == 0, told
    supervisor.until(lambda: len(supervisor.events("ready")) == 2, within=30.0, what="the second engine is ready")
    assert client.chat().status_code == 200
    assert len(supervisor.events("run_directory_restored")) == len(supervisor.events("engine_socket_removed")) == 1
    assert account.tool("stop").returncode == 0
    assert supervisor.ends(within=20.0) == 0, supervisor.words()
    account.expect_nothing_left()


def test_a_stop_without_a_name_never_ends_another_one(account: Account, start_mock: StartMock) -> None:
    """Of two, one has lost its socket: without a name nothing is stopped; with one the right one is."""
    (one, first), (two, second) = start_mock(before=("--set", "run_dir=" + str(account.home / "run/one"))), start_mock()
    for supervisor, client in ((one, first), (two, second)):
        supervisor.until(client.is_ready, within=30.0, what="ready")
    shutil.rmtree(account.home / "run/one")
    (account.home / "run/one").write_text("in the way")
    one.until(lambda: one.events("run_directory_lost"), within=10.0, what="it cannot be made again")
    for words in (("stop",), ("restart", "--reason", "x"), ("drain",)):
        told = account.tool(*words)
        assert told.returncode == 2, told
        assert str(one.pid) in told.stderr, told
        assert str(second.port) in told.stderr, told
    looked = account.tool("status")
    assert looked.returncode == 0
    assert f"pid {one.pid}" in looked.stderr
    assert first.chat().status_code == second.chat().status_code == 200
    assert len(one.events("run_directory_lost")) == 1
    named = account.tool("--name", str(second.port), "stop")
    assert named.returncode == 0, named
    assert two.ends(within=20.0) == 0, two.words()
    alone = account.tool("stop")
    assert alone.returncode == 3, alone
    assert f"kill -TERM {one.pid}" in alone.stderr, alone
    one.process.terminate()
    assert one.ends(within=20.0) == 0, one.words()


def test_the_only_one_is_named_as_it_is_stopped(account: Account, start_mock: StartMock) -> None:
    """Without a name the only supervisor is meant, and the tool says which that was."""
    supervisor, client = start_mock()
    supervisor.until(client.is_ready, within=30.0, what="ready")
    told = account.tool("stop")
    assert told.returncode == 0, told
    assert told.stderr == f"supervisor {client.port} (pid {supervisor.pid}):\n"
    assert supervisor.ends(within=20.0) == 0
